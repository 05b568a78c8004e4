"""Pairs of equations from two traces of one function with different numbers of rows, and checks of their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from lockstep.execution.rowwise.row_axes import MixedRowsError

__all__ = ["EquationPair", "backward_of", "check_params", "is_same", "is_tracer"]


@dataclass(frozen=True)
class EquationPair:
    """The same equation in both traces.

    Attributes:
        equations: the equation in each trace.
        rows: number of rows of each trace.
    """

    equations: tuple[JaxprEqn, JaxprEqn]
    rows: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.equations[0].primitive.name

    @property
    def num_results(self) -> int:
        """Number of results."""
        return len(self.equations[0].outvars)

    def param(self, name: str) -> Any:
        """Return a parameter that :func:`check_params` found to be the same in both equations."""
        return self.equations[0].params[name]

    def params(self, name: str) -> tuple[Any, Any]:
        """Return a parameter of each equation."""
        return self.equations[0].params[name], self.equations[1].params[name]

    def shapes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of an input."""
        avals: list[Any] = [equation.invars[number].aval for equation in self.equations]
        return avals[0].shape, avals[1].shape

    def result_shapes(self, number: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a result."""
        avals: list[Any] = [equation.outvars[number].aval for equation in self.equations]
        return avals[0].shape, avals[1].shape

    def dtypes(self) -> tuple[Any, Any]:
        """Return the dtypes of the first input and of the first result."""
        avals: list[Any] = [self.equations[0].invars[0].aval, self.equations[0].outvars[0].aval]
        return avals[0].dtype, avals[1].dtype

    def result_dtypes(self, number: int) -> tuple[Any, Any]:
        """Return the dtypes of a result."""
        avals: list[Any] = [equation.outvars[number].aval for equation in self.equations]
        return avals[0].dtype, avals[1].dtype

    def has_fixed_shapes(self) -> bool:
        """Return whether the shapes of all results are the same in both traces."""
        return all(len(set(self.result_shapes(number))) == 1 for number in range(self.num_results))

    def blocks(self, lengths: tuple[int, int], unit: int) -> int:
        """Return the factor between two lengths and the numbers of rows times ``unit``."""
        count = lengths[0] // (self.rows[0] * unit)
        if tuple(count * rows * unit for rows in self.rows) != tuple(lengths):
            raise MixedRowsError("it cuts the axis of the rows inside a batch")
        return count


def check_params(pair: EquationPair, row_dependent: Sequence[str] = ()) -> None:
    """Check that an operation is the same for both numbers of rows, except for parameters that its rule checks."""
    one, other = (equation.params for equation in pair.equations)
    for name in one.keys() | other.keys():
        given = one.get(name), other.get(name)
        if name not in row_dependent and not callable(given[0]) and not is_same(*given):
            raise MixedRowsError(f"{pair.name}: its {name} changes with the number of rows")


def backward_of(equation: JaxprEqn) -> ClosedJaxpr:
    """Return the jaxpr of the backward pass of a function with a custom derivative: (inputs, cotangents) to gradients of the inputs."""
    inputs: list[Any] = [atom for atom in dict.fromkeys(equation.invars) if not isinstance(atom, Literal)]
    results: list[Any] = equation.outvars
    called = equation.params["call_jaxpr"].jaxpr
    alone = Jaxpr([], inputs, results, [equation], equation.effects, debug_info=called.debug_info)
    function = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def backward(primals: list[Any], cotangents: list[Any]) -> list[Any]:
        return jax.vjp(function, *primals)[1](cotangents)

    return jax.make_jaxpr(backward)([one.aval for one in inputs], [one.aval for one in results])


def is_same(one: Any, other: Any) -> bool:
    """Return whether two numbers, arrays or parameters are equal; a tracer equals only itself."""
    if one is other:
        return True
    if is_tracer(one, other):
        return False
    if isinstance(one, ClosedJaxpr) and isinstance(other, ClosedJaxpr):
        constants = len(one.consts) == len(other.consts) and all(map(is_same, one.consts, other.consts))
        return constants and str(one.jaxpr) == str(other.jaxpr)
    if isinstance(one, Jaxpr) and isinstance(other, Jaxpr):
        return str(one) == str(other)
    if isinstance(one, (jax.Array, np.ndarray)) and isinstance(other, (jax.Array, np.ndarray)):
        is_inexact = np.issubdtype(one.dtype, np.inexact)
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=is_inexact))
    try:
        return bool(one == other) or (one != one and other != other)  # both NaN
    except (TypeError, ValueError):
        return False


def is_tracer(*values: Any) -> bool:
    """Return whether any of the values is a tracer."""
    return any(isinstance(value, jax.core.Tracer) for value in values)
