"""Rows that stay with their replicas in a deterministic step, and what is computed of them there.

The outputs of a model are rows of its replicas. On every device the rest of the step would need all of them, which for a language model
are more than the model itself. So large outputs are not gathered: operations that compute each row of their results from the same row of
their inputs, such as those of a loss up to its mean, run for each replica on its own rows, as one program of one device. Only what mixes
rows, such as that mean, runs on joined rows, on every device alike.

Such operations are computed again in each program that needs their results, as they cost less than the memory that keeps those. But XLA
may round them in another way there: what the rest has read, such as losses of which it takes the largest, is not computed again, so that
a comparison with that finds it.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import DEVICE_AXIS, PlacedRows, Placement, combine_parts
from lockstep.execution.jaxpr_utils import variables_in
from lockstep.execution.rowwise.row_axes import EquationPair, MixedRowsError, RowAxis
from lockstep.execution.rowwise.rules import CUMULATIVE, DRAWS, ENTRYWISE, REDUCTIONS, RULES, SCATTERS
from lockstep.execution.spmd import PerDevice, PerDeviceProgram, sharded_array, to_per_device

# Bytes of the outputs of a batch from which they are not gathered. For smaller ones more programs would cost more.
KEEP_FROM = 1 << 22


# --- the rounds of a batch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaRound:
    """One program on several devices: ``replicas[d]`` is the replica that device d runs, or None."""

    rows: int
    replicas: tuple[int | None, ...]

    @property
    def places(self) -> list[int]:
        """The devices that run a replica."""
        return [place for place, replica in enumerate(self.replicas) if replica is not None]

    def offsets(self, layout: BatchLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each device its replica, and that replica's first row on the device and in the global batch."""
        sizes = [rows for device in layout.per_device for rows in device]
        starts = list(accumulate(sizes, initial=0))
        on_device = list(accumulate(layout.device_rows, initial=0))
        replica = [chosen or 0 for chosen in self.replicas]
        first = [0 if chosen is None else starts[chosen] for chosen in self.replicas]
        local = [0 if chosen is None else starts[chosen] - on_device[d] for d, chosen in enumerate(self.replicas)]
        return np.asarray(replica, "int32"), np.asarray(local, "int32"), np.asarray(first, "int32")


def replica_rounds(layout: BatchLayout) -> list[ReplicaRound]:
    """Return the rounds of one batch; each device runs its replicas of one size in their order."""
    rounds = []
    for size in sorted(set(layout.busy_replicas), reverse=True):
        queues = [
            [layout.first_replica[device] + i for i, rows in enumerate(own) if rows == size]
            for device, own in enumerate(layout.per_device)
        ]
        for turn in range(max(map(len, queues))):
            rounds.append(ReplicaRound(size, tuple(own[turn] if turn < len(own) else None for own in queues)))
    return rounds


def order_of_replicas(rounds: Sequence[ReplicaRound]) -> list[tuple[int, int]]:
    """Return round and device of each replica that has rows, by its number."""
    found = [(r, t, d) for t, one in enumerate(rounds) for d, r in enumerate(one.replicas) if r is not None]
    return [(turn, device) for _, turn, device in sorted(found)]


@dataclass(frozen=True)
class ReplicaRows:
    """Rows of a global batch that are where replicas have computed them: for each round, on each device, those of its replica."""

    rounds: list[PerDevice]
    layout: BatchLayout


def join_rows(values: Sequence[ReplicaRows], placement: Placement) -> list[jax.Array]:
    """Return the global batches, on every device, of rows of one layout."""
    join = _program_that_joins(values[0].layout, placement)
    return join([[sharded_array(rows, placement) for rows in value.rounds] for value in values])


@lru_cache
def _program_that_joins(
    layout: BatchLayout, placement: Placement
) -> Callable[[list[list[jax.Array]]], list[jax.Array]]:
    order = order_of_replicas(replica_rounds(layout))

    def join(values: list[list[jax.Array]]) -> list[jax.Array]:
        return [join_rounds(rounds, order) for rounds in values]

    return jax.jit(combine_parts(join, placement.mesh))


def join_rounds(rounds: list[jax.Array], order: list[tuple[int, int]]) -> jax.Array:
    """Join the batch from this device's rows of each round, taken as (round, device) in ``order``; in a program for all devices."""
    ends = np.cumsum([len(part) for part in rounds])
    everywhere = lax.all_gather(jnp.concatenate(rounds), DEVICE_AXIS)
    return jnp.concatenate([everywhere[device, ends[turn] - len(rounds[turn]) : ends[turn]] for turn, device in order])


