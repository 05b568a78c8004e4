"""Where replicas meet: the marks that a replica's function leaves in its trace, and what happens there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from lockstep._errors import ModelError

__all__ = ["SyncPoint", "meet", "meet_p"]

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class SyncPoint:
    """One place where all replicas bring values together.

    Args:
        name: how errors call it; replicas that meet must come to meetings of one name.
        combine: ``(values) -> results``, lists in which each entry is a :class:`PerReplica`, or an array that all share.
        is_linear: it adds values with the same factors on each replica, so that its derivative is itself.
    """

    name: str
    combine: Callable[[list[Any]], list[Any]]
    is_linear: bool = False


meet_p = Primitive("lockstep_meet")
meet_p.multiple_results = True
meet_p.def_abstract_eval(lambda *_, meeting, outputs: [ShapedArray(shape, dtype) for shape, dtype in outputs])


def meet(meeting: SyncPoint, values: Sequence[Any], outputs: Sequence[Shape]) -> list[Any]:
    """Mark a meeting; ``outputs`` are the shapes of its results, as this replica gets them."""
    return meet_p.bind(*values, meeting=meeting, outputs=tuple((tuple(x.shape), x.dtype) for x in outputs))


def _same(values: Sequence[Any], meeting: SyncPoint) -> list[Any]:
    return meet(meeting, values, [jax.typeof(value) for value in values])


def _tangents(primals: Any, tangents: Any, *, meeting: SyncPoint, outputs: Any) -> tuple[list[Any], list[Any]]:
    found = meet_p.bind(*primals, meeting=meeting, outputs=outputs)
    if not meeting.is_linear:
        if all(isinstance(tangent, ad.Zero) for tangent in tangents):
            return found, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in found]
        raise ModelError(f"{meeting.name} cannot be differentiated; all_reduce and all_gather can.")
    known = [position for position, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    moved = dict(zip(known, _same([tangents[position] for position in known], meeting), strict=True))
    return found, [moved.get(position, tangent) for position, tangent in enumerate(tangents)]


def _cotangents(cotangents: Any, *values: Any, meeting: SyncPoint, outputs: Any) -> list[Any]:
    """The derivative of a sum over all replicas is the sum of all replicas' derivatives."""
    known = [position for position, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    moved = dict(zip(known, _same([cotangents[position] for position in known], meeting), strict=True))
    return [moved.get(position) for position in range(len(values))]


def _refuse(*_: Any, meeting: SyncPoint, **__: Any) -> Any:
    raise ModelError(f"{meeting.name} cannot stand inside jax.vmap: all replicas must meet once, in the same place.")


ad.primitive_jvps[meet_p] = _tangents
ad.primitive_transposes[meet_p] = _cotangents
batching.primitive_batchers[meet_p] = partial(_refuse)
