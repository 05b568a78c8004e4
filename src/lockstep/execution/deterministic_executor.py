"""The plan that gives the same bits on any number of devices (law 2).

The step is cut into programs (``programs.py``). Where the model is called, its replicas run one by one as programs of
their own (``alone.py``), in rounds of one replica a device (``rounds.py``); rows are joined, and whatever is added up
over replicas, gradients above all, is added in the order of one fixed tree (``collectives/tree.py``). So nothing that
the compiler sees depends on the devices, but for moving bytes and single additions.

Source: the recipe was found by trial; the order of addition is that of reproducible reductions, Demmel and Nguyen,
"Parallel reproducible summation" (2015), with one replica as its smallest unit.
"""

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from lockstep.collectives.tree import PartialSum, tree_sum
from lockstep.data.device_placement import DEVICE_AXIS, PlacedRows, Placement
from lockstep.execution.per_device import PerDevice, cut_array, local
from lockstep.execution.program_partition import bind_isolated
from lockstep.execution.replica import ReplicaResult, run_replicas
from lockstep.execution.replica_program import ReplicaProgram
from lockstep.execution.replica_schedule import replica_rounds
from lockstep.execution.spmd import SpmdForward, finished
from lockstep.execution.tree_accumulate import TreeAdder

__all__ = ["ReplicasBackward", "ReplicasForward", "forward_isolated"]

Shape = jax.ShapeDtypeStruct


def forward_isolated(forward: SpmdForward, inputs: list[Any], placement: Placement) -> ReplicaResult:
    """One forward pass by replicas, each a program of its own; called while a step is traced.

    Args:
        forward: what to call.
        inputs: the arguments that are cut, each the joined array ``(rows, …)``.
        placement: devices and number of replicas.

    Returns:
        Rows joined, means and state merged over all replicas.
    """
    whole = [*forward.trainable, *forward.non_trainable, *forward.shared]
    shapes = [_shape(x) for x in whole], [_shape(x) for x in inputs]
    make = cache(partial(ReplicasForward, forward, *shapes, placement))

    @jax.custom_vjp
    def run(*values: Any) -> list[Any]:
        return bind_isolated(make(()), values)

    def run_and_keep(*primals: Any) -> tuple[list[Any], Any]:
        values = [primal.value for primal in primals]
        work = make(tuple(i for i, primal in enumerate(primals) if primal.perturbed and _varies(primal.value)))
        outputs = bind_isolated(work, values)
        count = work.results.num_leaves
        return outputs[:count], jax.tree_util.Partial(work.backwards, outputs[count:], values)

    run.defvjp(run_and_keep, lambda backwards, cotangents: backwards(cotangents), symbolic_zeros=True)
    work = make(())
    return finished(forward, jax.tree.unflatten(work.results, run(*whole, *inputs)))


