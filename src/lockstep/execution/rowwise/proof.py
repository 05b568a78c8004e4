"""Prove from two traces of a function that each row of its results depends only on its own row of the batch.

The function is traced with two numbers of rows, and both traces are read together, equation by equation. Numbers, shapes or operations
that differ without being rows show a dependence on the number of rows. For each value the analysis follows the axis of the rows. An
operation that combines rows, or that has no rule, is reported and never counts as row-wise. Random bits count as row-wise if their key
comes from a seed generator, because each replica then draws from its own stream. What follows from the result is decided by
``execution/call_splitter``.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from lockstep.execution.jaxpr_utils import (
    CALLS,
    CUSTOM_DERIVATIVES,
    called_jaxpr,
    equations_of,
    expanded,
    scan_operands,
)
from lockstep.execution.rowwise.row_axes import (
    EquationPair,
    Mixed,
    MixedRowsError,
    NeverTrue,
    ReplicaStatistic,
    RowAxis,
    RowCount,
    RowDependence,
    RowDependences,
    RowMean,
    RowSum,
    Seeded,
    backward_of,
    check_params,
    common_dependence,
    has_known_derivative,
    is_fixed,
    is_noise,
    is_same,
    is_tracer,
)
from lockstep.execution.rowwise.rules import DRAWS, KEY_OPERATIONS, ROW_DEPENDENT_PARAMS, RULES, sum_rule
from lockstep.execution.rowwise.zeros import are_zero

_KEEP_ZEROS = ("broadcast_in_dim", "convert_element_type", "reshape")

_STATISTIC = "statistic_of_replica"  # the name of that function in a trace


@jax.jit
def statistic_of_replica(value: jax.Array, *of: jax.Array) -> jax.Array:
    """Return the value; the proof takes it as a statistic of other values, from a replica's rows, in whose place it is in a trace."""
    return value + 0  # An operation, as JAX leaves out a function that returns its argument.


@dataclass(frozen=True)
class Trace:
    """A trace of ``function(fixed, batch)`` on some number of rows.

    Attributes:
        rows: the number of rows.
        fixed: the number of arrays that do not depend on the batch.
        closed: the jaxpr.
        shapes: shapes of the results.
        seeds: positions of the states of seed generators among the fixed arrays.
    """

    rows: int
    fixed: int
    closed: ClosedJaxpr
    shapes: list[jax.ShapeDtypeStruct]
    seeds: frozenset[int]

    @functools.cached_property
    def operations(self) -> Counter[str]:
        """Number of occurrences of each operation, at any depth."""
        return Counter(equation.primitive.name for equation in equations_of(self.closed.jaxpr))


@dataclass(frozen=True)
class RowProof:
    """What is proved of a function.

    Attributes:
        results: the dependence of each result on the rows.
        statistics: for each value of which a replica computes a statistic its dependence.
    """

    results: RowDependences
    statistics: RowDependences

    @property
    def has_statistics_of_leading_rows(self) -> bool:
        """Whether the first axis of each such value is the rows, or equally many entries of each: rows that follow are at its end."""
        axes = [one for one in self.statistics if isinstance(one, RowAxis) and one.axis == 0]
        return len(axes) == len(self.statistics) and all(one.outer == 1 or one.uniform for one in axes)


def trace_for_rows(
    function: Callable[..., Any],
    fixed: Sequence[Any],
    batch: Sequence[Any],
    rows: int,
    seeds: Iterable[int] = (),
) -> Trace:
    """Trace a function for the proof.

    Args:
        function: takes two lists of arrays, and returns one.
        fixed: arrays that do not depend on the batch.
        batch: arrays or shapes ``(rows, …)``.
        rows: replaces the length of their first axis.
        seeds: positions of the states of seed generators in ``fixed``.
    """
    own = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in batch]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(list(fixed), own)
    return Trace(rows, len(fixed), closed, shapes, frozenset(seeds))


