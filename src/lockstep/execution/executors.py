"""Executors: how a step is run on the devices, split, whole, replica by replica, with central storage, or over a mesh.

An executor compiles a step that was written for the global batch, and runs the model's forward passes inside it by replicas. Over a mesh the
step is one program, which XLA partitions as the shardings of its variables and of the rows say. Whether a call is split is decided in
``step_functions._ForwardInterceptor``.

XLA must not shard rows unevenly over a mesh: with jaxlib 0.10.2, on two axes, the gradient of an embedding is then wrong (what pads the
last shard is added to entry 0). A batch whose size is not divisible by the first axis is therefore computed on padding, if it is
proved that this changes no result; else every row of devices computes all rows.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import SingleDeviceSharding

from lockstep._keras.graph import copy_keras_mask, map_in_order
from lockstep._keras.patches import LAYER_CALL, patched_method
from lockstep._keras.recompute import recompute_layers
from lockstep._padded_array import without_padding
from lockstep.collectives import AutoAllReduce, CrossDeviceOps
from lockstep.devices.batch_layout import BatchLayout, rows_of_replicas
from lockstep.devices.cpu_devices import usable_cores
from lockstep.devices.placement import MeshPlacement, PlacedRows, Placement, is_large, local_values
from lockstep.devices.xla_flags import compiler_options
from lockstep.execution.call_splitter import (
    CallTrace,
    CannotSplitError,
    ModelCall,
    infer_output_spec,
    join,
    split,
    trace_call,
)
from lockstep.execution.compiled_step import (
    CompiledTrainStep,
    StateValues,
    Step,
    apply_changes,
    padded_state,
    start_lock,
    state_changes,
    step_on_padded_state,
    without_aliases,
)
from lockstep.execution.cpu_rewrites import rewrite_for_cpu
from lockstep.execution.deterministic_replicas import forward_isolated
from lockstep.execution.deterministic_step import ProgramPartition
from lockstep.execution.gradient_extraction import GradientPrograms
from lockstep.execution.model_parallel.model_shardings import ModelShardings
from lockstep.execution.nonfinite_gate import NonFiniteGate, loss_logs
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import (
    ReplicatedValues,
    SpmdForward,
    finish_result,
    forward_on_devices,
    replicated_arrays,
    run_local,
)
from lockstep.execution.step_loop import scan_steps
from lockstep.execution.variable_shards import (
    SEPARATE_COLLECTIVES,
    Recompute,
    Shard,
    gather_variables,
    layers_to_recompute,
    recompute_whole,
    shard_axes,
    state_shardings,
)
from lockstep.execution.xla_partitioner_workarounds import constrain_partitioning

CallSizes = tuple[tuple[int, ...], ...]


class Executor(abc.ABC):
    """One way to run a step.

    Attributes:
        global_batch_note: how a model runs that cannot be split into replicas; part of log messages.
        supports_second_derivatives: whether a forward pass may be differentiated twice, as for gradient penalties of models
            within a model.
        eager_device: the device of steps that are not compiled.
    """

    global_batch_note: str
    supports_second_derivatives: bool
    eager_device: jax.Device

    @abc.abstractmethod
    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """Return ``step`` as a function of a batch on the host; ``kind`` is "train", "test" or "predict".

        A training step with a gate returns the state that the gate chooses.
        """

    def partition_calls(self, layout: BatchLayout, trace: CallTrace) -> CallSizes:
        """Return for each device the number of rows of each call that the forward pass makes: by default one for each replica."""
        return layout.per_device

    def global_batch(self, rows: PlacedRows) -> jax.Array:
        """Return the global batch while a step is traced."""
        return rows.global_batch()

    @abc.abstractmethod
    def forward(self, forward: SpmdForward, inputs: list[Any], placed: list[PlacedRows | None]) -> ReplicaResult:
        """Run the forward pass on joined inputs, ``(rows, …)``; ``placed`` are those that are on the devices already."""

    def call_whole(self, call: ModelCall, placed: list[PlacedRows | None]) -> tuple[Any, list[Any], list[Any]]:
        """Make a call of a model on the global batch; ``placed`` are those of its inputs that are on the devices already.

        Returns:
            Outputs, new values of the non-trainable variables, and losses.
        """
        return call.make()


class SpmdExecutor(Executor):
    """Runs one program on all devices; the compiler sees equal replicas of a device as one batch.

    Args:
        placement: devices and number of replicas.
        ops: adds up the gradients of the devices.
        shard: "optimizer": each device keeps and updates a shard of the optimizer's variables; "variables": of all variables.
        recompute: which layers are recomputed in the backward pass, with ``shard="variables"``.
    """

    global_batch_note = "and XLA divides the work"
    supports_second_derivatives = True

    def __init__(
        self, placement: Placement, ops: CrossDeviceOps, *, shard: Shard = None, recompute: Recompute = None
    ) -> None:
        self.placement, self.ops, self.shard, self.recompute = placement, ops, shard, recompute
        self.eager_device = placement.first_local_device

    @property
    def scans_steps(self) -> bool:
        """Whether :meth:`compile_multi_step` is faster than single steps: not on CPUs, where XLA runs the steps of a loop slower."""
        return self.placement.platform != "cpu"

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        run = self.train_step(step, gate) if kind == "train" else self.read_only_step(step, kind)
        placed = _with_placement(run, self.placement, self.state_shardings, gate)

        def prepared(state: Any, batch: Any) -> tuple[Any, Any]:
            self.prepare(batch)
            return placed(state, batch)

        return prepared

    def compile_multi_step(self, step: Step) -> Step:
        """Return a training step as a function of several batches of equal shapes: one program."""
        run = self.compile(scan_steps(step), "train")

        def multi_step(state: Any, batches: Any) -> tuple[Any, Any]:
            self.prepare(batches[0])  # ``run`` would get all of them.
            return run(state, tuple(map(self.placement.place, batches)))

        return multi_step

    def train_step(self, step: Step, gate: NonFiniteGate | None = None) -> CompiledTrainStep:
        """Return a training step on placed arrays."""
        options = compiler_options(self.placement.platform, recomputes=self.recompute is not None)
        if self.shard == "variables":
            options = options | SEPARATE_COLLECTIVES.get(self.placement.platform, {})
        step = constrain_partitioning(step, self.placement.mesh)
        return CompiledTrainStep(step, self.state_shardings, options, donated=gate is None)

    def read_only_step(self, step: Step, kind: str) -> Step:
        """Return a step on placed arrays that keeps the old state, and copies no value that did not change.

        Rows that "predict" returns stay on their devices, and the host collects them, unless other processes have some of them.
        """
        stays = kind == "predict" and self.placement.is_local
        step = step_on_padded_state(constrain_partitioning(step, self.placement.mesh), self.state_shardings)

        def changes(state: Any, batch: Any) -> tuple[Any, Any]:
            result, new = step(state, batch)
            if stays:
                result = jax.tree.map(self._as_rows, result)
            return result, state_changes(state, new)

        options = compiler_options(self.placement.platform)
        whole = self.placement.replicated
        program = jax.jit(changes, out_shardings=(None if stays else whole, whole), compiler_options=options)

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            result, new = program(state, batch)
            return result, apply_changes(state, new)

        return run

    def _as_rows(self, leaf: Any) -> Any:
        """Shard an output by rows if the devices share them evenly; XLA shards others. It may be a number of Python."""
        is_even = jnp.ndim(leaf) > 0 and leaf.shape[0] % self.placement.row_shards == 0
        return jax.lax.with_sharding_constraint(leaf, self.placement.row_sharding) if is_even else leaf

    def partition_calls(self, layout: BatchLayout, trace: CallTrace) -> CallSizes:
        """Return one call for each replica if the model depends on the replica; otherwise one for each device.

        XLA for CPUs runs several convolutions at once faster than one with as many rows: models that have them get as many calls as
        there are cores, and at least two, as a single call on the global batch would not be rewritten.
        """
        if trace.depends_on_replica:
            return layout.per_device
        is_divided = self.placement.platform == "cpu" and trace.has_convolution
        most = max(2, usable_cores() // len(self.placement.local_indices)) if is_divided else 1
        return tuple(rows_of_replicas(sum(own), min(most, len(own)) or 1) for own in layout.per_device)

    def prepare(self, batch: Any) -> None:
        """Settle what depends on a batch, before its step is traced; :meth:`compile` does it, too."""

    def state_shardings(self, state: Any) -> Any:
        """Return the shardings of a state: trainable and non-trainable variables, for training those of the optimizer, and metrics."""
        return state_shardings(state, self.placement, self.shard)

    def call_whole(self, call: ModelCall, placed: list[PlacedRows | None]) -> tuple[Any, list[Any], list[Any]]:
        trainable, given = map(self._without_short_shards, (call.trainable, call.non_trainable))
        with recompute_whole(call.model, self.placement, self.recompute):
            outputs, state, losses = replace(call, trainable=trainable, non_trainable=given).make()
        unchanged = zip(call.non_trainable, given, state, strict=True)
        return outputs, [old if new is own else new for old, own, new in unchanged], losses

    def forward(self, forward: SpmdForward, inputs: list[Any], placed: list[PlacedRows | None]) -> ReplicaResult:
        arrays = self._place(inputs, placed, forward.layout)
        call, axes = forward.call, forward.axes
        if self.shard == "variables":
            call = gather_variables(call, forward.model, self.placement, self.recompute)
            axes = shard_axes(forward.trainable, self.placement), shard_axes(forward.non_trainable, self.placement)
        forward = replace(forward, call=rewrite_for_cpu(call, self.placement.platform), axes=axes)
        return forward_on_devices(forward, arrays, self.placement, self.ops, self.shard is not None)

    def _without_short_shards(self, values: list[Any]) -> list[Any]:
        """Gather the variables whose last shards are shorter: XLA is not to divide a forward pass on such shards."""
        if self.shard != "variables":
            return values
        return [self._on_all(value) if self.placement.has_short_shards(value.shape) else value for value in values]

    def _on_all(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, self.placement.replicated)

    def _place(self, inputs: list[Any], placed: list[PlacedRows | None], layout: BatchLayout) -> list[jax.Array]:
        """Return inputs on the devices; one that is not ``placed`` yet is an array that the step computed (augmented images, say)."""

        def on_devices(value: Any, leaf: PlacedRows | None) -> jax.Array:
            if leaf is not None:
                return leaf.array
            array = value if layout.is_full else value[layout.row_index()]
            return jax.lax.with_sharding_constraint(array, self.placement.row_sharding)

        return list(map(on_devices, inputs, placed))


class DeterministicExecutor(Executor):
    """Runs programs with the same bits on any number of devices. Sharded variables are gathered before a step."""

    global_batch_note = "on every device alike"
    supports_second_derivatives = False

    def __init__(self, placement: Placement, shard: Shard = None) -> None:
        self.placement, self.shard = placement, shard
        self.eager_device = placement.first_local_device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        program = ProgramPartition(step, self.placement, donated=kind == "train" and gate is None)
        replicated = self.placement.replicated

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            result, new = program(self.placement.put(without_padding(state)) if self.shard else state, batch)
            result = replicated_arrays(result, replicated)
            if self.shard is None and gate is None:
                return result, [ReplicatedValues(part, replicated) for part in new]
            new = replicated_arrays(new, replicated)
            return result, self.placement.put(padded_state(new, shardings(new)), shardings(new)) if self.shard else new

        def shardings(state: Any) -> Any:
            return state_shardings(state, self.placement, self.shard)

        return _with_placement(run, self.placement, shardings, gate)

    def global_batch(self, rows: PlacedRows) -> jax.Array:
        return rows.array

    def forward(self, forward: SpmdForward, inputs: list[Any], placed: list[PlacedRows | None]) -> ReplicaResult:
        forward = replace(forward, call=rewrite_for_cpu(forward.call, self.placement.platform))
        return forward_isolated(forward, inputs, self.placement)


class EagerExecutor(Executor):
    """Runs replicas one after the other on one device, without compiling: for debugging."""

    global_batch_note = "on one device"
    supports_second_derivatives = True

    def __init__(self, device: jax.Device) -> None:
        self.eager_device = device

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            with jax.default_device(self.eager_device):
                own = jax.device_put(without_aliases(without_padding(local_values(tuple(state)))), self.eager_device)
                result, new = step(own, batch)
                return result, gate(own, new, result) if gate else new

        return run

    def forward(self, forward: SpmdForward, inputs: list[Any], placed: list[PlacedRows | None]) -> ReplicaResult:
        rows = tuple(size for device in forward.calls for size in device)
        arrays = [jnp.asarray(value) for value in inputs]
        return finish_result(forward, run_local(forward, arrays, rows, first_replica=0, vectorize=False))


class _PlacedState(tuple[Any, ...]):
    """State that a step of this strategy returned, which is on the devices already."""

    __slots__ = ()


def _stored_values(state: Any) -> tuple[list[Any], ...]:
    """Return a state with plain lists: of the copies that the last step left, where it left copies, else of arrays."""
    return tuple(list(part.copies if isinstance(part, ReplicatedValues) else part) for part in state)


def _with_placement(
    run: Step, placement: Placement, shardings: Callable[[Any], Any], gate: NonFiniteGate | None
) -> Step:
    """Return ``run`` with batch and state put on the devices first, and, with several devices, one step at a time."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = placement.place_for_step(batch)
        if not isinstance(state, _PlacedState):
            state = _put_missing(without_aliases(state), shardings(state), placement)
        with start_lock(placement.devices):
            result, new = run(_stored_values(state), placed)
            new = gate(state, new, result) if gate else new
        return result, _PlacedState(part if isinstance(part, ReplicatedValues) else StateValues(part) for part in new)

    return step


