"""Progress of a worker's steps for its heartbeats, and a check that the variables are equal on all devices of all workers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from lockstep.data.device_placement import PlacedRows, Placement
from lockstep.distributed.control.control_client import ControlClient
from lockstep.execution.per_device import PerDeviceProgram, to_per_device
from lockstep.execution.train_functions import STATE, StepHook

__all__ = ["ProgressReporter"]

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ProgressReporter(StepHook):
    """Counts the steps of all calls of a strategy, and reports each to the control client.

    Args:
        client: the control client.
        placement: the devices.
        check_every: number of training steps between two comparisons of the variables; 0: no comparison.
    """

    def __init__(self, client: ControlClient, placement: Placement, check_every: int) -> None:
        self._client, self._check_every = client, check_every
        self._check = _DriftCheck(client, placement)
        self._steps = self._trained = 0
        self._seen: set[Any] = set()

    def on_fetch(self) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "data")

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        self._steps += 1
        shape = (id(model), kind, *(_kind(leaf) for leaf in jax.tree.leaves(batch, is_leaf=_is_rows)))
        self._client.report(self._steps, "step" if shape in self._seen else "compiling")
        self._seen.add(shape)

    def on_pause(self) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "compiling")

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "step")
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


class _DriftCheck:
    """Compares checksums of the variables, device by device and worker by worker.

    Args:
        client: the control client.
        placement: the devices.
    """

    def __init__(self, client: ControlClient, placement: Placement) -> None:
        self._client, self._placement = client, placement
        self._sums = PerDeviceProgram(lambda arrays: [jnp.stack([_checksum(array) for array in arrays])], placement)

    def __call__(self, step: int, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Compare the variables of all devices and workers.

        Args:
            step: number of the step, for the message.
            names: of the variables.
            arrays: their values, one for each name, replicated over the devices.

        Raises:
            ClusterError: they differ; it names the worker and the variable, on every worker.
        """
        (sums,) = self._sums([to_per_device(array, self._placement) for array in arrays])
        columns = zip(*(np.asarray(part).tolist() for part in sums if part is not None), strict=True)
        own = {
            name: column[0] if len(set(column)) == 1 else list(column)
            for name, column in zip(names, columns, strict=True)
        }
        self._client.agree(f"the checksums of the variables after step {step}", own)


def _checksum(array: jax.Array) -> jax.Array:
    """Return the weighted sum of the array's bits modulo 2 ** 32; each number has another weight."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    bits = lax.bitcast_convert_type(array, _UNSIGNED[min(size, 4)]).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
