"""What one worker says of itself while it trains: how far it is, and that its variables are those of the others."""

from typing import Any

import jax
import keras

from lockstep.data.device_placement import PlacedRows, Placement
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.drift_check import DriftCheck
from lockstep.execution.train_functions import STATE, StepHook

__all__ = ["ProgressReporter"]


class ProgressReporter(StepHook):
    """Counts the steps of all calls of a strategy, and reports each.

    Args:
        session: the workers.
        placement: the devices.
        check_every: number of training steps from one comparison of the variables to the next; 0: never.
    """

    def __init__(self, session: ControlClient, placement: Placement, check_every: int) -> None:
        self._session, self._check_every = session, check_every
        self._check = DriftCheck(session, placement)
        self._steps = self._trained = 0
        self._seen: set[Any] = set()

    def on_fetch(self) -> None:
        """See :class:`StepHook`."""
        self._session.report(self._steps, "data")

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        self._steps += 1
        shape = (id(model), kind, *(_kind(leaf) for leaf in jax.tree.leaves(batch, is_leaf=_is_rows)))
        self._session.report(self._steps, "step" if shape in self._seen else "compiling")
        self._seen.add(shape)

    def on_pause(self) -> None:
        """See :class:`StepHook`."""
        self._session.report(self._steps, "compiling")

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
        self._session.report(self._steps, "step")
        if kind != "train" or not self._check_every:
            return
        self._trained += 1
        if self._trained == 1 or self._trained % self._check_every == 0:
            variables = [x for name in STATE[kind] for x in _variables(model, name)]
            arrays = [array for part in state for array in part]
            self._check(self._trained, [f"{n} {x.path}" for n, x in enumerate(variables)], arrays)


def _variables(model: keras.Model, name: str) -> list[keras.Variable]:
    return list(model.optimizer.variables) if name == "optimizer_variables" else list(getattr(model, name))


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PlacedRows)


def _kind(leaf: Any) -> Any:
    return jax.typeof(leaf.array) if _is_rows(leaf) else jax.typeof(leaf)
