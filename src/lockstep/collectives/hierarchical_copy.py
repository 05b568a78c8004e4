"""All-reduce by copies on two levels: members send to the leader of their group, leaders to the first; the sum goes back."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.collectives.bucketing import PackedAllReduce

__all__ = ["HierarchicalCopyAllReduce", "group_size"]


class HierarchicalCopyAllReduce(PackedAllReduce):
    """Adds on the leader of each group of neighbours, then on the first leader, and copies back the same way.

    Source: ``tf.distribute.HierarchicalCopyAllReduce``, which has two groups (halves of the devices, as they are wired in
    a DGX-1) and takes another leader for each pack. Here a group has about the square root of n devices, so any number
    of devices has few rounds; the leader is the group's first device. With groups of g there are
    2(g - 1) + 2(⌈n/g⌉ - 1) rounds with all the bytes; the first device sends and receives half of those.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.HierarchicalCopyAllReduce())
    """

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Return the sum of one vector over the devices; see :class:`PackedAllReduce`."""
        rounds = _rounds(count, group_size(count))
        for pairs in rounds:
            vector = vector + lax.ppermute(vector, axis, pairs)
        own = lax.axis_index(axis)
        for pairs in reversed(rounds):
            received = lax.ppermute(vector, axis, [(leader, member) for member, leader in pairs])
            members = jnp.asarray([member for member, _ in pairs])
            vector = jnp.where((members == own).any(), received, vector)
        return vector

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Return the text for the strategy's log line."""
        return f"copies in groups of {group_size(len(devices))}, added by their leaders, then by the first"


def group_size(count: int) -> int:
    """Return the number of neighbouring devices in a group: the square root of the number of devices, rounded up."""
    return math.isqrt(count - 1) + 1


def _rounds(count: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the (sender, receiver) pairs of each round towards the first device; a leader receives one copy at a time."""
    leaders = range(0, count, size)
    inside = [[(leader + step, leader) for leader in leaders if leader + step < count] for step in range(1, size)]
    return [pairs for pairs in inside if pairs] + [[(leader, 0)] for leader in leaders[1:]]
