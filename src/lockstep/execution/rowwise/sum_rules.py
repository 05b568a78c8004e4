"""Which operations keep a sum over the rows a sum, and make a mean of it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from lockstep.execution.rowwise.equations import EquationPair
from lockstep.execution.rowwise.row_axes import Never, Place, Places, RowCount, RowMean, RowSum

__all__ = ["of_sums"]


def of_sums(both: EquationPair, inputs: Places) -> Place:
    """The place of what is linear in sums and means over the rows, or None where it is no such thing."""
    if inputs == [RowCount()] and both.name in ("convert_element_type", "copy", "copy_p"):
        return None if _rounds(both) else RowCount()
    if both.name == "eq" and inputs == [RowCount(), None] and _is_zero(both.pair[0].invars[1]):
        return Never()
    if both.name == "div" and inputs == [RowSum(), RowCount()]:
        return None if _rounds(both) else RowMean()
    sums = {type(one) for one in inputs if isinstance(one, (RowSum, RowMean))}
    if len(sums) != 1 or not all(one is None or isinstance(one, (RowSum, RowMean)) for one in inputs):
        return None
    (kind,) = sums
    is_linear = (
        both.name in _SAME_FOR_SUMS
        or (both.name == "mul" and None in inputs)
        or (both.name == "div" and inputs[1] is None)
        or (both.name in ("add", "sub", "add_any") and (kind is RowMean or _adds_zero_at_most(both, inputs)))
    )
    return kind() if is_linear and not _rounds(both) else None


def _adds_zero_at_most(both: EquationPair, inputs: Places) -> bool:
    """Whether nothing is added to a sum over the rows but others and 0."""
    return all(one is not None or _is_zero(atom) for one, atom in zip(inputs, both.pair[0].invars, strict=True))


def _rounds(both: EquationPair) -> bool:
    """Whether what comes is a whole number, where it was none or need be none."""
    before, after = (jnp.issubdtype(dtype, jnp.inexact) for dtype in both.dtypes())
    return not after and (before or both.name == "div")


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and float(atom.val) == 0


_SAME_FOR_SUMS = frozenset(
    (
        "convert_element_type",
        "copy",
        "neg",
        "reshape",
        "squeeze",
        "reduce_sum",
        "transpose",
        "copy_p",
        "broadcast_in_dim",
    )
)