class ReplicasForward:
    """The forward pass of all replicas; its outputs are the results and what the way back needs.

    Args:
        forward: what to call.
        whole: shapes of the values that each replica gets whole.
        cut: shapes of the values that are cut into rows, for the whole batch.
        placement: the devices.
        wrt: positions among both that a gradient is wanted for.
    """

    def __init__(
        self, forward: SpmdForward, whole: list[Shape], cut: list[Shape], placement: Placement, wrt: tuple[int, ...]
    ) -> None:
        self.layout, self.placement, self.wrt = forward.layout, placement, wrt
        self.whole, self.cut = whole, cut
        self.rounds = replica_rounds(self.layout)
        trainable, fixed = len(forward.trainable), len(forward.trainable) + len(forward.non_trainable)

        def replica(rows: int, number: jax.Array, whole: list[Any], cut: list[Any]) -> list[jax.Array]:
            result = run_replicas(
                partial(forward.call, shared=whole[fixed:]),
                forward.merges,
                whole[:trainable],
                whole[trainable:fixed],
                cut,
                rows=(rows,),
                first_replica=number,
                global_rows=self.layout.rows,
            )
            self.row_results = len(result.rows)
            self.results: Any = jax.tree.structure(result)
            return jax.tree.leaves(result)

        self.alone = {
            rows: ReplicaProgram(
                partial(replica, rows),
                whole,
                [_rows(leaf, rows) for leaf in cut],
                wrt,
                lambda: self.row_results,
                placement,
            )
            for rows in {one.rows for one in self.rounds}
        }
        first = self.alone[self.rounds[0].rows]
        joined = [_rows(out, self.layout.rows) for out in first.outputs[: self.row_results]]
        left = [leaf for one in self.rounds for leaf in self.alone[one.rows].residuals]
        self.outputs = [*joined, *first.outputs[self.row_results :], *left]

    @cached_property
    def numbers(self) -> list[list[PerDevice]]:
        """For each round, on each device: replica, its first row on the device, its first row in the batch."""
        return [[self._on_each_device(column) for column in one.numbers(self.layout)] for one in self.rounds]

    def _on_each_device(self, column: np.ndarray) -> PerDevice:
        devices, own = self.placement.devices, self.placement.local_places
        return PerDevice(
            jax.device_put(number, devices[place]) if place in own else None for place, number in enumerate(column)
        )

    def run(self, values: list[Any]) -> list[Any]:
        """The results, then the residuals of each round."""
        whole, cut, in_place = self.split(values)
        rounds, residuals = [], []
        for one, (replica, start, start_in_batch) in zip(self.rounds, self.numbers, strict=True):
            alone = self.alone[one.rows]
            starts = [start if placed else start_in_batch for placed in in_place]
            found = alone.forward(whole, cut, starts, replica, places=one.places)
            rounds.append(found[: len(alone.outputs)])
            residuals += found[len(alone.outputs) :]
        rows = [[outputs[i] for outputs in rounds] for i in range(self.row_results)]
        sums = [[outputs[i] for outputs in rounds] for i in range(self.row_results, len(rounds[0]))]
        return [*self.collect(rows, sums), *residuals]

    def collect(self, rows: list[list[PerDevice]], sums: list[list[PerDevice]]) -> list[jax.Array]:
        """Join rows and add sums, each given as what its rounds yield, on every device."""
        arrays = [[[cut_array(part, self.placement) for part in parts] for parts in kind] for kind in (rows, sums)]
        return list(self._collected(*arrays))

    @cached_property
    def _collected(self) -> Any:
        """Only moves bytes and adds pairs: no compiler can make other bits of it."""
        order = sorted(
            (r, t, d) for t, one in enumerate(self.rounds) for d, r in enumerate(one.replicas) if r is not None
        )
        where = [PartialSum(position, position + 1, device, turn) for position, (_, turn, device) in enumerate(order)]

        def on_one_device(rows: list[list[Any]], sums: list[list[Any]]) -> list[jax.Array]:
            joined = [_join(parts, [(turn, device) for _, turn, device in order]) for parts in rows]
            return [*joined, *tree_sum([jnp.concatenate(parts) for parts in sums], where, DEVICE_AXIS)]

        cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
        mesh = self.placement.mesh
        return jax.jit(jax.shard_map(on_one_device, mesh=mesh, in_specs=cut, out_specs=whole, check_vma=False))

    def backwards(self, residuals: list[Any], values: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of all arguments, None where none is wanted; used while a step is traced."""
        of_outputs = [_dense(x) for x in cotangents if jnp.issubdtype(x.dtype, jnp.inexact)]
        found = iter(bind_isolated(ReplicasBackward(self), [*of_outputs, *residuals, *values]))
        return tuple(next(found) if i in self.wrt else None for i in range(len(self.whole) + len(self.cut)))

    def split(self, values: list[Any]) -> tuple[list[PerDevice], list[PerDevice], list[bool]]:
        """The whole values; the others, and whether each lies where its replicas run or whole on every device."""
        whole, cut = values[: len(self.whole)], values[len(self.whole) :]
        in_place = [isinstance(value, PlacedRows) for value in cut]
        parts = [value.array if isinstance(value, PlacedRows) else value for value in cut]
        placement = self.placement
        return [local(value, placement) for value in whole], [local(part, placement) for part in parts], in_place


class ReplicasBackward:
    """The way back through all replicas: gradients of what is whole are added up, those of rows joined."""

    def __init__(self, forward: ReplicasForward) -> None:
        self.forward = forward
        shapes = [*forward.whole, *forward.cut]
        self.outputs = [shapes[position] for position in forward.wrt]
        self.sums = sum(position < len(forward.whole) for position in forward.wrt)  # The first outputs; then rows.
        self.add = TreeAdder(forward.layout, forward.placement)

    def run(self, values: list[Any]) -> list[Any]:
        """Gradients of the batch."""
        rows: list[list[PerDevice]] = []
        sums = self.add(self._rounds(values, rows))
        parts = [list(parts) for parts in zip(*rows, strict=True)]
        return [*sums, *(self.forward.collect(parts, []) if parts else [])]

    def _rounds(self, values: list[Any], rows: list[list[PerDevice]]) -> Iterator[list[PerDevice]]:
        """Run round by round: yields the gradients to be added, and appends those of rows to ``rows``."""
        forward = self.forward
        varies = forward.alone[forward.rounds[0].rows].varies
        split, count = sum(varies[: forward.row_results]), sum(varies)
        of_outputs = [local(value, forward.placement) for value in values[:count]]
        whole, cut, in_place = forward.split(values[-len(forward.whole) - len(forward.cut) :])
        at = count
        for one, (_, start, start_in_batch) in zip(forward.rounds, forward.numbers, strict=True):
            alone = forward.alone[one.rows]
            own = slice(at, at + len(alone.residuals))
            kept, values[own] = values[own], [None] * len(alone.residuals)  # So that their memory is free afterwards.
            at = own.stop
            starts = [start if placed else start_in_batch for placed in in_place]
            outputs = of_outputs[:split], of_outputs[split:]
            gradients = alone.backward(whole, cut, starts, kept, *outputs, start_in_batch, places=one.places)
            rows.append(gradients[self.sums :])
            yield gradients[: self.sums]


def _join(parts: list[jax.Array], order: list[tuple[int, int]]) -> jax.Array:
    """The batch out of this device's piece in each round: the pieces (round, device) in ``order``."""
    ends = np.cumsum([len(part) for part in parts])
    everywhere = lax.all_gather(jnp.concatenate(parts), DEVICE_AXIS)
    return jnp.concatenate([everywhere[device, ends[turn] - len(parts[turn]) : ends[turn]] for turn, device in order])


def _dense(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _shape(value: Any) -> Shape:
    return Shape(np.shape(value), jnp.result_type(value))


def _rows(leaf: Shape, rows: int) -> Shape:
    return Shape((rows, *leaf.shape[1:]), leaf.dtype)


def _varies(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)
