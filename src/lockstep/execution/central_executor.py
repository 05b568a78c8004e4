"""The plan that keeps all variables on one device, and sends the others what a step reads of them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax.sharding import SingleDeviceSharding

from lockstep.collectives import CrossDeviceOps
from lockstep.data.device_placement import Placement
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.gradient_extraction import GradientPrograms
from lockstep.execution.nonfinite_gate import NonFiniteGate, losses_of
from lockstep.execution.train_state import Step, TrainState, changes_of, dispatch_lock, with_changes, without_aliases

__all__ = ["CentralExecutor"]

Parts = Sequence[Sequence[Any]]


class CentralExecutor(SpmdExecutor):
    """Forward pass and gradients on the devices of ``placement``, variables and update at ``home``.

    Args:
        placement: devices that compute, and number of replicas.
        ops: adds up their gradients.
        home: where the variables are; may be one of these devices.
        model: whose steps are run.
    """

    def __init__(self, placement: Placement, ops: CrossDeviceOps, home: jax.Device, model: keras.Model) -> None:
        super().__init__(placement, ops)
        self._home, self._model = SingleDeviceSharding(home), model

    @property
    def uncompiled_on(self) -> jax.Device:
        """See :class:`Executor`."""
        (device,) = self._home.device_set
        return device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""
        run = self._training(step, gate) if kind == "train" else self._evaluating(step)

        def placed(state: Any, batch: Any) -> tuple[Any, Any]:
            batch = self.placement.place(batch)
            if not isinstance(state, _CentralState):
                state = _CentralState(jax.device_put(without_aliases(state), self._home))
            with dispatch_lock if len(self.placement.devices) > 1 else contextlib.nullcontext():
                return run(state, batch)

        return placed

    def _training(self, step: Step, gate: NonFiniteGate | None) -> Step:
        # Where a device of the placement is home too, it does not copy what it is sent, and so cannot give it away.
        donated = self.uncompiled_on not in self.placement.devices
        programs = GradientPrograms(step, self._model, self.placement, donated=donated)
        optimizer = self._model.optimizer

        def apply(values: Any, gradients: Any) -> tuple[Any, Any]:
            return (), optimizer.stateless_apply(values[1], gradients, values[0])

        places = (self._home, self._home)
        update = TrainState(apply, lambda values: places, self.placement.platform, donated=gate is None)

        def run(state: _CentralState, batch: Any) -> tuple[Any, Any]:
            program = programs.of(state, batch)
            sent = self._sent(state, program.reads)
            gradients, logs, changes = program(sent, batch)
            gradients, at_home = jax.device_put((gradients, changes), self._home)
            _, (trainable, own) = update((state[0], state[2]), gradients)
            others, metrics = with_changes((state[1], state[3]), at_home)
            new = (trainable, others, own, metrics)
            if gate:
                return logs, _CentralState(gate(state, new, jax.device_put(losses_of(logs), self._home)))
            others, metrics = with_changes((sent[1], sent[3]), changes)
            return logs, _CentralState(new, (_nothing(trainable), others, _nothing(own), metrics))

        return run

    def _evaluating(self, step: Step) -> Step:
        read = self.reading(step)

        def run(state: _CentralState, batch: Any) -> tuple[Any, Any]:
            sent = self._sent(state, [[True] * len(part) for part in state])
            result, new = read(tuple(sent), batch)
            changes = jax.device_put(changes_of(sent, new), self._home)
            return result, _CentralState(with_changes(state, changes), new)

        return run

    def _sent(self, state: "_CentralState", reads: Sequence[Sequence[bool]]) -> list[list[Any]]:
        """What the devices have of the state, and what they read of it."""
        missing = [
            [value if read and there is None else None for value, there, read in zip(*parts, strict=True)]
            for parts in zip(state, state.sent, reads, strict=True)
        ]
        return with_changes(state.sent, self.placement.put(missing))


class _CentralState(tuple[Any, ...]):
    """State that lies at home; ``sent`` is what the devices have of it, in the same order, None where they have nothing."""

    sent: Parts

    def __new__(cls, parts: Parts, sent: Parts | None = None) -> "_CentralState":
        """A state; by default the devices have nothing of it."""
        state = super().__new__(cls, parts)
        state.sent = [_nothing(part) for part in parts] if sent is None else sent
        return state


def _nothing(part: Sequence[Any]) -> list[None]:
    return [None] * len(part)
