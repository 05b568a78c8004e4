"""How a value depends on the rows of a batch: by an axis of rows, as a sum or mean over them, or not row by row."""

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

__all__ = [
    "Mixed",
    "MixedRowsError",
    "NeverTrue",
    "RowAxis",
    "RowCount",
    "RowDependence",
    "RowDependences",
    "RowMean",
    "RowSum",
    "common_dependence",
    "move_rows_back",
    "move_rows_first",
]


@dataclass(frozen=True)
class RowAxis:
    """Each entry along an axis of length ``outer * rows * inner`` depends on one row only.

    Entry ``(i * rows + row) * inner + j``, with ``i < outer`` and ``j < inner``, depends on ``row``.

    Attributes:
        axis: the axis.
        outer: number of consecutive blocks that each have all rows.
        inner: number of consecutive entries of one row.
        uniform: all entries along the axis are the same, or random, so that any ``outer`` and ``inner`` are right.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    uniform: bool = False

    def shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return the shape of the value for another number of rows."""
        return (*shape[: self.axis], self.outer * rows * self.inner, *shape[self.axis + 1 :])


@dataclass(frozen=True)
class RowSum:
    """A sum over the rows of values that depend on one row each."""


@dataclass(frozen=True)
class RowMean:
    """A mean over the rows of values that depend on one row each."""


@dataclass(frozen=True)
class RowCount:
    """A number proportional to the number of rows."""


@dataclass(frozen=True)
class NeverTrue:
    """A condition that is false for any number of rows, such as that there are none."""


@dataclass(frozen=True)
class Mixed:
    """Depends on several rows, on their number, or on the position of a row.

    Attributes:
        reason: the operation and what it does.
        layer: the layer that it is part of, if known.
        line: the line of the user's program, if known.
    """

    reason: str
    layer: str = ""
    line: str = ""

    def __str__(self) -> str:
        location = (f"layer {self.layer!r}" if self.layer else "", self.line)
        return ", ".join((self.reason, *filter(None, location)))

    def located_at(self, equation: JaxprEqn) -> "Mixed":
        """Return a copy with the layer and the line of an equation, if these are known."""
        layer, line = _source_location(equation)
        return replace(self, layer=layer or self.layer, line=line or self.line)


RowDependence = RowAxis | RowSum | RowMean | RowCount | NeverTrue | Mixed | None  # None: independent of the batch
RowDependences = list[RowDependence]


class MixedRowsError(Exception):
    """An operation combines several rows."""


def common_dependence(deps: RowDependences, what: str) -> RowDependence:
    """Return the dependence of a value whose entries are computed from the same entries of several others; None has no axis of rows."""
    named = [dep for dep in deps if dep is not None]
    if len(named) < len(deps) and any(isinstance(dep, (RowSum, RowCount, NeverTrue)) for dep in named):
        raise MixedRowsError(f"{what} combines a sum over the rows with another value")
    exact = [dep for dep in named if not (isinstance(dep, RowAxis) and dep.uniform)]
    found: RowDependence = exact[0] if exact else named[0] if named else None
    for dep in exact:
        if dep != found:
            raise MixedRowsError(f"{what} combines rows along different axes")
    if isinstance(found, RowAxis) and any(dep.axis != found.axis for dep in named if isinstance(dep, RowAxis)):
        raise MixedRowsError(f"{what} combines rows along different axes")
    return found


def move_rows_first(value: jax.Array, axis: RowAxis, rows: int) -> jax.Array:
    """Return a value, whose rows are along ``axis``, as ``(rows, …)``."""
    if axis.outer == axis.inner == 1:
        return jnp.moveaxis(value, axis.axis, 0)
    shape = (
        *value.shape[: axis.axis],
        axis.outer,
        rows,
        axis.inner,
        *value.shape[axis.axis + 1 :],
    )
    return jnp.moveaxis(value.reshape(shape), axis.axis + 1, 0)


def move_rows_back(value: jax.Array, axis: RowAxis) -> jax.Array:
    """Invert :func:`move_rows_first`."""
    if axis.outer == axis.inner == 1:
        return jnp.moveaxis(value, 0, axis.axis)
    moved = jnp.moveaxis(value, 0, axis.axis + 1)
    shape = moved.shape
    length = axis.outer * value.shape[0] * axis.inner
    return moved.reshape((*shape[: axis.axis], length, *shape[axis.axis + 3 :]))


# --- source locations ----------------------------------------------------------------------------------------------------------

_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _source_location(equation: JaxprEqn) -> tuple[str, str]:
    """Return the layer and the line of the user's program that an operation comes from; empty if unknown."""
    info = equation.source_info
    names = [name for name in re.findall(r"[^/()]+", str(info.name_stack)) if name not in _TRANSFORMATIONS]
    frames: Sequence[Any] = info.traceback.frames if info.traceback is not None else ()
    users = (frame for frame in frames if not frame.file_name.startswith((*_INSTALLED, _OWN, "<frozen")))
    line = next((f"{os.path.basename(frame.file_name)}:{frame.line_num}" for frame in users), "")
    return "/".join(names), line


_TRANSFORMATIONS = ("vmap", "jvp", "transpose", "checkpoint", "rematted_computation")