class RowsOfReplicas:
    """Finds for each round the rows that the replicas of the devices have of a value, wherever these are."""

    def __init__(self, layout: BatchLayout, placement: Placement) -> None:
        self._layout, self._placement = layout, placement
        self.rounds = replica_rounds(layout)

    @cached_property
    def offsets(self) -> list[list[PerDevice]]:
        """For each round, on each device: replica, its first row on the device, its first row in the batch, and 0."""
        columns = [one.offsets(self._layout) for one in self.rounds]
        return [[self._on_each_device(column) for column in (*own, np.zeros_like(own[0]))] for own in columns]

    def _on_each_device(self, column: np.ndarray) -> PerDevice:
        devices, own = self._placement.devices, self._placement.local_indices
        return PerDevice(
            jax.device_put(number, devices[place]) if place in own else None for place, number in enumerate(column)
        )

    def by_round(self, values: Sequence[Any]) -> list[tuple[list[PerDevice], list[PerDevice]]]:
        """Return for each round an array for each value, and where the rows of the replica begin in it, on each device.

        Args:
            values: rows on their devices or with their replicas, or arrays that every device has.
        """
        arrays = [
            value if isinstance(value, ReplicaRows) else to_per_device(getattr(value, "array", value), self._placement)
            for value in values
        ]
        rounds = []
        kinds = [type(value) for value in values]
        for number, (_, on_device, in_batch, nowhere) in enumerate(self.offsets):
            own = [one.rounds[number] if isinstance(one, ReplicaRows) else one for one in arrays]
            first = {ReplicaRows: nowhere, PlacedRows: on_device}
            rounds.append((own, [first.get(kind, in_batch) for kind in kinds]))
        return rounds


def own_rows(values: list[jax.Array], starts: list[jax.Array], rows: int) -> list[jax.Array]:
    """Return a replica's rows of some arrays, in a program of one device."""
    return [lax.dynamic_slice_in_dim(leaf, start, rows) for leaf, start in zip(values, starts, strict=True)]


# --- which equations --------------------------------------------------------------------------------------------------

# Those with which losses and metrics begin. Matrix products and convolutions are left out, as they may be computed again.
_ALONG_ROWS = {
    *(name for name in ENTRYWISE if name not in DRAWS),
    *(*REDUCTIONS, *CUMULATIVE, *SCATTERS, "argmax", "argmin", "sort", "top_k", "gather"),
    *("broadcast_in_dim", "concatenate", "iota", "pad", "reshape", "rev", "slice", "squeeze", "transpose"),
}
_ENTRY_BY_ENTRY = {*ENTRYWISE, "concatenate"}
# Those whose results are the same in each program, as they are not rounded, or in one way only.
_EXACT = {
    *("broadcast_in_dim", "concatenate", "iota", "pad", "reshape", "rev", "slice", "squeeze", "transpose", "gather"),
    *("convert_element_type", "copy", "stop_gradient", "neg", "abs", "sign", "select_n", "is_finite"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "max", "min", "clamp", "argmax", "argmin"),
}


