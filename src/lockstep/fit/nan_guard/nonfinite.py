"""Finds NaN and Inf in arrays, and the rows that have them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["counted", "kind_of", "listed", "rows_of"]

_LISTED = 8  # of a longer list, the first are named


def kind_of(value: Any) -> str | None:
    """Return "NaN", "Inf" or "NaN and Inf"; None if all numbers are finite, or have no values yet, as in a trace."""
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    try:
        found = [name for name, test in (("NaN", jnp.isnan), ("Inf", jnp.isinf)) if bool(test(value).any())]
    except jax.errors.ConcretizationTypeError:
        return None
    return " and ".join(found) or None


def rows_of(value: Any, rows: int) -> list[int]:
    """Return which of ``rows`` rows have a non-finite number; none if the first axis of the array is no multiple of the rows."""
    if not np.ndim(value) or not rows or np.shape(value)[0] % rows:
        return []
    by_row = np.asarray(~jnp.isfinite(value)).reshape(rows, -1)
    return [int(row) for row in np.flatnonzero(by_row.any(axis=1))]


def listed(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers: "row 3", "rows 3 and 7", "rows 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"."""
    found = [str(number) for number in numbers]
    if len(found) > _LISTED + 1:
        found = [*found[:_LISTED], f"{len(found) - _LISTED} more"]
    return f"{noun} {found[0]}" if len(found) == 1 else f"{noun}s {', '.join(found[:-1])} and {found[-1]}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: "1 time", "2 times"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
