"""Runs a step as one program, which XLA partitions over a mesh as the shardings of its variables and of the rows say.

XLA must not shard rows unevenly here: with jaxlib 0.10.2, on a mesh of two axes, the gradient of an embedding is then wrong (what pads the
last shard is added to entry 0). A batch that the first axis does not divide is therefore computed on padding, if it is proved that this
changes no result; else every row of devices computes all rows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import keras

from lockstep._keras.graph import recompute_layers
from lockstep._keras.patches import LAYER_CALL, patched_method
from lockstep.collectives import AutoAllReduce
from lockstep.data.device_placement import MeshPlacement, PlacedRows
from lockstep.devices.batch_split import Layout
from lockstep.execution.call_splitter import CannotSplitError, ModelCall, infer_output_spec, join, split, trace_call
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.gathered_variables import Recompute, layers_to_recompute
from lockstep.execution.model_parallel.model_shardings import ModelShardings
from lockstep.execution.nonfinite_gate import NonFiniteGate
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.train_state import Step


class ModelParallelExecutor(SpmdExecutor):
    """Runs the global batch as one replica, on all devices of a mesh.

    Args:
        placement: the mesh.
        shardings: of the model's variables.
        settle: settles them, given the inputs of a batch.
        recompute: which layers are recomputed in the backward pass.
        log: logs a sentence about the model, once.
    """

    def __init__(
        self,
        placement: MeshPlacement,
        shardings: ModelShardings,
        settle: Callable[[Any], None],
        recompute: Recompute,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(placement, AutoAllReduce(), shard=shardings.shard, recompute=recompute)
        self.shardings, self._settle, self._log = shardings, settle, log

    def compile(self, step: Step, kind: str, gate: NonFiniteGate | None = None) -> Step:
        """See :class:`Executor`."""
        run = super().compile(step, kind, gate)

        def prepared(state: Any, batch: Any) -> tuple[Any, Any]:
            self.prepare(batch)
            return run(state, batch)

        return prepared

    def compile_joined(self, step: Step) -> Step:
        """See :class:`SpmdExecutor`."""
        run = super().compile_joined(step)

        def prepared(state: Any, batches: Any) -> tuple[Any, Any]:
            self.prepare(batches[0])
            return run(state, batches)

        return prepared

    def prepare(self, batch: Any) -> None:
        """See :class:`SpmdExecutor`."""
        if not self.shardings.is_settled:
            self._settle(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def state_shardings(self, state: Any) -> Any:
        """See :class:`Executor`."""
        return self.shardings.of_state(state)

    def join_rows(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`. Rows that the mesh does not divide are on all of its devices."""
        array = super().join_rows(rows)
        return array if rows.layout.is_full else self._on_all(array)

    def call_whole(self, call: ModelCall, placed: list[PlacedRows | None]) -> tuple[Any, list[Any], list[Any]]:
        """See :class:`Executor`."""
        call = replace(call, function=functools.partial(self._call_sharded, call.model, call.function))
        layout = self.placement.layout(call.rows) if call.rows else None
        if layout is None or layout.is_full:
            return call.make()
        try:
            return self._call_on_padding(call, placed, layout)
        except CannotSplitError as reason:
            self._log(
                f"each row of devices computes all rows of a batch that {layout.devices} of them do not divide: {reason}"
            )
            cut = zip(call.leaves, call.is_cut, strict=True)
            return replace(call, leaves=[self._on_all(leaf) if is_cut else leaf for leaf, is_cut in cut]).make()

    def _call_on_padding(
        self, call: ModelCall, placed: list[PlacedRows | None], layout: Layout
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
        inputs = [
            leaf.array if leaf is not None else self._place(value, layout)
            for value, leaf in zip(call.inputs, placed, strict=True)
        ]
        result = split(spec, call)(call.trainable, call.non_trainable, inputs, call.shared)
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
        layers = layers_to_recompute(model, lambda one: any(self.shardings.axes_of(one)), self.recompute)
        with recompute_layers(layers, shards, self.shardings.gather), self._constrained_outputs():
            return function(values[: len(trainable)], values[len(trainable) :], *args, **kwargs)

    @contextlib.contextmanager
    def _constrained_outputs(self) -> Iterator[None]:
        """Shard what layers return as the rules say."""

        def around(layer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                return jax.tree.map(functools.partial(self.shardings.constrain_output, layer), method(*args, **kwargs))

            return call

        with patched_method(LAYER_CALL, self.shardings.layers_with_rules(), around):
            yield

    def _on_all(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, self.placement.replicated)
