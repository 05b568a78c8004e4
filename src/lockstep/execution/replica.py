"""Run the replicas of one device, each on exactly its rows and with seeds of its own. Read this file first.

A replica is Keras's own stateless call on the rows that belong to it: no mask and no patch, so whatever a
layer computes over "the batch" it computes over the replica's rows. Only in an uneven batch may padding follow them, if it is proved that
this changes no result; then normalizations leave it out of their statistics. If nothing in the model depends on the replica, one call may have
the rows of several (``executors.py`` decides). Neighbouring replicas with the same number of rows run as one call under
``jax.vmap``; XLA sees one large batch, each replica its own.

The results of a replica are of three kinds:

- **rows**: outputs and masks, ``(rows, …)``; those of the replicas are joined in order;
- **means**: losses that layers add and scalar outputs; they are averaged by number of rows, so a regularizer, which
  is the same on each replica, counts once;
- **state**: non-trainable variables; :class:`StateMerge` says how the replicas' values are merged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class StateMerge(Enum):
    """How the replicas' values of a non-trainable variable are merged."""

    MEAN = "mean over the replicas, weighted by rows"
    SUM = "old value plus the sum of the replicas' changes"
    FIRST = "the value of replica 0"
    SEED = "each replica draws from its own stream; the state of replica 0 is kept"


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "means", "state"], meta_fields=[])
@dataclass(frozen=True)
class ReplicaResult:
    """Result of one replica, of one device or of all; a variable that did not change is None in ``state``.

    The result of a device holds the joined rows of its replicas, and its share of the sum over devices of each mean and variable; a
    share of a seed is that of :func:`join_halves`.
    """

    rows: list[jax.Array]
    means: list[jax.Array]
    state: list[jax.Array | None]


# (trainable values, non-trainable values, this replica's inputs, shared arguments, how many rows of the inputs are used; None: all) -> result
ReplicaCall = Callable[..., ReplicaResult]


def run_replicas(
    call: ReplicaCall,
    merges: tuple[StateMerge, ...],
    trainable: list[jax.Array],
    non_trainable: list[jax.Array],
    inputs: Any,
    *,
    rows: tuple[int, ...],
    first_replica: jax.Array | int,
    global_rows: int,
    vectorize: bool = True,
    rows_used: jax.Array | None = None,
) -> ReplicaResult:
    """Run the replicas of one device.

    Args:
        call: one replica's forward pass.
        merges: for each non-trainable variable how its values are merged.
        trainable: values of the trainable variables.
        non_trainable: values of the non-trainable variables.
        inputs: tree of arrays that begin with this device's rows; later rows are not read.
        rows: number of rows of each replica; at least one is not 0.
        first_replica: index of the first of these replicas among all.
        global_rows: number of rows of the whole batch, for the weights of means.
        vectorize: run neighbours of equal size under ``vmap``, instead of one after the other.
        rows_used: how many of ``rows`` are rows of the batch, for the weights of means; the others are padding. None: all of them.
    """
    weights = (np.asarray(rows) if rows_used is None else rows_used) / global_rows

    def one(replica: jax.Array, replica_inputs: Any, used: Any = None) -> ReplicaResult:
        return call(trainable, with_replica_seeds(non_trainable, merges, replica), replica_inputs, used=used)

    shares = []
    for first, count, size, start in _runs(rows, vectorize):
        replicas = first_replica + jnp.arange(first, first + count)
        own = [jax.tree.map(partial(_replica_inputs, start=start, count=count, size=size), inputs)]
        own += [] if rows_used is None else [rows_used[first : first + count]]
        result = jax.vmap(one)(replicas, *own) if count > 1 else _run_single(one, replicas, *own)
        shares.append(_share(result, merges, non_trainable, replicas, weights[first : first + count]))
    return _combine(shares)


def _run_single(one: Callable[..., ReplicaResult], *arguments: Any) -> ReplicaResult:
    """Run a single replica without ``vmap``; like the arguments, the result has an axis of replicas."""
    result = one(*jax.tree.map(lambda leaf: leaf[0], arguments))
    return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), result)


