"""What one device does: its replicas, each on exactly its rows. Read this file first.

A replica is Keras's own stateless call on the rows that belong to it: no padding, no mask and no patch, so whatever a
layer computes over "the batch" it computes over the replica's rows. Where nothing tells replicas apart, one call has the rows of
several (``plans.py`` decides). Neighbouring replicas with the same number of rows
run as one call under ``jax.vmap``; XLA sees one large batch, each replica its own.

What comes back is one of three things:

- **rows**: outputs and masks, ``(rows, …)``; the replicas' are joined in order;
- **means**: losses that layers add and scalar outputs; they are averaged by number of rows, so a regularizer, which
  is the same on each replica, counts once;
- **state**: non-trainable variables; :class:`OutputMerge` says how the replicas' values meet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.execution.replica_rng import seed_of_replica

__all__ = ["OutputMerge", "ReplicaCall", "ReplicaResult", "run_replicas"]


class OutputMerge(Enum):
    """How the replicas' values of a non-trainable variable become one."""

    MEAN = "mean over the replicas, weighted by rows"
    SUM = "old value plus the sum of the replicas' changes"
    FIRST = "the value of replica 0"
    SEED = "each replica draws from its own stream; the state of replica 0 is kept"


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "means", "state"], meta_fields=[])
@dataclass(frozen=True)
class ReplicaResult:
    """Result of one replica, of one device or of all; a variable that did not change is None in ``state``.

    That of a device holds its rows joined, and of each mean and each variable its share of the sum over devices.
    """

    rows: list[jax.Array]
    means: list[jax.Array]
    state: list[jax.Array | None]


# (trainable values, non-trainable values, this replica's inputs) -> result
ReplicaCall = Callable[..., ReplicaResult]


def run_replicas(
    call: ReplicaCall,
    merges: tuple[OutputMerge, ...],
    trainable: list[jax.Array],
    non_trainable: list[jax.Array],
    inputs: Any,
    *,
    rows: tuple[int, ...],
    first_replica: jax.Array | int,
    global_rows: int,
    vectorize: bool = True,
) -> ReplicaResult:
    """Run the replicas of one device.

    Args:
        call: one replica's forward pass.
        merges: for each non-trainable variable how its values meet.
        trainable: values of the trainable variables.
        non_trainable: values of the non-trainable variables.
        inputs: tree of arrays that begin with this device's rows; rows beyond them are not read.
        rows: number of rows of each replica, at least one of them not 0.
        first_replica: index of the first of these replicas among all.
        global_rows: rows of the whole batch, which weigh the means.
        vectorize: run equal neighbours under ``vmap``; else one after the other.
    """

    def one(replica: jax.Array, replica_inputs: Any) -> ReplicaResult:
        own = [
            seed_of_replica(value, replica) if merge is OutputMerge.SEED else value
            for value, merge in zip(non_trainable, merges, strict=True)
        ]
        return call(trainable, own, replica_inputs)

    shares = []
    for first, count, size, start in _runs(rows, vectorize):
        replicas = first_replica + jnp.arange(first, first + count)
        pieces = jax.tree.map(partial(_pieces, start=start, count=count, size=size), inputs)
        if count == 1:
            result = jax.tree.map(lambda leaf: leaf[None], one(replicas[0], jax.tree.map(lambda leaf: leaf[0], pieces)))
        else:
            result = jax.vmap(one)(replicas, pieces)
        shares.append(_share(result, merges, non_trainable, replicas, size / global_rows))
    return _combine(shares)


def _runs(rows: tuple[int, ...], vectorize: bool) -> Iterator[tuple[int, int, int, int]]:
    """Neighbours of one size, as (first replica, number of replicas, rows of each, first row); empty ones left out."""
    first = start = 0
    for size, group in groupby(rows):
        count = len(list(group))
        if size:
            parts = [(first, count)] if vectorize else [(first + i, 1) for i in range(count)]
            for part_first, part_count in parts:
                yield part_first, part_count, size, start + (part_first - first) * size
        first += count
        start += count * size


def _pieces(leaf: jax.Array, *, start: int, count: int, size: int) -> jax.Array:
    return leaf[start : start + count * size].reshape((count, size, *leaf.shape[1:]))


def _share(
    result: ReplicaResult, merges: tuple[OutputMerge, ...], old: list[jax.Array], replicas: jax.Array, weight: float
) -> ReplicaResult:
    """Share of ``count`` replicas of equal size; every leaf of ``result`` has a leading axis of that length."""
    return ReplicaResult(
        rows=[leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])) for leaf in result.rows],
        means=[_weighted(leaf, weight) for leaf in result.means],
        state=[
            None if new is None else _state_share(new, merge, value, replicas, weight)
            for new, merge, value in zip(result.state, merges, old, strict=True)
        ],
    )


def _state_share(new: jax.Array, merge: OutputMerge, old: jax.Array, replicas: jax.Array, weight: float) -> jax.Array:
    if merge is OutputMerge.MEAN:
        return _weighted(new, weight)
    if merge is OutputMerge.SUM:
        return (new - old).sum(axis=0, dtype=new.dtype)
    return jnp.where(replicas[0] == 0, new[0], jnp.zeros_like(new[0]))


def _weighted(leaf: jax.Array, weight: float) -> jax.Array:
    """Sum over the replicas of value times share of the rows; half-precision values are added in float32."""
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return (wide * weight).sum(axis=0)


def _combine(shares: list[ReplicaResult]) -> ReplicaResult:
    if len(shares) == 1:
        return shares[0]
    summed = [ReplicaResult(rows=[], means=share.means, state=share.state) for share in shares]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *summed)
    rows = [jnp.concatenate(leaves) for leaves in zip(*(share.rows for share in shares), strict=True)]
    return ReplicaResult(rows=rows, means=total.means, state=total.state)
