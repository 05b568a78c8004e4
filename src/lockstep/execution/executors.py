"""How a step is run: all devices at once (the default), reproducibly, or without compiling.

A plan compiles a step that was written for the global batch, and says how the model's forward pass inside it is done.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lockstep.collectives import CrossDeviceOps
from lockstep.data.device_placement import PlacedRows, Placement, joined
from lockstep.devices.cpu_devices import usable_cores
from lockstep.devices.layout import Layout, rows_of_replicas
from lockstep.devices.xla_options import compiler_options
from lockstep.execution.call_splitter import CallSplitter
from lockstep.execution.cpu_rewrites import rewritten
from lockstep.execution.deterministic_executor import forward_apart
from lockstep.execution.nonfinite_gate import NonFiniteGate
from lockstep.execution.program_partition import ProgramPartition
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import SpmdForward, forward_eagerly, forward_on_devices
from lockstep.execution.train_state import (
    StateValues,
    Step,
    TrainState,
    changes_of,
    dispatch_lock,
    with_changes,
    without_aliases,
)

__all__ = ["DeterministicExecutor", "EagerExecutor", "Executor", "SpmdExecutor"]

Calls = tuple[tuple[int, ...], ...]


class Executor(Protocol):
    """One way to run a step.

    Attributes:
        of_global_batch: what becomes of a model that cannot be split into replicas.
        is_differentiable_twice: whether a forward pass may be, as gradient penalties of models within a model ask for.
    """

    of_global_batch: str
    is_differentiable_twice: bool

    @property
    def uncompiled_on(self) -> jax.Device:
        """Where steps run that are not to be compiled."""

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """``step`` as a function of a batch on the host; ``kind`` is "train", "test" or "predict".

        A training step with a gate gives the state that this lets through or keeps.
        """

    def calls_of(self, layout: Layout, split: CallSplitter) -> Calls:
        """For each device the rows of each call that the forward pass is made in."""

    def joined(self, rows: PlacedRows) -> jax.Array:
        """The global batch, while a step is traced."""

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """The forward pass on inputs that are joined, ``(rows, …)``, and that may lie on the devices already."""


class SpmdExecutor:
    """One program for all devices; equal replicas of a device are one batch of the compiler's.

    Args:
        placement: devices and number of replicas.
        ops: adds up the gradients of the devices.
        shard_optimizer: each device holds and updates a slice of the optimizer's variables.
    """

    of_global_batch = "and XLA divides the work"
    is_differentiable_twice = True

    def __init__(self, placement: Placement, ops: CrossDeviceOps, *, shard_optimizer: bool = False) -> None:
        self.placement, self.ops, self.shard_optimizer = placement, ops, shard_optimizer

    @property
    def uncompiled_on(self) -> jax.Device:
        """See :class:`Executor`."""
        return self.placement.first_own_device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""
        if kind == "train":
            return _placing(self.training(step, gate), self.placement, self._places, gate)

        return _placing(self.reading(step), self.placement)

    def training(self, step: Step, gate: NonFiniteGate | None = None) -> TrainState:
        """A training step, on placed arrays."""
        return TrainState(step, self._places, self.placement.platform, donated=gate is None)

    def reading(self, step: Step) -> Step:
        """A step that changes little or nothing, on placed arrays: the state is kept, and what did not change is not copied either."""

        def changes(state: Any, batch: Any) -> tuple[Any, Any]:
            result, new = step(state, batch)
            return result, changes_of(state, new)

        options = compiler_options(self.placement.platform)
        program = jax.jit(changes, out_shardings=self.placement.replicated, compiler_options=options)

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            result, new = program(state, batch)
            return result, with_changes(state, new)

        return run

    def calls_of(self, layout: Layout, split: CallSplitter) -> Calls:
        """As many as replicas, where something tells these apart; else one on each device.

        XLA for CPUs runs several convolutions at once faster than one of as many rows: of these there are as many as cores, and two
        at least, as a single call for the global batch would not be rewritten.
        """
        if split.tells_replicas_apart:
            return layout.per_device
        is_divided = self.placement.platform == "cpu" and split.has_convolution
        most = max(2, usable_cores() // len(self.placement.own_places)) if is_divided else 1
        return tuple(rows_of_replicas(sum(own), min(most, len(own)) or 1) for own in layout.per_device)

    def _places(self, state: Any) -> Any:
        """Where a training step's state lies."""
        places = [self.placement.replicated] * len(state)
        if not self.shard_optimizer:
            return tuple(places)
        sliced = [self.placement.sliced(value.shape) for value in state[2]]
        return (*places[:2], sliced, places[3])

    def joined(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`."""
        return joined(rows)

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """See :class:`Executor`."""
        arrays = [
            leaf.array if leaf is not None else self._placed(value, forward.layout)
            for value, leaf in zip(inputs, places, strict=True)
        ]
        forward = replace(forward, call=rewritten(forward.call, self.placement.platform))
        return forward_on_devices(forward, arrays, self.placement, self.ops, self.shard_optimizer)

    def _placed(self, value: Any, layout: Layout) -> jax.Array:
        """A new place for what the step made itself (augmented pictures, say)."""
        array = value if layout.is_full else value[layout.row_index()]
        return jax.lax.with_sharding_constraint(array, self.placement.cut)


class DeterministicExecutor:
    """Programs that do not depend on the number of devices (law 2).

    Args:
        placement: devices and number of replicas.
    """

    of_global_batch = "on every device alike"
    is_differentiable_twice = False

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @property
    def uncompiled_on(self) -> jax.Device:
        """See :class:`Executor`."""
        return self.placement.first_own_device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""
        donated = kind == "train" and gate is None
        return _placing(ProgramPartition(step, self.placement, donated=donated), self.placement, gate=gate)

    def calls_of(self, layout: Layout, split: CallSplitter) -> Calls:
        """See :class:`Executor`: each replica is one."""
        return layout.per_device

    def joined(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`."""
        return rows.array

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """See :class:`Executor`."""
        forward = replace(forward, call=rewritten(forward.call, self.placement.platform))
        return forward_apart(forward, inputs, self.placement)


class EagerExecutor:
    """Nothing is compiled, and replicas run one after the other on one device: for debugging.

    Args:
        device: that device.
    """

    of_global_batch = "on one device"
    is_differentiable_twice = True

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    @property
    def uncompiled_on(self) -> jax.Device:
        """See :class:`Executor`."""
        return self.device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            with jax.default_device(self.device):
                own = jax.device_put(without_aliases(state), self.device)
                result, new = step(own, batch)
                return result, gate(own, new, result) if gate else new

        return run

    def calls_of(self, layout: Layout, split: CallSplitter) -> Calls:
        """See :class:`Executor`: each replica is one."""
        return layout.per_device

    def joined(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`."""
        return joined(rows)

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """See :class:`Executor`."""
        return forward_eagerly(forward, [jnp.asarray(value) for value in inputs])


class _PlacedState(tuple[Any, ...]):
    """State that a step of this strategy returned: it lies on the devices already."""

    __slots__ = ()


def _placing(
    run: Step, placement: Placement, places: Callable[[Any], Any] | None = None, gate: NonFiniteGate | None = None
) -> Step:
    """``run``, with batch and state put on the devices first, and one step at a time where there are several.

    Args:
        run: a step on placed arrays.
        placement: the devices.
        places: where the parts of the state go; by default each device gets all of them.
        gate: gets the old state too.
    """

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = placement.hand_over(batch)
        if not isinstance(state, _PlacedState):
            state = placement.put(without_aliases(state), places(state) if places else None)
        with dispatch_lock if len(placement.devices) > 1 else contextlib.nullcontext():
            result, new = run(tuple(list(part) for part in state), placed)
            new = gate(state, new, result) if gate else new
        return result, _PlacedState(StateValues(part) for part in new)

    return step