def _put_missing(state: Any, shardings: Any, placement: Placement) -> Any:
    """Return a state on the devices. Arrays that are there stay: to find that out, JAX takes longer than a small step of ``train_on_batch``."""
    padded = padded_state(state, shardings)
    leaves, structure = jax.tree.flatten(padded)
    places = jax.tree.leaves(jax.tree.broadcast(shardings, padded))
    is_there = [
        isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == place
        for leaf, place in zip(leaves, places, strict=True)
    ]
    missing = [number for number, there in enumerate(is_there) if not there]
    found = placement.put([leaves[number] for number in missing], [places[number] for number in missing])
    for number, array in zip(missing, found, strict=True):
        leaves[number] = array
    return jax.tree.unflatten(structure, leaves)


Parts = Sequence[Sequence[Any]]


class CentralExecutor(SpmdExecutor):
    """Computes gradients on the devices of ``placement``; ``home``, which may be one of these, holds the variables and computes the update."""

    scans_steps = False  # The update is another program.

    def __init__(self, placement: Placement, ops: CrossDeviceOps, home: jax.Device, model: keras.Model) -> None:
        super().__init__(placement, ops)
        self.eager_device, self._home, self._model = home, SingleDeviceSharding(home), model

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        run = self._train(step, gate) if kind == "train" else self._evaluate(step, kind)

        def placed(state: Any, batch: Any) -> tuple[Any, Any]:
            batch = self.placement.place(batch)
            if not isinstance(state, _CentralState):
                state = _CentralState(jax.device_put(without_aliases(state), self._home))
            with start_lock(self.placement.devices):
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
        options = compiler_options(self.placement.platform)
        update = CompiledTrainStep(apply, lambda values: shardings, options, donated=gate is None)

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

    def _evaluate(self, step: Step, kind: str) -> Step:
        read = self.read_only_step(step, kind)

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


