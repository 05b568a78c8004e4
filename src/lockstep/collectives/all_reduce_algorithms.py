"""All-reduce algorithms of messages between pairs of devices: a ring, recursive halving and doubling, one device that adds, and groups.

In a ring every device sends to its neighbour only, and all links carry the same load. Recursive halving and doubling sends as few bytes for a
power of two devices, in far fewer rounds. A device that adds and copies back, alone or for its group, is as in ``tf.distribute``.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax

from lockstep._errors import DeviceError, function, instance_of
from lockstep.collectives.base import CrossDeviceOps, PackedAllReduce, converted_sum
from lockstep.devices.names import device_name, listed_devices, parse_device_name


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
        return f"all-reduce in a ring of {len(devices)}"


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


Accumulate = Callable[[list[jax.Array]], jax.Array]


class ReductionToOneDevice(CrossDeviceOps):
    """Every device sends its values to one device, which adds them in order and sends the sum back.

    Source: ``tf.distribute.ReductionToOneDevice``. With n devices the chosen one receives n - 1 copies, one after the
    other, and the sum goes back in ceil(log2(n)) rounds (a binomial tree).

    Args:
        reduce_to_device: name of the device that adds, for example ``"gpu:0"``; one of the strategy's devices. By
            default the strategy's first.
        accumulation_fn: takes the list of the devices' arrays, in order, and returns their sum. By default they are
            added from left to right.

    Raises:
        DeviceError: ``reduce_to_device`` is no name of a device.
        OptionError: an argument has another type.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.ReductionToOneDevice())
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: Accumulate | None = None) -> None:
        if reduce_to_device is not None:
            name = instance_of(str, "reduce_to_device", reduce_to_device, "a name such as 'gpu:0'")
            parse_device_name(name, "reduce_to_device")  # Refuses a misspelt name now and not at the first step.
        if accumulation_fn is not None:
            function("accumulation_fn", accumulation_fn, "a function of a list of arrays")
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn: Accumulate = accumulation_fn or partial(reduce, add)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Return the sum of each array over the devices; see :class:`CrossDeviceOps`.

        Raises:
            DeviceError: ``reduce_to_device`` is not one of the strategy's devices.
        """
        root = self._root(devices)
        return [self._reduce_one(value, axis, root, len(devices)) for value in values]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Return the text for the strategy's log line; the words are TensorFlow's.

        Raises:
            DeviceError: ``reduce_to_device`` is not one of the strategy's devices.
        """
        names = [device_name(device) for device in devices]
        return f"reduce to {names[self._root(devices)]}, then broadcast to {listed_devices(names)}"

    def _root(self, devices: Sequence[jax.Device]) -> int:
        if self.reduce_to_device is None:
            return 0
        wanted = parse_device_name(self.reduce_to_device)
        names = [device_name(device) for device in devices]
        if f"{wanted[0]}:{wanted[1]}" not in names:
            raise DeviceError(
                f"ReductionToOneDevice: reduce_to_device={self.reduce_to_device!r} is not one of the strategy's "
                f"devices: {listed_devices(names)}. Fix: name one of them, or leave it out."
            )
        return names.index(f"{wanted[0]}:{wanted[1]}")

    def _reduce_one(self, value: jax.Array, axis: str, root: int, count: int) -> jax.Array:
        received = [value if source == root else lax.ppermute(value, axis, [(source, root)]) for source in range(count)]
        total = converted_sum(self.accumulation_fn(received), value, "accumulation_fn", "arrays")
        return _broadcast(total, axis, root, count)


def _broadcast(value: jax.Array, axis: str, root: int, count: int) -> jax.Array:
    """Send ``value`` from ``root`` to all devices; the number of devices that have it doubles in each round."""
    position = (lax.axis_index(axis) - root) % count
    have = 1
    while have < count:
        pairs = [(i, i + have) for i in range(have) if i + have < count]
        sent = lax.ppermute(value, axis, [((a + root) % count, (b + root) % count) for a, b in pairs])
        value = jnp.where((position >= have) & (position < 2 * have), sent, value)
        have *= 2
    return value


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
        return f"copies in groups of {group_size(len(devices))}, added by their leaders, then by the first"


def group_size(count: int) -> int:
    """Return the number of neighbouring devices in a group: the square root of the number of devices, rounded up."""
    return math.isqrt(count - 1) + 1


def _rounds(count: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the (sender, receiver) pairs of each round towards the first device; a leader receives one copy at a time."""
    leaders = range(0, count, size)
    inside = [[(leader + step, leader) for leader in leaders if leader + step < count] for step in range(1, size)]
    return [pairs for pairs in inside if pairs] + [[(leader, 0)] for leader in leaders[1:]]
