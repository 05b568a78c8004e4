"""Where the rows of a batch are in a value, and where in a program that was decided."""

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
    "MixesError",
    "Never",
    "Place",
    "Places",
    "RowAxis",
    "RowCount",
    "RowMean",
    "RowSum",
    "common",
    "with_rows_back",
    "with_rows_first",
]


@dataclass(frozen=True)
class RowAxis:
    """Entry ``(before * rows + row) * after + rest`` along ``axis`` follows from ``row`` alone, where the axis has ``outer * rows * inner``.

    ``uniform``: all entries along the axis are the same, or random, so that any such reading is right.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    uniform: bool = False

    def shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """That of a value with another number of rows."""
        return (*shape[: self.axis], self.outer * rows * self.inner, *shape[self.axis + 1 :])


@dataclass(frozen=True)
class RowSum:
    """A sum over the rows of what follows from one row."""


@dataclass(frozen=True)
class RowMean:
    """A mean over the rows of what follows from one row."""


@dataclass(frozen=True)
class RowCount:
    """A number in proportion to that of the rows."""


@dataclass(frozen=True)
class Never:
    """A condition that no number of rows fulfils, such as that there are none."""


@dataclass(frozen=True)
class Mixed:
    """Follows from several rows, from their number, or from a row's position."""

    reason: str
    layer: str = ""
    line: str = ""  # of the user's program

    def __str__(self) -> str:
        places = (f"layer {self.layer!r}" if self.layer else "", self.line)
        return ", ".join((self.reason, *filter(None, places)))

    def seen_at(self, equation: JaxprEqn) -> "Mixed":
        """With the layer and the line of an equation, as far as they are known there."""
        layer, line = _place_in_program(equation)
        return replace(self, layer=layer or self.layer, line=line or self.line)


Place = RowAxis | RowSum | RowMean | RowCount | Never | Mixed | None  # None: does not depend on the batch
Places = list[Place]


class MixesError(Exception):
    """An operation brings rows together."""


def common(places: Places, what: str) -> Place:
    """The place of a value each entry of which follows from the same entry of several others; None has no axis of rows."""
    named = [place for place in places if place is not None]
    if len(named) < len(places) and any(isinstance(place, (RowSum, RowCount, Never)) for place in named):
        raise MixesError(f"{what} gives a sum over the rows or something else")
    exact = [place for place in named if not (isinstance(place, RowAxis) and place.uniform)]
    found: Place = exact[0] if exact else named[0] if named else None
    for place in exact:
        if place != found:
            raise MixesError(f"{what} brings rows together that lie along different axes")
    if isinstance(found, RowAxis) and any(place.axis != found.axis for place in named if isinstance(place, RowAxis)):
        raise MixesError(f"{what} brings rows together that lie along different axes")
    return found


def with_rows_first(value: jax.Array, place: RowAxis, rows: int) -> jax.Array:
    """``(rows, …)`` of a value whose rows lie as ``place`` says."""
    if place.outer == place.inner == 1:
        return jnp.moveaxis(value, place.axis, 0)
    shape = (*value.shape[: place.axis], place.outer, rows, place.inner, *value.shape[place.axis + 1 :])
    return jnp.moveaxis(value.reshape(shape), place.axis + 1, 0)


def with_rows_back(value: jax.Array, place: RowAxis) -> jax.Array:
    """The inverse of :func:`with_rows_first`."""
    if place.outer == place.inner == 1:
        return jnp.moveaxis(value, 0, place.axis)
    moved = jnp.moveaxis(value, 0, place.axis + 1)
    shape = moved.shape
    length = place.outer * value.shape[0] * place.inner
    return moved.reshape((*shape[: place.axis], length, *shape[place.axis + 3 :]))


# --- where it stands ---------------------------------------------------------------------------------------------------------

_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _place_in_program(equation: JaxprEqn) -> tuple[str, str]:
    """The layer and the line of the user's program that an operation comes from; empty where they are not known."""
    info = equation.source_info
    names = [name for name in re.findall(r"[^/()]+", str(info.name_stack)) if name not in _TRANSFORMATIONS]
    frames: Sequence[Any] = info.traceback.frames if info.traceback is not None else ()
    users = (frame for frame in frames if not frame.file_name.startswith((*_INSTALLED, _OWN, "<frozen")))
    line = next((f"{os.path.basename(frame.file_name)}:{frame.line_num}" for frame in users), "")
    return "/".join(names), line


_TRANSFORMATIONS = ("vmap", "jvp", "transpose", "checkpoint", "rematted_computation")