class ModelParallelExecutor(SpmdExecutor):
    """Runs the global batch as one replica, on all devices of a mesh; ``resolve`` resolves the shardings, given the inputs of a batch."""

    def __init__(
        self,
        placement: MeshPlacement,
        shardings: ModelShardings,
        resolve: Callable[[Any], None],
        recompute: Recompute,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(placement, AutoAllReduce(), shard=shardings.shard, recompute=recompute)
        self.shardings, self._resolve, self._log = shardings, resolve, log

    def prepare(self, batch: Any) -> None:
        if not self.shardings.is_resolved:
            self._resolve(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def state_shardings(self, state: Any) -> Any:
        return self.shardings.of_state(state)

    def global_batch(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`. A batch whose size is not divisible by the mesh is on all of its devices."""
        array = super().global_batch(rows)
        return array if rows.layout.is_full else self._on_all(array)

    def call_whole(self, call: ModelCall, placed: list[PlacedRows | None]) -> tuple[Any, list[Any], list[Any]]:
        call = replace(call, function=functools.partial(self._call_sharded, call.model, call.function))
        layout = self.placement.layout(call.rows) if call.rows else None
        if layout is None or layout.is_full:
            return call.make()
        try:
            return self._call_on_padding(call, placed, layout)
        except CannotSplitError as reason:
            self._log(
                f"each row of devices computes all rows of a batch whose size is not divisible by {layout.devices}: {reason}"
            )
            return self._make_on_all(call)

    def _make_on_all(self, call: ModelCall) -> tuple[Any, list[Any], list[Any]]:
        """Make a call on all rows on each device: XLA continues a sharding of arguments and results to what is between them."""
        cut = zip(call.leaves, call.is_cut, strict=True)
        own = replace(call, leaves=[self._on_all(leaf) if is_cut else leaf for leaf, is_cut in cut])
        outputs, state, losses = own.make()
        return map_in_order(lambda leaf: copy_keras_mask(leaf, self._on_all(leaf)), outputs), state, losses

    def _call_on_padding(
        self, call: ModelCall, placed: list[PlacedRows | None], layout: BatchLayout
    ) -> tuple[Any, list[Any], list[Any]]:
        """Make a call on rows and padding after them.

        Raises:
            CannotSplitError: it is not proved that the padding changes no result.
        """
        padded = layout.capacity * layout.devices
        whole = trace_call(call)
        spec = infer_output_spec(call, whole, {padded})
        if not spec.allows_padding:
            raise CannotSplitError("a result or a variable depends on all of them")
        inputs = self._place(call.inputs, placed, layout)
        result = split(spec, call)(call.trainable, call.non_trainable, inputs, call.shared, used=layout.rows)
        own = ReplicaResult([leaf[: layout.rows] for leaf in result.rows], result.means, result.state)
        outputs, losses = join(spec, own)
        state = [old if new is None else new for new, old in zip(own.state, call.non_trainable, strict=True)]
        return outputs, state, losses

    def _call_sharded(
        self,
        model: keras.Model,
        function: Callable[..., Any],
        trainable: list[Any],
        non_trainable: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a model's ``stateless_call`` with variables that are gathered where they are used."""
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        stored = [*trainable, *non_trainable]
        values = [self.shardings.gather(*pair) for pair in zip(variables, stored, strict=True)]
        shards = dict(zip(map(id, variables), zip(stored, values, strict=True), strict=True))
        layers = layers_to_recompute(model, self._is_of_block, self.recompute)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recompute_layers(layers, shards, self.shardings.gather))
            stack.enter_context(self._constrained_outputs())
            return function(values[: len(trainable)], values[len(trainable) :], *args, **kwargs)

    def _is_of_block(self, variable: keras.Variable) -> bool:
        """Return whether layers with this variable are blocks: their inner results take memory, too, if it is whole."""
        return is_large(tuple(variable.shape)) or any(self.shardings.axes_of(variable))

    @contextlib.contextmanager
    def _constrained_outputs(self) -> Iterator[None]:
        """Shard what layers return as the rules say."""

        def around(layer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                return map_in_order(functools.partial(self.shardings.constrain_output, layer), method(*args, **kwargs))

            return call

        with patched_method(LAYER_CALL, self.shardings.layers_with_rules(), around):
            yield
