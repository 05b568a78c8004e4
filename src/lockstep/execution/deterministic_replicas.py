"""Replicas that are compiled once and run one by one, and the sum of their results in the order of a fixed tree.

In a round each device runs one replica, or none. Replicas with different numbers of rows have different programs, and so
different rounds. A device keeps at most about log2(its replicas) partial sums at a time, like a binary counter.

The step is partitioned into programs (``deterministic_step.py``). Where the model is called, its replicas run one by one, each as a
program of one device, in rounds of one replica a device. Rows are joined, or stay with their replicas (``deterministic_rows.py``). Sums
over replicas, above all gradients, are added in the order of one fixed tree (``collectives/fixed_tree_sum.py``). So no program that
rounds depends on the number of devices; what depends on it only moves bytes and adds pairs.

What XLA makes of some arithmetic depends on what stands beside it in the program. A replica is therefore compiled alone, once for
each number of rows and each device, and gets its number and its rows at run time; optimization barriers separate it from the few
operations that fetch the rows.

Source: the recipe was found by trial; the order of addition is that of reproducible reductions, Demmel and Nguyen,
"Parallel reproducible summation" (2015), with one replica as its smallest unit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh

from lockstep._errors import ModelError
from lockstep.collectives.fixed_tree_sum import PartialSum, branches, tree_sum
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import DEVICE_AXIS, Placement, combine_parts
from lockstep.execution import deterministic_rows
from lockstep.execution.deterministic_rows import (
    ReplicaRows,
    RowsOfReplicas,
    join_rounds,
    order_of_replicas,
    own_rows,
    replica_rounds,
)
from lockstep.execution.deterministic_step import bind_isolated
from lockstep.execution.jaxpr_utils import is_inexact
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import (
    PerDevice,
    PerDeviceProgram,
    SpmdForward,
    finish_result,
    run_local,
    sharded_array,
    to_per_device,
)


def reduction_schedule(layout: BatchLayout) -> tuple[list[list[int]], list[PartialSum]]:
    """Return the order in which results of rounds are added: that of the tree, with as few partial sums as possible.

    A device keeps its partial sums on a stack. The result of a round is added to a number of them, from the top, and pushed.

    Returns:
        For each round and device that number; and the partial sums that remain: the device and the position in its stack.
    """
    replicas = len(layout.busy_replicas)
    stacks: list[list[tuple[int, int]]] = [[] for _ in range(layout.devices)]
    additions = [
        [
            0 if replica is None else _push(stacks[place], replica, replicas)
            for place, replica in enumerate(one.replicas)
        ]
        for one in replica_rounds(layout)
    ]
    remaining = [
        PartialSum(*interval, device, slot)
        for device, stack in enumerate(stacks)
        for slot, interval in enumerate(stack)
    ]
    return additions, remaining


def _push(stack: list[tuple[int, int]], replica: int, replicas: int) -> int:
    """Push the interval of one replica, merged with those below it that form a branch; return their number."""
    interval, count = (replica, replica + 1), 0
    while stack and branches(stack[-1][0], interval[1], replicas) == [(stack[-1][0], interval[1])]:
        interval = (stack.pop()[0], interval[1])
        count += 1
    stack.append(interval)
    return count


# --- the sum ----------------------------------------------------------------------------------------------------------

Values = list[jax.Array]  # of one device: one array for each variable, (1, …)


class TreeAdder:
    """Adds results of replicas over rounds and devices, in the order of the tree."""

    def __init__(self, layout: BatchLayout, placement: Placement) -> None:
        self.placement = placement
        self.rounds = replica_rounds(layout)
        self.additions, remaining = reduction_schedule(layout)
        self.slots = 1 + max(branch.slot for branch in remaining)
        self._over_devices = _over_devices(placement.mesh, tuple(remaining))

    def __call__(self, rounds: Iterable[list[PerDevice]]) -> list[jax.Array]:
        """Return the sum of each value, ``(…)``, on every device; results of a round are ``(1, …)`` on each device that had a replica, and
        read one by one, to save memory.
        """
        local_indices = self.placement.local_indices
        stacks: dict[int, list[Values]] = {place: [] for place in local_indices}
        for one, additions, values in zip(self.rounds, self.additions, rounds, strict=True):
            for place in set(one.places).intersection(local_indices):
                own = [value[place] for value in values]
                for _ in range(additions[place]):
                    own = _pair(stacks[place].pop(), own)
                stacks[place].append(own)
        if not any(stacks.values()):  # This process had no replica; its values give the shapes and are not read.
            stacks[local_indices[0]].append([value[local_indices[0]] for value in values])
        slots = {p: _in_slots([*own, *[own[-1]] * (self.slots - len(own))]) for p, own in stacks.items() if own}
        places, count = range(len(self.placement.devices)), len(next(iter(slots.values())))
        parts = [PerDevice(slots[place][i] if place in slots else None for place in places) for i in range(count)]
        return self._over_devices([sharded_array(part, self.placement) for part in parts])


@jax.jit
def _pair(left: Values, right: Values) -> Values:
    return [a + b for a, b in zip(left, right, strict=True)]


@jax.jit
def _joined(stack: list[Values]) -> Values:
    return [jnp.concatenate(slots) for slots in zip(*stack, strict=True)]


def _in_slots(stack: list[Values]) -> Values:
    return stack[0] if len(stack) == 1 else _joined(stack)


@lru_cache
def _over_devices(mesh: Mesh, partial_sums: tuple[PartialSum, ...]) -> Any:
    """Return a program that only moves bytes and adds pairs, whose bits no compiler pass can change."""
    return jax.jit(combine_parts(lambda stack: tree_sum(stack, partial_sums, DEVICE_AXIS), mesh))


Shape = jax.ShapeDtypeStruct


def forward_isolated(forward: SpmdForward, inputs: list[Any], placement: Placement) -> ReplicaResult:
    """Run one forward pass by replicas, each a program of its own, while a step is traced; ``inputs`` are the joined arrays ``(rows, …)`` that
    are cut.

    Returns:
        Rows joined, means and state merged over all replicas.
    """
    whole = [*forward.trainable, *forward.non_trainable, *forward.shared]
    shapes = [_shape(x) for x in whole], [_shape(x) for x in inputs]
    make = cache(partial(ReplicasForward, forward, *shapes, placement))

    @jax.custom_vjp
    def run(*values: Any) -> list[Any]:
        return bind_isolated(make(()), values)

    def run_with_residuals(*primals: Any) -> tuple[list[Any], Any]:
        values = [primal.value for primal in primals]
        call = make(tuple(i for i, primal in enumerate(primals) if primal.perturbed and is_inexact(primal.value)))
        outputs = bind_isolated(call, values)
        count = call.results.num_leaves
        return outputs[:count], jax.tree_util.Partial(call.backward, outputs[count:], values)

    run.defvjp(run_with_residuals, lambda backward, cotangents: backward(cotangents), symbolic_zeros=True)
    call = make(())
    return finish_result(forward, jax.tree.unflatten(call.results, run(*whole, *inputs)))


class ReplicasForward:
    """Forward pass of all replicas; its outputs are the results and the residuals of the backward pass.

    Args:
        forward: what to call.
        whole: shapes of the values that each replica gets whole.
        cut: shapes of the values that are cut into rows, for the whole batch.
        placement: the devices.
        wrt: positions among both of the values whose gradient is computed.
    """

    def __init__(
        self, forward: SpmdForward, whole: list[Shape], cut: list[Shape], placement: Placement, wrt: tuple[int, ...]
    ) -> None:
        self.layout, self.placement, self.wrt = forward.layout, placement, wrt
        self.whole, self.cut = whole, cut
        self.rows = RowsOfReplicas(self.layout, placement)
        self.rounds = self.rows.rounds
        trainable, fixed = len(forward.trainable), len(forward.trainable) + len(forward.non_trainable)

        def replica(rows: int, number: jax.Array, whole: list[Any], cut: list[Any]) -> list[jax.Array]:
            trained, others, shared = whole[:trainable], whole[trainable:fixed], whole[fixed:]
            own = replace(forward, trainable=trained, non_trainable=others, shared=shared)
            result = run_local(own, cut, (rows,), number, vectorize=False)
            self.row_results = len(result.rows)
            self.results: Any = jax.tree.structure(result)
            return jax.tree.leaves(result)

        self.programs = {
            rows: ReplicaProgram(
                partial(replica, rows),
                whole,
                [_with_rows(leaf, rows) for leaf in cut],
                wrt,
                lambda: self.row_results,
                placement,
            )
            for rows in {one.rows for one in self.rounds}
        }
        first = self.programs[self.rounds[0].rows]
        joined = [_with_rows(out, self.layout.rows) for out in first.outputs[: self.row_results]]
        residuals = [leaf for one in self.rounds for leaf in self.programs[one.rows].residuals]
        self.outputs = [*joined, *first.outputs[self.row_results :], *residuals]
        is_large = sum(out.size * out.dtype.itemsize for out in joined) >= deterministic_rows.KEEP_FROM
        self.row_inputs = frozenset(range(len(whole), len(whole) + len(cut)))
        self.kept_rows = self.row_results if is_large and len(self.layout.busy_replicas) > 1 else 0

    def run(self, values: list[Any]) -> list[Any]:
        """Return the results, then the residuals of each round."""
        whole = self.whole_values(values)
        rounds, residuals = [], []
        own = self.rows.by_round(values[len(self.whole) :])
        for one, (replica, *_), inputs in zip(self.rounds, self.rows.offsets, own, strict=True):
            program = self.programs[one.rows]
            found = program.forward(whole, *inputs, replica, places=one.places)
            rounds.append(found[: len(program.outputs)])
            residuals += found[len(program.outputs) :]
        rows = [[outputs[i] for outputs in rounds] for i in range(self.row_results)]
        sums = [[outputs[i] for outputs in rounds] for i in range(self.row_results, len(rounds[0]))]
        if not self.kept_rows:
            return [*self.collect(rows, sums), *residuals]
        kept = [ReplicaRows(own, self.layout) for own in rows]
        return [*kept, *(self.collect([], sums) if sums else []), *residuals]

    def collect(self, rows: list[list[PerDevice]], sums: list[list[PerDevice]]) -> list[jax.Array]:
        """Join rows and add sums, each given as the results of its rounds, on every device."""
        arrays = [[[sharded_array(part, self.placement) for part in parts] for parts in kind] for kind in (rows, sums)]
        return list(self._collected(*arrays))

    @cached_property
    def _collected(self) -> Any:
        """A program that only moves bytes and adds pairs, whose bits no compiler pass can change."""
        order = order_of_replicas(self.rounds)
        parts = [PartialSum(position, position + 1, device, turn) for position, (turn, device) in enumerate(order)]

        def on_one_device(rows: list[list[Any]], sums: list[list[Any]]) -> list[jax.Array]:
            joined = [join_rounds(rounds, order) for rounds in rows]
            return [*joined, *tree_sum([jnp.concatenate(rounds) for rounds in sums], parts, DEVICE_AXIS)]

        return jax.jit(combine_parts(on_one_device, self.placement.mesh))

    def backward(self, residuals: list[Any], values: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of all arguments, None for those not in ``wrt``; called while a step is traced."""
        of_outputs = [_instantiate_zeros(x) for x in cotangents if jnp.issubdtype(x.dtype, jnp.inexact)]
        found = iter(bind_isolated(ReplicasBackward(self), [*of_outputs, *residuals, *values]))
        return tuple(next(found) if i in self.wrt else None for i in range(len(self.whole) + len(self.cut)))

    def whole_values(self, values: list[Any]) -> list[PerDevice]:
        """Return on each device those of some values that each replica gets whole."""
        return [to_per_device(value, self.placement) for value in values[: len(self.whole)]]