def prove_rows(one: Trace, other: Trace) -> RowProof:
    """Prove how each result depends on the rows, from traces of a function with two numbers of rows, each at least 2."""
    equation = next(_side_effects(one.closed.jaxpr), None)
    if equation is not None:
        reason = f"{equation.primitive.name} has a side effect, which each replica would have"
        return RowProof([Mixed(reason).located_at(equation)] * len(one.closed.jaxpr.outvars), [])
    batch = len(one.closed.jaxpr.invars) - one.fixed
    fixed = [Seeded() if number in one.seeds else None for number in range(one.fixed)]
    deps: RowDependences = [*fixed, *[RowAxis(0)] * batch]
    reader = _JaxprReader((one.rows, other.rows))
    return RowProof(reader.closed(one.closed, other.closed, deps), reader.statistics)


def _side_effects(jaxpr: Jaxpr, harmless: tuple[str, ...] = ("Debug",)) -> Iterator[JaxprEqn]:
    """Yield the operations that write to a reference, but for those of a kernel's own, or call the host for more than a message."""
    for equation in jaxpr.eqns:
        if not all(type(effect).__name__.startswith(harmless) for effect in equation.effects):
            yield equation
        within = (*harmless, "Read", "Write", "Accum") if equation.primitive.name == "pallas_call" else harmless
        for inner in jaxprs_in_params(equation.params):
            yield from _side_effects(inner, within)


def draws_for_each_row(one: Trace, other: Trace) -> bool:
    """Return whether the random numbers of a row stay the same if more rows follow, in traces of a function that differ in rows.

    JAX's threefry generator, if it is partitionable, computes each number from its position in the flat array. Rows that follow change
    no position if the rows are the first axis.
    """
    draws, others = (list(_draws(trace.closed.jaxpr)) for trace in (one, other))
    is_partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if not is_partitionable or len(draws) != len(others):
        return False
    return all(
        name in ("random_bits", "random_split")
        and key == "key<fry>"
        and (shape == changed or (shape[0], changed[0], shape[1:]) == (one.rows, other.rows, changed[1:]))
        for (name, shape, key), (_, changed, _) in zip(draws, others, strict=True)
    )


