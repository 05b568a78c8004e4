"""Ring all-reduce: every device sends to its neighbour only, and all links carry the same load."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.collectives.bucketing import PackedAllReduce


class RingAllReduce(PackedAllReduce):
    """Reduce-scatter and all-gather round a ring: with n devices 2(n - 1) rounds, and no algorithm sends fewer bytes.

    The vector is split into n chunks (padded with zeros to a multiple of n). In n - 1 rounds each chunk travels once round
    the ring and every device adds its own part; in n - 1 more rounds the finished chunks travel round. A device sends
    2(n - 1)/n of the bytes. Chunk c is added in the order of the devices c, c + 1, …, c - 1.

    Source: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.RingAllReduce())
    """

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Return the sum of one vector over the devices; see :class:`PackedAllReduce`."""
        chunks = jnp.pad(vector, (0, -vector.size % count)).reshape(count, -1)
        own = lax.axis_index(axis)
        ring = [(device, (device + 1) % count) for device in range(count)]

        def add(step: jax.Array, travelling: jax.Array) -> jax.Array:
            return lax.ppermute(travelling, axis, ring) + chunks[(own - step) % count]

        def keep(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            travelling = lax.ppermute(state[0], axis, ring)
            return travelling, state[1].at[(own + 1 - step) % count].set(travelling)

        finished = lax.fori_loop(1, count, add, chunks[own])
        gathered = jnp.zeros_like(chunks).at[(own + 1) % count].set(finished)
        return lax.fori_loop(1, count, keep, (finished, gathered))[1].reshape(-1)[: vector.size]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Return the text for the strategy's log line."""
        return f"all-reduce in a ring of {len(devices)}"
