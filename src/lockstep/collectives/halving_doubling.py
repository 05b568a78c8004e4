"""All-reduce by recursive halving and doubling: as few bytes as the ring for a power of two devices, in far fewer rounds."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.collectives.bucketing import PackedAllReduce


class HalvingDoublingAllReduce(PackedAllReduce):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling.

    With p = 2^k devices there are k rounds in which a device exchanges half of what it holds with a partner at distance
    1, 2, 4, … and adds, and k rounds back in which the finished parts double. A device sends 2(p - 1)/p of the bytes.
    If the number of devices is not a power of two, those beyond the largest one first send all to a partner, which adds
    it, and get the sum at the end: two more rounds with all the bytes.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.HalvingDoublingAllReduce())
    """

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Return the sum of one vector over the devices; see :class:`PackedAllReduce`."""
        power = 1 << (count.bit_length() - 1)
        partners = [(extra, extra - power) for extra in range(power, count)]
        if partners:
            vector = vector + lax.ppermute(vector, axis, partners)
        total = _reduce_power_of_two(vector, axis, power)
        if partners:
            received = lax.ppermute(total, axis, [(helper, extra) for extra, helper in partners])
            total = jnp.where(lax.axis_index(axis) >= power, received, total)
        return total

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Return the text for the strategy's log line."""
        return "all-reduce by recursive halving and doubling"


def _reduce_power_of_two(vector: jax.Array, axis: str, power: int) -> jax.Array:
    part = jnp.pad(vector, (0, -vector.size % power))
    own = lax.axis_index(axis)
    distances = [1 << bit for bit in range(power.bit_length() - 1)]
    for distance in distances:  # The largest messages go to the nearest device.
        upper = own & distance != 0
        low, high = jnp.split(part, 2)
        sent = lax.ppermute(jnp.where(upper, low, high), axis, _exchange(distance, power))
        part = jnp.where(upper, high, low) + sent
    for distance in reversed(distances):
        upper = own & distance != 0
        other = lax.ppermute(part, axis, _exchange(distance, power))
        part = jnp.where(upper, jnp.concatenate([other, part]), jnp.concatenate([part, other]))
    return part[: vector.size]


def _exchange(distance: int, power: int) -> list[tuple[int, int]]:
    return [(device, device ^ distance) for device in range(power)]