class ReplicasBackward:
    """Backward pass of all replicas: gradients of whole values are added up, those of rows joined."""

    kept_rows = 0

    def __init__(self, forward: ReplicasForward) -> None:
        self.forward, self.layout = forward, forward.layout
        shapes = [*forward.whole, *forward.cut]
        self.outputs = [shapes[position] for position in forward.wrt]
        self.sums = sum(position < len(forward.whole) for position in forward.wrt)  # The first outputs; then rows.
        self.add = TreeAdder(forward.layout, forward.placement)
        program = forward.programs[forward.rounds[0].rows]
        self._row_outputs, self._outputs = sum(program.is_inexact[: forward.row_results]), sum(program.is_inexact)
        count = self._outputs + sum(len(forward.programs[one.rows].residuals) for one in forward.rounds)
        of_arguments = (count + position for position in forward.row_inputs)
        self.row_inputs = frozenset((*range(self._row_outputs), *of_arguments))

    def run(self, values: list[Any]) -> list[Any]:
        """Return the gradients of the batch."""
        rows: list[list[PerDevice]] = []
        sums = self.add(self._rounds(values, rows))
        parts = [list(parts) for parts in zip(*rows, strict=True)]
        return [*sums, *(self.forward.collect(parts, []) if parts else [])]

    def _rounds(self, values: list[Any], rows: list[list[PerDevice]]) -> Iterator[list[PerDevice]]:
        """Run round by round: yield the gradients to be added, and append those of rows to ``rows``."""
        forward = self.forward
        split, count = self._row_outputs, self._outputs
        of_rows = values[:split]
        of_sums = [to_per_device(value, forward.placement) for value in values[split:count]]
        arguments = values[-len(forward.whole) - len(forward.cut) :]
        whole = forward.whole_values(arguments)
        inputs, outputs = (forward.rows.by_round(rows) for rows in (arguments[len(forward.whole) :], of_rows))
        at = count
        for one, own_inputs, own_outputs in zip(forward.rounds, inputs, outputs, strict=True):
            program = forward.programs[one.rows]
            own = slice(at, at + len(program.residuals))
            kept, values[own] = values[own], [None] * len(program.residuals)  # Frees their memory after this round.
            at = own.stop
            gradients = program.backward(whole, own_inputs, kept, own_outputs, of_sums, places=one.places)
            rows.append(gradients[self.sums :])
            yield gradients[: self.sums]


