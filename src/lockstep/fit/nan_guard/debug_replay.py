"""Runs a training step again, from the same state and batch, one replica after the other and uncompiled, and traces its values.

The replay runs on the first device of each process. Every process runs all replicas, so all get the same trace, and wait for each other
only to gather the rows of the batch.
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from lockstep.data.device_placement import PlacedRows, Placement, count_rows, join_rows
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.devices.layout import Layout
from lockstep.execution.call_splitter import CallTrace
from lockstep.execution.nonfinite_gate import loss_logs
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import SpmdForward, forward_eagerly
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.nan_guard.layer_trace import LayerTrace, kind_of

__all__ = ["count_of", "rerun", "whole_batch"]


class _ReplayExecutor:
    """An executor whose replicas run one after the other, each noted in ``record``."""

    def __init__(self, record: LayerTrace, global_batch_note: str) -> None:
        self._record, self.global_batch_note, self.supports_second_derivatives = record, global_batch_note, True

    def partition_calls(self, layout: Layout, trace: CallTrace) -> tuple[tuple[int, ...], ...]:
        """See :class:`Executor`: each replica is one."""
        return layout.per_device

    def join_rows(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`; the rows were brought together before."""
        return rows.array

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """See :class:`Executor`."""
        busy = iter(_busy(forward.layout))

        def call(*values: Any, **options: Any) -> ReplicaResult:
            self._record.replica = next(busy)
            try:
                return forward.call(*values, **options)
            finally:
                self._record.replica = None

        return forward_eagerly(replace(forward, call=call), inputs)


def rerun(functions: StepFunctions, state: Any, batch: Any) -> LayerTrace:
    """Run a training step and return its trace; the model, its variables and random states are unchanged.

    Args:
        functions: of the model.
        state: before the step, on the devices.
        batch: on the first device, as :func:`whole_batch` gives it.
    """
    placement, model = functions.placement, functions.model
    layout = placement.layout(count_of(batch))
    record = LayerTrace(model, lambda replica: _own_rows(layout, replica), _busy(layout))
    executor: Any = _ReplayExecutor(record, functions.executor.global_batch_note)
    device = placement.first_local_device
    random = capture_random_state()
    try:
        with jax.default_device(device), record.recording():
            logs, _ = functions.build_step(executor, "train")(_on_one_device(state, placement), batch)
    finally:
        restore_random_state(random)
    record.loss = record.loss or next(filter(None, map(kind_of, loss_logs(logs).values())), None)
    return record


def whole_batch(batch: Any, placement: Placement) -> Any:
    """Gather a placed batch on the first device of this process; every process calls it."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, PlacedRows):
            return _on_one_device(leaf, placement)
        array = jax.jit(join_rows, out_shardings=placement.replicated)(leaf)
        return PlacedRows(_on_one_device(array, placement), leaf.layout)

    return jax.tree.map(whole, batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))


def _on_one_device(tree: Any, placement: Placement) -> Any:
    device = placement.first_local_device

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, device)
        if isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated:
            leaf = jax.jit(lambda array: array, out_shardings=placement.replicated)(leaf)
        return jax.device_put(leaf.addressable_shards[0].data, device)

    return jax.tree.map(own, tree)


def count_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    arrays = [
        x.array if isinstance(x, PlacedRows) else x
        for x in jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, PlacedRows))
    ]
    return count_rows(arrays)


def _busy(layout: Layout) -> list[int]:
    """Return the numbers of the replicas that have rows."""
    every = [rows for device in layout.per_device for rows in device]
    return [replica for replica, rows in enumerate(every) if rows]


def _own_rows(layout: Layout, replica: int | None) -> range:
    if replica is None:
        return range(layout.rows)
    every = [rows for device in layout.per_device for rows in device]
    start = sum(every[:replica])
    return range(start, start + every[replica])
