"""Sync points of replicas: a JAX primitive that marks them in the trace of a replica's function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from lockstep._errors import ModelError

__all__ = ["SyncPoint", "sync", "sync_p"]

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class SyncPoint:
    """A point of a replica's function at which values of all replicas are combined.

    Args:
        name: for errors; all replicas must reach sync points of the same names in the same order.
        combine: ``(values) -> results``, lists in which each entry is a :class:`PerReplica`, or an array that all share.
        is_linear: whether it adds values with the same factors on each replica, so that it is its own derivative.
    """

    name: str
    combine: Callable[[list[Any]], list[Any]]
    is_linear: bool = False


sync_p = Primitive("lockstep_sync")
sync_p.multiple_results = True
sync_p.def_abstract_eval(lambda *_, sync_point, outputs: [ShapedArray(shape, dtype) for shape, dtype in outputs])


def sync(sync_point: SyncPoint, values: Sequence[Any], outputs: Sequence[Shape]) -> list[Any]:
    """Mark a sync point; ``outputs`` are the shapes of its results, as this replica gets them."""
    return sync_p.bind(*values, sync_point=sync_point, outputs=tuple((tuple(x.shape), x.dtype) for x in outputs))


def _sync_same_shapes(values: Sequence[Any], sync_point: SyncPoint) -> list[Any]:
    return sync(sync_point, values, [jax.typeof(value) for value in values])


def _tangents(primals: Any, tangents: Any, *, sync_point: SyncPoint, outputs: Any) -> tuple[list[Any], list[Any]]:
    found = sync_p.bind(*primals, sync_point=sync_point, outputs=outputs)
    if not sync_point.is_linear:
        if all(isinstance(tangent, ad.Zero) for tangent in tangents):
            return found, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in found]
        raise ModelError(f"{sync_point.name} cannot be differentiated; all_reduce and all_gather can.")
    known = [position for position, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    mapped = dict(zip(known, _sync_same_shapes([tangents[position] for position in known], sync_point), strict=True))
    return found, [mapped.get(position, tangent) for position, tangent in enumerate(tangents)]


def _cotangents(cotangents: Any, *values: Any, sync_point: SyncPoint, outputs: Any) -> list[Any]:
    """The derivative of a sum over all replicas is the sum of all replicas' derivatives."""
    known = [position for position, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    mapped = dict(zip(known, _sync_same_shapes([cotangents[position] for position in known], sync_point), strict=True))
    return [mapped.get(position) for position in range(len(values))]


def _refuse_vmap(*_: Any, sync_point: SyncPoint, **__: Any) -> Any:
    raise ModelError(
        f"{sync_point.name} cannot be used inside jax.vmap: all replicas must reach it once, at the same point."
    )


ad.primitive_jvps[sync_p] = _tangents
ad.primitive_transposes[sync_p] = _cotangents
batching.primitive_batchers[sync_p] = partial(_refuse_vmap)
