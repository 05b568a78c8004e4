"""Whether each row of a result follows from its own row of the batch alone: a proof, from two traces of one function.

The function is traced with two numbers of rows, and both traces are read together, equation by equation. What changes from one to the
other without being a row — a number, a shape, an operation — shows that the number of rows plays a part. For each value it is
followed along which axis the rows lie. An operation that brings rows together, or that has no rule here, is named; it is never taken
for row-wise. Random bits count as row-wise: replicas draw from streams of their own.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from lockstep.execution.rowwise.equations import EquationPair, backward_of, check_params, is_tracer, same
from lockstep.execution.rowwise.primitive_rules import FOLLOW_ROWS, RULES
from lockstep.execution.rowwise.row_axes import (
    Mixed,
    MixesError,
    Never,
    Place,
    Places,
    RowAxis,
    RowCount,
    RowMean,
    RowSum,
    common,
)
from lockstep.execution.rowwise.sum_rules import of_sums

__all__ = ["Trace", "places_of", "traced"]


@dataclass(frozen=True)
class Trace:
    """A trace of ``function(fixed, batch)``, made with so many rows.

    Attributes:
        rows: the number of rows.
        fixed: the number of arrays that do not depend on the batch.
        closed: the trace.
        shapes: those of the results.
    """

    rows: int
    fixed: int
    closed: ClosedJaxpr
    shapes: list[jax.ShapeDtypeStruct]

    @functools.cached_property
    def operations(self) -> Counter[str]:
        """How often each operation is in it, at any depth."""
        return _operations(self.closed.jaxpr)


def traced(function: Callable[..., Any], fixed: Sequence[Any], batch: Sequence[Any], rows: int) -> Trace:
    """Trace a function for the proof.

    Args:
        function: takes two lists of arrays, and gives one.
        fixed: arrays that do not depend on the batch.
        batch: arrays or shapes ``(rows, …)``.
        rows: is taken for the length of their first axis.
    """
    own = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in batch]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(list(fixed), own)
    return Trace(rows, len(fixed), closed, shapes)


def places_of(one: Trace, other: Trace) -> Places:
    """Follow the rows through two traces of one function, of different numbers of rows, at least 2; gives where they are in each result."""
    batch = len(one.closed.jaxpr.invars) - one.fixed
    places: Places = [*[None] * one.fixed, *[RowAxis(0)] * batch]
    return _JaxprReader((one.rows, other.rows)).closed(one.closed, other.closed, places)


class _JaxprReader:
    """Reads two traces together."""

    def __init__(self, rows: tuple[int, int], follows_gradients: bool = True) -> None:
        self.rows, self.follows_gradients = rows, follows_gradients

    def closed(self, first: ClosedJaxpr, second: ClosedJaxpr, places: Places) -> Places:
        """Places of the results, from those of the inputs."""
        constants = [self._fixed(one, other) for one, other in zip(first.consts, second.consts, strict=False)]
        if len(first.consts) != len(second.consts):
            return [Mixed("its constants change with the number of rows")] * len(first.jaxpr.outvars)
        return self.read(first.jaxpr, second.jaxpr, [*constants, *places])

    def read(self, first: Jaxpr, second: Jaxpr, places: Places) -> Places:
        """As :meth:`closed`, with the places of the constants before those of the inputs."""
        known: dict[Any, Place] = dict(zip((*first.constvars, *first.invars), places, strict=True))
        twins = dict(zip((*first.constvars, *first.invars), (*second.constvars, *second.invars), strict=True))

        def place(one: Any, other: Any) -> Place:
            if isinstance(one, Literal) and isinstance(other, Literal):
                return self._fixed(one.val, other.val)
            if isinstance(one, Literal) or twins[one] is not other:
                return Mixed("its operations change with the number of rows")
            return known[one]

        if [one.primitive.name for one in first.eqns] != [other.primitive.name for other in second.eqns]:
            return [self._difference(first, second)] * len(first.outvars)
        for pair in zip(first.eqns, second.eqns, strict=True):
            inputs = [place(*atoms) for atoms in zip(pair[0].invars, pair[1].invars, strict=True)]
            both = EquationPair(pair, self.rows)
            try:
                found = self._results(both, inputs)
            except MixesError as error:
                found = [Mixed(str(error)).seen_at(pair[0])] * len(pair[0].outvars)
            known.update(zip(pair[0].outvars, found, strict=True))
            twins.update(zip(pair[0].outvars, pair[1].outvars, strict=True))
        return [place(*atoms) for atoms in zip(first.outvars, second.outvars, strict=True)]

    def _fixed(self, one: Any, other: Any) -> Place:
        """The place of a number or an array that stands in the traces."""
        if same(one, other):
            return None
        if np.ndim(one) == np.ndim(other) == 0 and not is_tracer(one, other):
            is_count = float(one) * self.rows[1] == float(other) * self.rows[0]
            return (
                RowCount()
                if is_count
                else Mixed(f"a number is {one} for {self.rows[0]} rows and {other} for {self.rows[1]}")
            )
        return Mixed("an array that is no input changes with the number of rows")

    def _difference(self, first: Jaxpr, second: Jaxpr) -> Mixed:
        for one, other in zip(first.eqns, second.eqns, strict=False):
            if one.primitive.name != other.primitive.name:
                return Mixed("its operations change with the number of rows").seen_at(one)
        return Mixed("its operations change with the number of rows")

    def _results(self, both: EquationPair, inputs: Places) -> Places:
        """Places of the results of one equation."""
        if both.name == "select_n" and inputs[0] == Never():
            return [self._checked(both, 0, inputs[1])]
        for one in inputs:
            if isinstance(one, Mixed):
                located = one if one.layer or one.line else one.seen_at(both.pair[0])
                return [located] * len(both.pair[0].outvars)
        summed = of_sums(both, inputs)
        if summed is not None:
            return [self._checked(both, 0, summed)]
        body = _BODIES.get(both.name)
        rule = RULES.get(both.name)
        if body is not None:
            found = getattr(self, body)(both, inputs)
            # What is called may have been traced for somebody else: the call says where it stands.
            found = [one.seen_at(both.pair[0]) if isinstance(one, Mixed) else one for one in found]
        elif any(isinstance(one, (RowCount, Never)) for one in inputs):
            raise MixesError(f"{both.name} works on the number of rows")
        elif any(isinstance(one, (RowSum, RowMean)) for one in inputs):
            raise MixesError(f"{both.name} works on a sum over the rows")
        elif all(one is None for one in inputs) and both.gives_the_same_shapes():
            check_params(both)
            found = [None] * len(both.pair[0].outvars)
        elif rule is not None:
            check_params(both, FOLLOW_ROWS.get(both.name, ()))
            found = rule(both, inputs)
        else:
            raise MixesError(f"{both.name} has no rule")
        return [self._checked(both, number, one) for number, one in enumerate(found)]

    def _checked(self, both: EquationPair, number: int, place: Place) -> Place:
        """The place, where the shapes agree: along one axis the rows, and no other that follows their number."""
        one, other = both.result_shapes(number)
        if len(set(both.result_dtypes(number))) > 1:
            raise MixesError(f"{both.name}: the type of its result changes with the number of rows")
        if isinstance(place, RowAxis):
            lengths = [place.outer * rows * place.inner for rows in self.rows]
            if place.axis < len(one) == len(other) and [one[place.axis], other[place.axis]] == lengths:
                one, other = _without(one, place.axis), _without(other, place.axis)
            else:
                raise MixesError(
                    f"{both.name} gives {list(one)} for {self.rows[0]} rows and {list(other)} for {self.rows[1]}"
                )
        if one != other and not isinstance(place, Mixed):
            raise MixesError(
                f"{both.name} gives {list(one)} for {self.rows[0]} rows and {list(other)} for {self.rows[1]}"
            )
        return place

    # --- operations with a body of their own ----------------------------------------------------------------------------

    def call(self, both: EquationPair, inputs: Places) -> Places:
        name = next(n for n in ("call_jaxpr", "fun_jaxpr", "jaxpr") if n in both.pair[0].params)
        one, other = both.params(name)
        if isinstance(one, ClosedJaxpr):
            return self.closed(one, other, inputs)
        return self.read(one, other, inputs)

    def own_gradient(self, both: EquationPair, inputs: Places) -> Places:
        """Somebody's own derivative may bring together rows that the function itself keeps apart."""
        found = self.call(both, inputs)
        if self.follows_gradients and any(isinstance(one, RowAxis) for one in found):
            one, other = (backward_of(equation) for equation in both.pair)
            given = dict(zip(both.pair[0].invars, inputs, strict=True))
            own = [place for atom, place in given.items() if not isinstance(atom, Literal)]
            reader = _JaxprReader(self.rows, follows_gradients=False)
            for before, after in zip(own, reader.closed(one, other, [*own, *found]), strict=True):
                if isinstance(after, Mixed):
                    raise MixesError(f"{both.name} has a derivative of its own, where {after}")
                is_same = after == before or (isinstance(before, RowAxis) and before.uniform)
                if not (is_same if isinstance(before, RowAxis) else isinstance(after, RowSum)):
                    raise MixesError(f"{both.name} has a derivative of its own that is no sum over the rows")
        return found

    def cond(self, both: EquationPair, inputs: Places) -> Places:
        check_params(both, ("branches",))
        if inputs[0] is not None:
            raise MixesError("cond branches on what follows from the rows")
        if len({len(branches) for branches in both.params("branches")}) > 1:
            raise MixesError("cond has other branches for another number of rows")
        found = [self.closed(*branches, inputs[1:]) for branches in zip(*both.params("branches"), strict=True)]
        return [_merged(list(places), "cond") for places in zip(*found, strict=True)]

    def scan(self, both: EquationPair, inputs: Places) -> Places:
        check_params(both, ("jaxpr",))
        constants, carried = both.param("num_consts"), both.param("num_carry")
        given = inputs[: constants + carried]
        slices = []
        for place in inputs[constants + carried :]:
            if isinstance(place, RowAxis) and place.axis == 0:
                raise MixesError("scan goes along the rows")
            slices.append(replace(place, axis=place.axis - 1) if isinstance(place, RowAxis) else place)

        def once(carry: Places) -> tuple[Places, Places]:
            found = self.closed(*both.params("jaxpr"), [*given[:constants], *carry, *slices])
            return found[:carried], found[carried:]

        carry, stacked = _settled(given[constants:], once)
        return [*carry, *(replace(one, axis=one.axis + 1) if isinstance(one, RowAxis) else one for one in stacked)]

    def linear_solve(self, both: EquationPair, inputs: Places) -> Places:
        """What solves a system is a function of its own; the others are for derivatives."""
        check_params(both, ("jaxprs",))
        lengths = both.param("const_lengths")
        begin = lengths.matvec + lengths.vecmat
        given = [*inputs[begin : begin + lengths.solve], *inputs[sum(lengths) :]]
        one, other = both.params("jaxprs")
        return self.closed(one.solve, other.solve, given)

    def loop(self, both: EquationPair, inputs: Places) -> Places:
        check_params(both, ("cond_jaxpr", "body_jaxpr"))
        of_condition, of_body = both.param("cond_nconsts"), both.param("body_nconsts")
        fixed = inputs[of_condition : of_condition + of_body]
        carry, _ = _settled(
            inputs[of_condition + of_body :],
            lambda carry: (self.closed(*both.params("body_jaxpr"), [*fixed, *carry]), []),
        )
        if self.closed(*both.params("cond_jaxpr"), [*inputs[:of_condition], *carry]) != [None]:
            raise MixesError("while ends by a condition that sees several rows")
        return carry


def _operations(jaxpr: Jaxpr) -> Counter[str]:
    found = Counter(equation.primitive.name for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        for body in jaxprs_in_params(equation.params):
            found += _operations(body)
    return found


def _settled(carry: Places, once: Callable[[Places], tuple[Places, Places]]) -> tuple[Places, Places]:
    """Places of what a loop carries that its body leaves as they are, and of what the body gives besides."""
    for _ in range(len(carry) + 2):
        after, given = once(carry)
        merged = [_merged([before, then], "a loop") for before, then in zip(carry, after, strict=True)]
        if merged == carry:
            return carry, given
        carry = merged
    raise MixesError("a loop mixes the rows")


def _merged(places: Places, what: str) -> Place:
    """The place that holds for a value that may come from any of several."""
    for place in places:
        if isinstance(place, Mixed):
            return place
    return common(places, what)


_CALLS = [
    *("jit", "pjit", "closed_call", "core_call", "remat"),
    *("remat2", "checkpoint", "custom_jvp_call"),
]
_BODIES = {**dict.fromkeys(_CALLS, "call"), "cond": "cond", "scan": "scan", "while": "loop"}
_BODIES |= {"custom_linear_solve": "linear_solve", "custom_vjp_call": "own_gradient"}


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
