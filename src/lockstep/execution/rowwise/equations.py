"""One equation of a trace beside the same of another, made with another number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from lockstep.execution.rowwise.row_axes import MixesError

__all__ = ["EquationPair", "check_params", "is_tracer", "same"]


@dataclass(frozen=True)
class EquationPair:
    """One equation in both traces."""

    pair: tuple[JaxprEqn, JaxprEqn]
    rows: tuple[int, int]

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.pair[0].primitive.name

    def param(self, name: str) -> Any:
        """A parameter that is the same in both, as :func:`check_params` has seen."""
        return self.pair[0].params[name]

    def params(self, name: str) -> tuple[Any, Any]:
        """A parameter in each of both."""
        return self.pair[0].params[name], self.pair[1].params[name]

    def shapes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of an input."""
        kinds: list[Any] = [equation.invars[number].aval for equation in self.pair]
        return kinds[0].shape, kinds[1].shape

    def result_shapes(self, number: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of a result."""
        kinds: list[Any] = [equation.outvars[number].aval for equation in self.pair]
        return kinds[0].shape, kinds[1].shape

    def dtypes(self) -> tuple[Any, Any]:
        """Those of the first input and of the first result."""
        kinds: list[Any] = [self.pair[0].invars[0].aval, self.pair[0].outvars[0].aval]
        return kinds[0].dtype, kinds[1].dtype

    def result_dtypes(self, number: int) -> tuple[Any, Any]:
        """Those of a result."""
        kinds: list[Any] = [equation.outvars[number].aval for equation in self.pair]
        return kinds[0].dtype, kinds[1].dtype

    def gives_the_same_shapes(self) -> bool:
        """Whether no result depends on the number of rows in its shape."""
        return all(len(set(self.result_shapes(number))) == 1 for number in range(len(self.pair[0].outvars)))

    def blocks(self, lengths: tuple[int, int], unit: int) -> int:
        """How many times the rows, ``unit`` entries each, two lengths are."""
        count = lengths[0] // (self.rows[0] * unit)
        if tuple(count * rows * unit for rows in self.rows) != tuple(lengths):
            raise MixesError("it cuts the axis of the rows elsewhere than between whole batches")
        return count


def check_params(both: EquationPair, may_follow: Sequence[str] = ()) -> None:
    """That an operation does the same for any number of rows; parameters that may follow it are left to its rule."""
    one, other = (equation.params for equation in both.pair)
    for name in one.keys() | other.keys():
        given = one.get(name), other.get(name)
        if name not in may_follow and not callable(given[0]) and not same(*given):
            raise MixesError(f"{both.name}: its {name} changes with the number of rows")


def backward_of(equation: JaxprEqn) -> ClosedJaxpr:
    """The trace of the derivative of what is called with one of its own: from its inputs and what arrives at its results to what its inputs get."""
    inputs: list[Any] = [atom for atom in dict.fromkeys(equation.invars) if not isinstance(atom, Literal)]
    results: list[Any] = equation.outvars
    called = equation.params["call_jaxpr"].jaxpr
    alone = Jaxpr([], inputs, results, [equation], equation.effects, debug_info=called.debug_info)
    function = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def backward(primals: list[Any], arriving: list[Any]) -> list[Any]:
        return jax.vjp(function, *primals)[1](arriving)

    return jax.make_jaxpr(backward)([one.aval for one in inputs], [one.aval for one in results])


def same(one: Any, other: Any) -> bool:
    """Whether two numbers, arrays or parameters are equal; of what is traced only itself is."""
    if one is other:
        return True
    if is_tracer(one, other):
        return False
    if isinstance(one, ClosedJaxpr) and isinstance(other, ClosedJaxpr):
        constants = len(one.consts) == len(other.consts) and all(map(same, one.consts, other.consts))
        return constants and str(one.jaxpr) == str(other.jaxpr)
    if isinstance(one, Jaxpr) and isinstance(other, Jaxpr):
        return str(one) == str(other)
    if isinstance(one, (jax.Array, np.ndarray)) and isinstance(other, (jax.Array, np.ndarray)):
        is_inexact = np.issubdtype(one.dtype, np.inexact)
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=is_inexact))
    try:
        return bool(one == other) or (one != one and other != other)  # not a number, both
    except (TypeError, ValueError):
        return False


def is_tracer(*values: Any) -> bool:
    """Whether one of them is known as a trace only."""
    return any(isinstance(value, jax.core.Tracer) for value in values)
