"""One equation of a trace beside the same of another, made with another number of rows."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from lockstep.step.rowwise.places import MixesError

__all__ = ["Both", "check_params", "is_tracer", "same"]


@dataclass(frozen=True)
class Both:
    """One equation in both traces."""

    pair: tuple[JaxprEqn, JaxprEqn]
    rows: tuple[int, int]

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.pair[0].primitive.name

    def param(self, name: str) -> Any:
        """A parameter that is the same in both."""
        one, other = self.params(name)
        if not same(one, other):
            raise MixesError(f"its {name} changes with the number of rows")
        return one

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

    def blocks(self, lengths: tuple[int, int], unit: int) -> int:
        """How many times the rows, ``unit`` entries each, two lengths are."""
        count = lengths[0] // (self.rows[0] * unit)
        if tuple(count * rows * unit for rows in self.rows) != tuple(lengths):
            raise MixesError("it cuts the axis of the rows elsewhere than between whole batches")
        return count


def check_params(both: Both) -> None:
    """That an operation does the same for any number of rows."""
    for name, one in both.pair[0].params.items():
        if not callable(one) and not same(one, both.pair[1].params.get(name)):
            raise MixesError(f"{both.name}: its {name} changes with the number of rows")


def same(one: Any, other: Any) -> bool:
    """Whether two numbers, arrays or parameters are equal; of what is traced only itself is."""
    if one is other:
        return True
    if is_tracer(one, other):
        return False
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
