"""Executor that keeps all variables on one device, and sends the other devices the values that a step reads."""

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
from lockstep.execution.nonfinite_gate import NonFiniteGate, loss_logs
from lockstep.execution.train_state import (
    CompiledTrainStep,
    Step,
    apply_changes,
    dispatch_lock,
    state_changes,
    without_aliases,
)

__all__ = ["CentralExecutor"]

Parts = Sequence[Sequence[Any]]


class CentralExecutor(SpmdExecutor):
    """Computes gradients on the devices of ``placement``; ``home`` holds the variables and computes the update.

    Args:
        placement: devices that compute, and number of replicas.
        ops: adds up their gradients.
        home: the device of the variables; it may be one of the placement's.
        model: the model that is trained.
    """

    def __init__(self, placement: Placement, ops: CrossDeviceOps, home: jax.Device, model: keras.Model) -> None:
        super().__init__(placement, ops)
        self._home, self._model = SingleDeviceSharding(home), model

    @property
    def eager_device(self) -> jax.Device:
        """See :class:`Executor`."""
        (device,) = self._home.device_set
        return device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""
        run = self._train(step, gate) if kind == "train" else self._evaluate(step)

        def placed(state: Any, batch: Any) -> tuple[Any, Any]:
            batch = self.placement.place(batch)
            if not isinstance(state, _CentralState):
                state = _CentralState(jax.device_put(without_aliases(state), self._home))
            with dispatch_lock if len(self.placement.devices) > 1 else contextlib.nullcontext():
                return run(state, batch)

        return placed

    def _train(self, step: Step, gate: NonFiniteGate | None) -> Step:
        # If home is a device of the placement, transfers to it are no copies, and must not be donated.
        donated = self.eager_device not in self.placement.devices
        programs = GradientPrograms(step, self._model, self.placement, donated=donated)
        optimizer = self._model.optimizer

        def apply(values: Any, gradients: Any) -> tuple[Any, Any]:
            return (), optimizer.stateless_apply(values[1], gradients, values[0])

        shardings = (self._home, self._home)
        update = CompiledTrainStep(apply, lambda values: shardings, self.placement.platform, donated=gate is None)

        def run(state: _CentralState, batch: Any) -> tuple[Any, Any]:
            program = programs.program_for(state, batch)
            sent = self._transfer(state, program.is_used)
            gradients, logs, changes = program(sent, batch)
            gradients, at_home = jax.device_put((gradients, changes), self._home)
            _, (trainable, own) = update((state[0], state[2]), gradients)
            others, metrics = apply_changes((state[1], state[3]), at_home)
            new = (trainable, others, own, metrics)
            if gate:
                return logs, _CentralState(gate(state, new, jax.device_put(loss_logs(logs), self._home)))
            others, metrics = apply_changes((sent[1], sent[3]), changes)
            return logs, _CentralState(new, (_nothing(trainable), others, _nothing(own), metrics))

        return run

    def _evaluate(self, step: Step) -> Step:
        read = self.read_only_step(step)

        def run(state: _CentralState, batch: Any) -> tuple[Any, Any]:
            sent = self._transfer(state, [[True] * len(part) for part in state])
            result, new = read(tuple(sent), batch)
            changes = jax.device_put(state_changes(sent, new), self._home)
            return result, _CentralState(apply_changes(state, changes), new)

        return run

    def _transfer(self, state: "_CentralState", is_used: Sequence[Sequence[bool]]) -> list[list[Any]]:
        """Send the values that are used and that the devices lack; return all that the devices have."""
        missing = [
            [value if used and there is None else None for value, there, used in zip(*parts, strict=True)]
            for parts in zip(state, state.sent, is_used, strict=True)
        ]
        return apply_changes(state.sent, self.placement.put(missing))


class _CentralState(tuple[Any, ...]):
    """State on the home device; ``sent`` are the devices' copies of its values, in the same order, None for those without a copy."""

    sent: Parts

    def __new__(cls, parts: Parts, sent: Parts | None = None) -> "_CentralState":
        """Create a state; by default the devices have no copies."""
        state = super().__new__(cls, parts)
        state.sent = [_nothing(part) for part in parts] if sent is None else sent
        return state


def _nothing(part: Sequence[Any]) -> list[None]:
    return [None] * len(part)