def _draws(jaxpr: Jaxpr) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the name, the shape and the kind of key of each operation that draws random numbers, at any depth."""
    for equation in equations_of(jaxpr):
        name = equation.primitive.name
        if name.startswith(("random_", "rng_", "threefry")) and name not in KEY_OPERATIONS:
            key: Any = equation.invars[0].aval
            yield name, tuple(equation.params.get("shape", ())), str(key.dtype)


class _JaxprReader:
    """Reads two jaxprs together, equation by equation."""

    def __init__(self, rows: tuple[int, int], checks_gradients: bool = True) -> None:
        self.rows, self.checks_gradients = rows, checks_gradients
        self.statistics: RowDependences = []

    def closed(self, first: ClosedJaxpr, second: ClosedJaxpr, deps: RowDependences) -> RowDependences:
        """Return the dependences of the results, given those of the inputs."""
        constants = [self._fixed(one, other) for one, other in zip(first.consts, second.consts, strict=False)]
        if len(first.consts) != len(second.consts):
            return [Mixed("its constants change with the number of rows")] * len(first.jaxpr.outvars)
        return self.read(first.jaxpr, second.jaxpr, [*constants, *deps])

    def read(self, first: Jaxpr, second: Jaxpr, deps: RowDependences) -> RowDependences:
        """Return the same as :meth:`closed`; ``deps`` are those of the constants, then of the inputs."""
        known: dict[Any, RowDependence] = dict(zip((*first.constvars, *first.invars), deps, strict=True))
        counterparts = dict(zip((*first.constvars, *first.invars), (*second.constvars, *second.invars), strict=True))

        def dep(one: Any, other: Any) -> RowDependence:
            if isinstance(one, Literal) and isinstance(other, Literal):
                return self._fixed(one.val, other.val)
            if isinstance(one, Literal) or counterparts[one] is not other:
                return Mixed("its operations change with the number of rows")
            return known[one]

        if [one.primitive.name for one in first.eqns] != [other.primitive.name for other in second.eqns]:
            return [self._difference(first, second)] * len(first.outvars)
        zeros: set[Any] = set()
        for equations in zip(first.eqns, second.eqns, strict=True):
            inputs = [dep(*atoms) for atoms in zip(equations[0].invars, equations[1].invars, strict=True)]
            pair = EquationPair(equations, self.rows, zeros)
            try:
                found = self._results(pair, inputs)
            except MixedRowsError as error:
                found = [Mixed(str(error)).located_at(equations[0])] * len(equations[0].outvars)
            if found == [None] and ((pair.name in _KEEP_ZEROS and pair.is_zero(0)) or pair.is_never_less()):
                zeros.update(equations[0].outvars)
            known.update(zip(equations[0].outvars, found, strict=True))
            counterparts.update(zip(equations[0].outvars, equations[1].outvars, strict=True))
        return [dep(*atoms) for atoms in zip(first.outvars, second.outvars, strict=True)]

    def _fixed(self, one: Any, other: Any) -> RowDependence:
        """Return the dependence of a literal or constant of the traces."""
        if is_same(one, other):
            return None
        if np.ndim(one) == np.ndim(other) == 0 and not is_tracer(one, other):
            if float(one) * self.rows[1] == float(other) * self.rows[0]:
                return RowCount()
            numbers = [np.asarray(number).item() for number in (one, other)]
            return Mixed(
                f"a constant or index is {numbers[0]} for {self.rows[0]} rows and {numbers[1]} for {self.rows[1]}"
            )
        return Mixed("an array that is no input changes with the number of rows")

    def _difference(self, first: Jaxpr, second: Jaxpr) -> Mixed:
        """Return where one trace has other operations: where the longer one has more of them, as what follows these is of another layer."""
        longer, shorter = sorted((first.eqns, second.eqns), key=len, reverse=True)
        same = itertools.takewhile(
            lambda pair: pair[0].primitive.name == pair[1].primitive.name, zip(longer, shorter, strict=False)
        )
        return Mixed("its operations change with the number of rows").located_at(longer[len(list(same))])

    def _results(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        """Return the dependences of the results of one equation."""
        if pair.name == "select_n" and (inputs[0] == NeverTrue() or (inputs[0] is None and pair.is_zero(0))):
            return [self._check_shapes(pair, 0, inputs[1])]
        for one in inputs:
            if isinstance(one, Mixed):
                located = one if one.layer or one.line else one.located_at(pair.equations[0])
                return [located] * pair.num_results
        given, inputs = inputs, [None if isinstance(one, Seeded) else one for one in inputs]
        summed = sum_rule(pair, inputs)
        if summed is not None:
            return [self._check_shapes(pair, 0, summed)]
        body = _BODIES.get(pair.name)
        rule = RULES.get(pair.name)
        if body is not None:
            found = getattr(self, body)(pair, given)
            # JAX may reuse the trace of another call of the same function: the location is that of this call.
            found = [one.located_at(pair.equations[0]) if isinstance(one, Mixed) else one for one in found]
        elif any(isinstance(one, (RowCount, NeverTrue)) for one in inputs):
            raise MixedRowsError(f"{pair.name} works on the number of rows")
        elif any(isinstance(one, (RowSum, RowMean)) for one in inputs):
            raise MixedRowsError(f"{pair.name} works on a sum over the rows")
        elif all(one is None for one in inputs) and pair.has_fixed_shapes():
            check_params(pair)
            found = [None] * pair.num_results
        elif rule is not None:
            check_params(pair, ROW_DEPENDENT_PARAMS.get(pair.name, ()))
            found = rule(pair, inputs)
            if pair.name in DRAWS and given[0] is None and any(isinstance(one, RowAxis) for one in found):
                raise MixedRowsError(f"{pair.name} draws for the rows from a key that is the same on each replica")
        else:
            raise MixedRowsError(f"{pair.name} has no rule")
        if body is None:
            found = _varying_like(given, found)
        return [self._check_shapes(pair, number, one) for number, one in enumerate(found)]

    def _check_shapes(self, pair: EquationPair, number: int, dep: RowDependence) -> RowDependence:
        """Return the dependence, after checking that the rows are along its axis and no other axis depends on their number."""
        one, other = pair.result_shapes(number)
        if len(set(pair.result_dtypes(number))) > 1:
            raise MixedRowsError(f"{pair.name}: the type of its result changes with the number of rows")
        is_along = True
        if isinstance(dep, RowAxis):
            lengths = [dep.outer * rows * dep.inner for rows in self.rows]
            is_along = dep.axis < len(one) == len(other) and [one[dep.axis], other[dep.axis]] == lengths
            if is_along:
                one, other = _without(one, dep.axis), _without(other, dep.axis)
        if not is_along or (one != other and not isinstance(dep, Mixed)):
            raise MixedRowsError(
                f"{pair.name} returns {list(one)} for {self.rows[0]} rows and {list(other)} for {self.rows[1]}"
            )
        return dep

    # --- operations that contain a jaxpr --------------------------------------------------------------------------------

    def call(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        if pair.equations[0].params.get("name") == _STATISTIC and is_fixed(inputs[0]):
            self.statistics += inputs[1:]
            return [ReplicaStatistic()]
        one, other = map(called_jaxpr, pair.equations)
        if isinstance(one, ClosedJaxpr):
            return self.closed(one, other, inputs)
        return self.read(one, other, inputs)

    def custom_gradient(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        """Check the custom derivative, too, which may combine rows that the function itself does not."""
        found = self.call(pair, inputs)
        is_known = all(map(has_known_derivative, pair.equations))
        if self.checks_gradients and not is_known and not any(isinstance(one, Mixed) for one in found):
            one, other = (backward_of(equation) for equation in pair.equations)
            given = dict(zip(pair.equations[0].invars, inputs, strict=True))
            own = [dep for atom, dep in given.items() if not isinstance(atom, Literal)]
            # The gradient of a value without rows, such as a weight, is a sum over the rows.
            cotangents = [RowSum() if is_fixed(dep) else dep for dep in found]
            reader = _JaxprReader(self.rows, checks_gradients=False)
            results = reader.closed(one, other, [*own, *cotangents])
            for before, after in zip(found, results[: len(found)], strict=True):
                if not (after == before or (is_fixed(before) and is_fixed(after)) or _is_axis_of(before, after)):
                    raise MixedRowsError(
                        f"{pair.name} has a custom derivative that computes other results than the function"
                    )
            zeros = [are_zero(each.jaxpr, [False] * len(each.jaxpr.invars))[len(found) :] for each in (one, other)]
            for before, after, *is_zero in zip(own, results[len(found) :], *zeros, strict=True):
                if all(is_zero):  # A zero is a sum over the rows, and the gradient of any row.
                    continue
                if isinstance(after, Mixed):
                    raise MixedRowsError(f"{pair.name} has a custom derivative, in which {after}")
                is_kept = after == before or (isinstance(before, RowAxis) and before.uniform)
                if not (is_kept if isinstance(before, RowAxis) else isinstance(after, RowSum)):
                    raise MixedRowsError(f"{pair.name} has a custom derivative that is no sum over the rows")
            of_zeros = are_zero(one.jaxpr, [*([False] * len(own)), *([True] * len(cotangents))])
            if not all(of_zeros[len(found) :]):  # Rows of padding have no loss, and must have no gradient.
                raise MixedRowsError(f"{pair.name} has a custom derivative that may be one where its result has none")
        return found

    def composed(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        """Follow the operations that one of JAX's primitives is made of; the derivatives of these are JAX's, too."""
        one, other = map(expanded, pair.equations)
        if one is None or other is None:
            raise MixedRowsError(f"{pair.name} has no rule")
        return self.closed(one, other, inputs)

    def cond(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        check_params(pair, ("branches",))
        if not is_fixed(inputs[0]):
            raise MixedRowsError("cond branches on a value that depends on the rows")
        if len({len(branches) for branches in pair.params("branches")}) > 1:
            raise MixedRowsError("cond has other branches for another number of rows")
        found = [self.closed(*branches, inputs[1:]) for branches in zip(*pair.params("branches"), strict=True)]
        merged = [_merge_alternatives(list(deps), "cond") for deps in zip(*found, strict=True)]
        return _varying_like(inputs[:1], merged)

    def scan(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        check_params(pair, ("jaxpr", "length"))
        constants, carried = scan_operands(pair.equations[0].params)
        given = inputs[: constants + carried]
        if any(isinstance(dep, RowAxis) and dep.axis == 0 for dep in inputs[constants + carried :]):
            return self._map_over_rows(pair, inputs)
        slices = []
        if len(set(pair.params("length"))) > 1:
            raise MixedRowsError("scan: its length changes with the number of rows")
        for dep in inputs[constants + carried :]:
            slices.append(replace(dep, axis=dep.axis - 1) if isinstance(dep, RowAxis) else dep)

        def once(carry: RowDependences) -> tuple[RowDependences, RowDependences]:
            found = self.closed(*pair.params("jaxpr"), [*given[:constants], *carry, *slices])
            return found[:carried], found[carried:]

        carry, stacked = _fixed_point(given[constants:], once)
        return [*carry, *(replace(one, axis=one.axis + 1) if isinstance(one, RowAxis) else one for one in stacked)]

    def _map_over_rows(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        """Follow a scan whose slices are rows: without a carry each result is that of one row."""
        constants, carried = scan_operands(pair.equations[0].params)
        rows = RowAxis(0)
        if carried or pair.params("length") != self.rows:
            raise MixedRowsError("scan works along the rows")
        if any(dep is not None for dep in inputs[:constants]) or any(dep != rows for dep in inputs[constants:]):
            raise MixedRowsError("scan combines rows with other values")
        found = self.closed(*pair.params("jaxpr"), [None] * len(inputs))
        if any(dep is not None for dep in found):
            raise MixedRowsError("scan works along the rows, and depends on their number")
        return [rows] * len(found)

    def linear_solve(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        """Follow the functions that solve the system and, for derivatives, the transposed one."""
        check_params(pair, ("jaxprs",))
        lengths = pair.param("const_lengths")
        begin = lengths.matvec + lengths.vecmat
        given = [*inputs[begin : begin + lengths.solve], *inputs[sum(lengths) :]]
        one, other = pair.params("jaxprs")
        found = self.closed(one.solve, other.solve, given)
        if self.checks_gradients and one.transpose_solve is not None:
            transposed = [*inputs[sum(lengths) - lengths.transpose_solve :]]
            for dep in self.closed(one.transpose_solve, other.transpose_solve, transposed):
                if isinstance(dep, Mixed):
                    raise MixedRowsError(f"custom_linear_solve has a transposed solution, in which {dep}")
        return found

    def loop(self, pair: EquationPair, inputs: RowDependences) -> RowDependences:
        check_params(pair, ("cond_jaxpr", "body_jaxpr"))
        of_condition, of_body = pair.param("cond_nconsts"), pair.param("body_nconsts")
        fixed = inputs[of_condition : of_condition + of_body]
        carry, _ = _fixed_point(
            inputs[of_condition + of_body :],
            lambda carry: (self.closed(*pair.params("body_jaxpr"), [*fixed, *carry]), []),
        )
        (condition,) = self.closed(*pair.params("cond_jaxpr"), [*inputs[:of_condition], *carry])
        if not is_fixed(condition):
            raise MixedRowsError("while has a condition that depends on several rows")
        return _varying_like([condition], carry)


def _varying_like(given: RowDependences, found: RowDependences) -> RowDependences:
    """Return the dependences of results; those that are independent of the batch differ by replica if one that is given does."""
    varying = sorted((one for one in given if isinstance(one, Seeded)), key=is_noise, reverse=True)
    return [varying[0] if one is None else one for one in found] if varying else found


def _is_axis_of(one: RowDependence, other: RowDependence) -> bool:
    """Return whether two values have their rows at the same place."""
    if not (isinstance(one, RowAxis) and isinstance(other, RowAxis)):
        return False
    return replace(one, uniform=False) == replace(other, uniform=False)


def _fixed_point(
    carry: RowDependences, once: Callable[[RowDependences], tuple[RowDependences, RowDependences]]
) -> tuple[RowDependences, RowDependences]:
    """Return the dependences of a loop's carry that its body does not change, and those of the body's other results."""
    for _ in range(len(carry) + 2):
        after, given = once(carry)
        merged = [_merge_alternatives([before, then], "a loop") for before, then in zip(carry, after, strict=True)]
        if merged == carry:
            return carry, given
        carry = merged
    raise MixedRowsError("a loop mixes the rows")


def _merge_alternatives(deps: RowDependences, what: str) -> RowDependence:
    """Return the dependence of a value that may be any one of several."""
    for dep in deps:
        if isinstance(dep, Mixed):
            return dep
    return common_dependence(deps, what)


_BODIES = {**dict.fromkeys(CALLS, "call"), "cond": "cond", "scan": "scan", "while": "loop"}
_BODIES |= {"custom_linear_solve": "linear_solve", "call_hi_primitive": "composed"}
_BODIES |= dict.fromkeys(CUSTOM_DERIVATIVES, "custom_gradient")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