def _runs(rows: tuple[int, ...], vectorize: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of non-empty replicas of one size: (first replica, number of replicas, rows of each, first row)."""
    start = 0
    for _, run in groupby(enumerate(rows), key=itemgetter(1) if vectorize else itemgetter(0)):
        (first, size), *others = run
        count = 1 + len(others)
        if size:
            yield first, count, size, start
        start += count * size


def _replica_inputs(leaf: jax.Array, *, start: int, count: int, size: int) -> jax.Array:
    return leaf[start : start + count * size].reshape((count, size, *leaf.shape[1:]))


def _share(
    result: ReplicaResult, merges: tuple[StateMerge, ...], old: list[jax.Array], replicas: jax.Array, weights: Any
) -> ReplicaResult:
    """Return the share of replicas of equal size; every leaf of ``result`` has a leading axis of one entry for each."""
    return ReplicaResult(
        rows=[leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])) for leaf in result.rows],
        means=[_weighted(leaf, weights) for leaf in result.means],
        state=[
            None if new is None else _state_share(new, merge, value, replicas, weights)
            for new, merge, value in zip(result.state, merges, old, strict=True)
        ],
    )


def _state_share(new: jax.Array, merge: StateMerge, old: jax.Array, replicas: jax.Array, weights: Any) -> jax.Array:
    if merge is StateMerge.MEAN:
        return _weighted(new, weights)
    if merge is StateMerge.SUM:
        return (new - old).sum(axis=0, dtype=new.dtype)
    # A device without replicas also counts from 0, and runs on padding only.
    is_first = (replicas[0] == 0) & (jnp.asarray(weights)[0] > 0)
    first = jnp.where(is_first, new[0], jnp.zeros_like(new[0]))
    return halves(first) if merge is StateMerge.SEED else first


def _weighted(leaf: jax.Array, weights: Any) -> jax.Array:
    """Return the sum over the replicas of value times share of the rows; half-precision values are added in float32."""
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    shares = jnp.asarray(weights, wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
    weighted = wide * shares
    if not isinstance(weights, np.ndarray):  # A replica may have padding only, and 0 times infinity is NaN.
        weighted = jnp.where(shares == 0, jnp.zeros_like(weighted), weighted)
    return weighted.sum(axis=0)


def _combine(shares: list[ReplicaResult]) -> ReplicaResult:
    if len(shares) == 1:
        return shares[0]
    summed = [ReplicaResult(rows=[], means=share.means, state=share.state) for share in shares]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *summed)
    rows = [jnp.concatenate(leaves) for leaves in zip(*(share.rows for share in shares), strict=True)]
    return ReplicaResult(rows=rows, means=total.means, state=total.state)


def with_replica_seeds(values: Sequence[Any], merges: Sequence[StateMerge], replica: jax.Array) -> list[Any]:
    """Return the values of the non-trainable variables as a replica gets them, with its own seeds."""
    return [
        replica_seed(value, replica) if merge is StateMerge.SEED else value
        for value, merge in zip(values, merges, strict=True)
    ]


def replica_seed(state: jax.Array, replica: jax.Array) -> jax.Array:
    """Return the seed generator state, ``uint32 (2,)``, of one replica, so that each replica draws from its own stream.

    Keras draws from a ``SeedGenerator``, whose state ``(seed, counter)`` is a key of JAX's threefry generator; each draw
    adds one to the counter. Replica 0 uses the state unchanged, so that one replica draws what plain Keras draws; replica r
    uses ``jax.random.fold_in(state, r)``. Draws of a replica thus depend on seed, step and replica only, and only the
    state of replica 0 is stored. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    folded = jax.random.key_data(jax.random.fold_in(key, replica))
    return jnp.where(replica == 0, state, folded)


def halves(value: jax.Array) -> jax.Array:
    """Return the upper and lower 16 bits of a seed's state, or of other whole numbers and bools, as ``float32 (2, …)``.

    Sums with zeros, and means of equal ones, can be joined without an error. XLA joins collectives of one dtype only: so these need none of
    their own beside float32 gradients.
    """
    bits = value.astype("uint32")
    return jnp.stack([bits >> 16, bits & 0xFFFF]).astype("float32")


def join_halves(found: jax.Array) -> jax.Array:
    """Return the value as ``uint32`` whose :func:`halves` these are."""
    upper, lower = jnp.round(found).astype("uint32")
    return (upper << 16) | lower