class RowwiseEquations:
    """The equations of a jaxpr that compute each row of their results from the same row of their inputs, if their first axes are the rows.

    Args:
        jaxpr: without calls of other jaxprs.
        layout: of the rows.
        placement: the devices.
        rows: the variables that are rows on their devices or with their replicas.
        whole: the variables that are read, or returned, as they are.

    Attributes:
        depends_on_rows: variables that such an equation computes from ``rows``, or that are some; others it computes from what every device
            has.
    """

    def __init__(
        self, jaxpr: Jaxpr, layout: BatchLayout, placement: Placement, rows: Iterable[Var], whole: Iterable[Var]
    ) -> None:
        self._layout, self._placement = layout, placement
        self.depends_on_rows = set(rows)
        self._equations: dict[Var, JaxprEqn] = {}
        self._cut: dict[int, tuple[bool, ...]] = {}  # by equation: the inputs of which the own rows are read
        self._order = {id(equation): number for number, equation in enumerate(jaxpr.eqns)}
        self._exact: set[Var] = set()  # Each program computes the same numbers from what every device has.
        for equation in jaxpr.eqns:
            cut = self._inputs_that_are_cut(equation)
            if cut is not None:
                self._add(equation, cut)
        self._leave_out_what_is_read(jaxpr, set(whole))

    def computes(self, var: Var) -> bool:
        """Return whether one of these equations computes a variable."""
        return var in self._equations

    def includes(self, equation: JaxprEqn) -> bool:
        """Return whether an equation is one of these."""
        return id(equation) in self._cut

    def behind(self, variables: Iterable[Var], known: Container[Var] = ()) -> tuple[list[JaxprEqn], list[Var]]:
        """Return the equations that compute some variables, in order, and the variables that these read and do not compute.

        Args:
            variables: to be computed.
            known: further variables that are not computed, but read.
        """
        found: dict[int, JaxprEqn] = {}
        sources: dict[Var, None] = {}
        waiting = list(variables)
        while waiting:
            var = waiting.pop()
            equation = None if var in known else self._equations.get(var)
            if equation is None:
                sources[var] = None
            elif id(equation) not in found:
                found[id(equation)] = equation
                waiting += variables_in(equation.invars)
        return self.in_order(found.values()), list(sources)

    def in_order(self, equations: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """Return equations of the jaxpr in its order."""
        return sorted(equations, key=lambda one: self._order[id(one)])

    def copies_of(self, var: Var) -> list[Var]:
        """Return the variables, with this one, that have its numbers in another form, such as another shape or type."""
        found = [var]
        while (equation := self._equations.get(found[-1])) is not None and equation.primitive.name in _EXACT:
            read = variables_in(equation.invars)
            if len(read) != 1 or read[0] not in self._equations or _size_of(read[0]) > _size_of(var):
                break
            found.append(read[0])
        return found

    def program(self, outputs: Sequence[Var], known: Container[Var] = ()) -> "RowwiseProgram":
        """Return the program that computes some variables for each replica; arguments are those of :meth:`behind`."""
        equations, _ = self.behind(outputs, known)
        return RowwiseProgram([(one, self._cut[id(one)]) for one in equations], outputs, self._layout, self._placement)

    def _add(self, equation: JaxprEqn, cut: tuple[bool, ...]) -> None:
        self._cut[id(equation)] = cut
        self._equations.update(dict.fromkeys(equation.outvars, equation))
        read = variables_in(equation.invars)
        if not self.depends_on_rows.isdisjoint(read):
            self.depends_on_rows.update(equation.outvars)
        if equation.primitive.name in _EXACT and all(var in self._exact or not self.computes(var) for var in read):
            self._exact.update(equation.outvars)

    def _leave_out_what_is_read(self, jaxpr: Jaxpr, whole: set[Var]) -> None:
        """Leave out equations that do not depend on rows if others read their results, unless each program computes the same numbers."""
        read: set[Var] = set()
        for equation in reversed(jaxpr.eqns):
            own = set(equation.outvars)
            is_read = not own.isdisjoint(whole) or (not own.isdisjoint(read) and not own <= self._exact)
            if self.includes(equation) and own.isdisjoint(self.depends_on_rows) and is_read:
                del self._cut[id(equation)]
                for var in equation.outvars:
                    del self._equations[var]
            if not self.includes(equation):
                read.update(variables_in(equation.invars))

    def _inputs_that_are_cut(self, equation: JaxprEqn) -> tuple[bool, ...] | None:
        """Return for each input whether the own rows of it are read; None if the equation does not work along the rows."""
        name, rows = equation.primitive.name, self._layout.rows
        results = [_shape_of(var) for var in equation.outvars]
        if name not in _ALONG_ROWS or equation.effects or any(shape[:1] != (rows,) for shape in results):
            return None
        is_known = [
            not isinstance(atom, Literal) and (atom in self.depends_on_rows or atom in self._equations)
            for atom in equation.invars
        ]
        cut = tuple(
            known or (_pairs_rows(equation) and _shape_of(atom)[:1] == (rows,))
            for atom, known in zip(equation.invars, is_known, strict=True)
        )
        begins = sum(map(_size_of, (*equation.invars, *equation.outvars[1:]))) < _size_of(equation.outvars[0])
        return cut if (any(is_known) or begins) and _follows_rows(equation, cut, rows) else None


def _pairs_rows(equation: JaxprEqn) -> bool:
    """Return whether an equation reads the same row of all inputs whose first axis is as long as the batch."""
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"][:1]) == (0,)
    if name != "gather" and name not in SCATTERS:
        return name in _ENTRY_BY_ENTRY
    numbers = params["dimension_numbers"]
    indices = numbers.start_indices_batching_dims if name == "gather" else numbers.scatter_indices_batching_dims
    return (0, 0) in zip(numbers.operand_batching_dims, indices, strict=True)


def _shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _size_of(atom: Any) -> int:
    return int(np.prod(_shape_of(atom)))


def _follows_rows(equation: JaxprEqn, cut: Sequence[bool], rows: int) -> bool:
    """Return whether each row of the results follows from the same row of the inputs that are cut: whether the rules of the proof say so of
    the equation and of the same for another number of rows.
    """
    avals: list[Any] = [atom.aval for atom in equation.invars]
    inputs = [
        jax.ShapeDtypeStruct((2 * rows, *aval.shape[1:]) if own else aval.shape, aval.dtype)
        for aval, own in zip(avals, cut, strict=True)
    ]
    try:
        (other,) = jax.make_jaxpr(partial(_run, equation, 2 * rows))(*inputs).eqns
        pair = EquationPair((equation, other), (rows, 2 * rows))
        found = RULES[equation.primitive.name](pair, [RowAxis(0) if own else None for own in cut])
    except (MixedRowsError, TypeError, ValueError):  # The shapes do not fit.
        return False
    return all(
        isinstance(one, RowAxis) and one.axis == 0 and (one.uniform or one.outer == one.inner == 1) for one in found
    )


def _run(equation: JaxprEqn, rows: int, *inputs: Any) -> Any:
    """Run an equation for another number of rows."""
    params = dict(equation.params)
    if "shape" in params:
        params["shape"] = (rows, *params["shape"][1:])
    if equation.primitive.name == "reshape":
        params["new_sizes"] = (rows, *params["new_sizes"][1:])
    if equation.primitive.name == "slice":
        params["limit_indices"] = (rows, *params["limit_indices"][1:])
    return equation.primitive.bind(*inputs, **params)


class RowwiseProgram:
    """Equations that run for each replica on its own rows; its results are :class:`ReplicaRows`.

    Args:
        equations: in order, each with the inputs of which the own rows are read.
        outputs: the variables that are computed.
        layout: of the rows.
        placement: the devices.

    Attributes:
        inputs: the variables that it reads.
        outputs: those that it computes.
        layouts: by position of the input the layout of the rows that it reads.
    """

    def __init__(
        self,
        equations: list[tuple[JaxprEqn, tuple[bool, ...]]],
        outputs: Sequence[Var],
        layout: BatchLayout,
        placement: Placement,
    ) -> None:
        self._equations, self.outputs, self._layout = equations, outputs, layout
        computed = {var for equation, _ in equations for var in equation.outvars}
        read = dict.fromkeys(
            (atom, own)
            for equation, cut in equations
            for atom, own in zip(equation.invars, cut, strict=True)
            if not isinstance(atom, Literal) and atom not in computed
        )
        self._cut = [atom for atom, own in read if own]
        self._whole = [atom for atom, own in read if not own]
        self.inputs = [*self._cut, *self._whole]
        self.layouts = dict.fromkeys(range(len(self._cut)), layout)
        self._rows, self._placement = RowsOfReplicas(layout, placement), placement
        sizes = {one.rows for one in self._rows.rounds}
        self._programs = {size: PerDeviceProgram(partial(self._on_one_device, size), placement) for size in sizes}

    def run(self, values: list[Any]) -> list[Any]:
        """Return the outputs, from the values of the inputs."""
        cut, whole = values[: len(self._cut)], values[len(self._cut) :]
        everywhere = [to_per_device(value, self._placement) for value in whole]
        found = [
            self._programs[one.rows](everywhere, *own, places=one.places)
            for one, own in zip(self._rows.rounds, self._rows.by_round(cut), strict=True)
        ]
        return [ReplicaRows(list(rounds), self._layout) for rounds in zip(*found, strict=True)]

    def _on_one_device(
        self, rows: int, whole: list[jax.Array], cut: list[jax.Array], starts: list[jax.Array]
    ) -> list[jax.Array]:
        of_rows, others = lax.optimization_barrier((own_rows(cut, starts, rows), whole))
        known: dict[tuple[Var, bool], Any] = {}
        known |= {(var, True): value for var, value in zip(self._cut, of_rows, strict=True)}
        known |= {(var, False): value for var, value in zip(self._whole, others, strict=True)}
        for equation, are_cut in self._equations:
            inputs = [
                atom.val if isinstance(atom, Literal) else known[atom, own]
                for atom, own in zip(equation.invars, are_cut, strict=True)
            ]
            results = _run(equation, rows, *inputs)
            results = results if equation.primitive.multiple_results else [results]
            known.update(((var, True), value) for var, value in zip(equation.outvars, results, strict=True))
        outputs: list[jax.Array] = lax.optimization_barrier([known[var, True] for var in self.outputs])
        return outputs
