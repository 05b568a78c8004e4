"""What is wrong with an array: NaN, Inf, and in which rows."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["counted", "kind_of", "listed", "rows_of"]

_LISTED = 8  # of more, the first are named


def kind_of(value: Any) -> str | None:
    """What is wrong, "NaN", "Inf" or "NaN and Inf"; None where all is finite, and where there are no numbers yet, as in a trace."""
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    try:
        found = [name for name, test in (("NaN", jnp.isnan), ("Inf", jnp.isinf)) if bool(test(value).any())]
    except jax.errors.ConcretizationTypeError:
        return None
    return " and ".join(found) or None


def rows_of(value: Any, rows: int) -> list[int]:
    """Which of ``rows`` rows have a number that is not finite; none where the array does not follow the rows."""
    if not np.ndim(value) or not rows or np.shape(value)[0] % rows:
        return []
    by_row = np.asarray(~jnp.isfinite(value)).reshape(rows, -1)
    return [int(row) for row in np.flatnonzero(by_row.any(axis=1))]


def listed(noun: str, numbers: Iterable[int]) -> str:
    """Numbers in words: "row 3", "rows 3 and 7", "rows 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"."""
    found = [str(number) for number in numbers]
    if len(found) > _LISTED + 1:
        found = [*found[:_LISTED], f"{len(found) - _LISTED} more"]
    return f"{noun} {found[0]}" if len(found) == 1 else f"{noun}s {', '.join(found[:-1])} and {found[-1]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 time", "2 times"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
