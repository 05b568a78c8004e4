"""All-reduce by one device that adds and copies back: ``tf.distribute``'s reduction to one device and hierarchical copy."""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax

from lockstep._errors import DeviceError, function, instance_of
from lockstep.collectives.base import CrossDeviceOps
from lockstep.collectives.bucketing import PackedAllReduce
from lockstep.devices.names import device_name, parse_device_name

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
        self.accumulation_fn: Accumulate = accumulation_fn or _add_in_order

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
        return f"reduce to {names[self._root(devices)]}, then broadcast to {', '.join(names)}"

    def _root(self, devices: Sequence[jax.Device]) -> int:
        if self.reduce_to_device is None:
            return 0
        wanted = parse_device_name(self.reduce_to_device)
        names = [device_name(device) for device in devices]
        if f"{wanted[0]}:{wanted[1]}" not in names:
            raise DeviceError(
                f"ReductionToOneDevice: reduce_to_device={self.reduce_to_device!r} is not one of the strategy's "
                f"devices: {', '.join(names)}."
            )
        return names.index(f"{wanted[0]}:{wanted[1]}")

    def _reduce_one(self, value: jax.Array, axis: str, root: int, count: int) -> jax.Array:
        received = [value if source == root else lax.ppermute(value, axis, [(source, root)]) for source in range(count)]
        total = self.accumulation_fn(received)
        return _broadcast(total, axis, root, count)


def _add_in_order(values: list[jax.Array]) -> jax.Array:
    return reduce(add, values)


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