class ReplicaProgram:
    """A function of one replica, and its gradient, each as one program of one device.

    Args:
        function: ``(replica, whole, cut) -> list of arrays``; ``whole`` are values that every replica has, ``cut`` its rows.
        whole: shapes of the first.
        cut: shapes of the second, for one replica, ``(rows, …)``.
        wrt: positions among ``[*whole, *cut]`` of the values whose gradient is computed; with none there are no residuals.
        row_outputs: returns the number of outputs, the first ones, that have rows.
        placement: the devices.

    Raises:
        ModelError: the function uses a value of the step that is not one of its arguments.
    """

    def __init__(
        self,
        function: Callable[[jax.Array, list[Any], list[Any]], list[jax.Array]],
        whole: Sequence[Shape],
        cut: Sequence[Shape],
        wrt: Sequence[int],
        row_outputs: Callable[[], int],
        placement: Placement,
    ) -> None:
        self._function, self._wrt, self._wholes = function, wrt, len(whole)
        self._backward_tree: Any = None
        number = Shape((), jnp.int32)
        self._traced, shapes = jax.make_jaxpr(self._with_residuals, return_shape=True)(number, list(whole), list(cut))
        if any(isinstance(value, jax.core.Tracer) for value in self._traced.consts):
            raise ModelError(
                "With deterministic=True a model's call cannot use a value that train_step has computed and left on the model or "
                "in an outer variable, because each replica runs as a program of its own. Fix: hand it over as an argument of the "
                "call, or keep it in a variable of the model."
            )
        self.outputs: list[Shape] = jax.tree.leaves(shapes[0])
        self.row_outputs = row_outputs()
        self.is_inexact = [jnp.issubdtype(output.dtype, jnp.inexact) for output in self.outputs]
        self._sort_residuals([id(var) for var in self._traced.jaxpr.invars[1:]])
        self.rows = cut[0].shape[0]
        self.forward = PerDeviceProgram(self._forward, placement)
        self.backward = PerDeviceProgram(self._backward, placement)

    @cached_property
    def residuals(self) -> list[Shape]:
        """Shapes of what the forward pass stores for the backward pass, besides the outputs."""
        avals: list[Any] = [var.aval for var in self._kept]
        return [Shape(aval.shape, aval.dtype) for aval in avals]

    def _sort_residuals(self, inputs: list[int]) -> None:
        """Find the residuals that must be stored, each once; inputs among them need not be."""
        self._kept: list[Var] = []
        self._sources: list[tuple[bool, int]] = []  # of each residual: whether it is an input, and its position
        for var in self._traced.jaxpr.outvars[len(self.outputs) :]:
            if id(var) in inputs:
                self._sources.append((True, inputs.index(id(var))))
                continue
            known = [i for i, kept in enumerate(self._kept) if kept is var]
            self._sources.append((False, known[0] if known else len(self._kept)))
            if not known:
                self._kept.append(var)

    def _with_residuals(self, replica: jax.Array, whole: list[Any], cut: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [*whole, *cut]

        def differentiated(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            own = list(values)
            for position, value in zip(self._wrt, inputs, strict=True):
                own[position] = value
            outputs = self._function(replica, own[: self._wholes], own[self._wholes :])
            return [out for out in outputs if jnp.issubdtype(out.dtype, jnp.inexact)], outputs

        if not self._wrt:
            return differentiated([])[1], []
        _, backward, outputs = jax.vjp(differentiated, [values[position] for position in self._wrt], has_aux=True)
        residuals, self._backward_tree = jax.tree.flatten(backward)
        return outputs, residuals

    def _forward(
        self, whole: list[jax.Array], cut: list[jax.Array], starts: list[jax.Array], replica: jax.Array
    ) -> list[jax.Array]:
        """Return the outputs of one replica, rows unchanged and sums as ``(1, …)``, then the residuals."""
        inputs = lax.optimization_barrier((replica, *whole, *own_rows(cut, starts, self.rows)))
        results = jaxpr_as_fun(self._traced)(*inputs)
        outputs, residuals = results[: len(self.outputs)], results[len(self.outputs) :]
        new = {source: value for source, value in zip(self._sources, residuals, strict=True) if not source[0]}
        kept = [new[False, position] for position in range(len(self._kept))]
        outputs, kept = lax.optimization_barrier((outputs, kept))
        rows, sums = outputs[: self.row_outputs], outputs[self.row_outputs :]
        return [*rows, *(value[None] for value in sums), *kept]

    def _backward(
        self,
        whole: list[jax.Array],
        cut: tuple[list[jax.Array], list[jax.Array]],
        kept: list[jax.Array],
        of_rows: tuple[list[jax.Array], list[jax.Array]],
        of_sums: list[jax.Array],
    ) -> list[jax.Array]:
        """Return one replica's gradients, those of whole values as ``(1, …)``, from the cotangents of its rows and of the sums; rows are given
        with where they begin.
        """
        own = own_rows(*of_rows, self.rows)
        inputs = [*whole, *own_rows(*cut, self.rows)]
        cotangents, residuals = lax.optimization_barrier(
            ([*own, *of_sums], [inputs[i] if is_input else kept[i] for is_input, i in self._sources])
        )
        (gradients,) = jax.tree.unflatten(self._backward_tree, residuals)(cotangents)
        gradients = lax.optimization_barrier(gradients)
        return [
            value[None] if position < self._wholes else value
            for position, value in zip(self._wrt, gradients, strict=True)
        ]


def _instantiate_zeros(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _shape(value: Any) -> Shape:
    return Shape(np.shape(value), jnp.result_type(value))


def _with_rows(leaf: Shape, rows: int) -> Shape:
    return Shape((rows, *leaf.shape[1:]), leaf.dtype)
