"""All-reduce in a fixed binary tree over numbered pieces: the order of additions does not depend on the devices.

n pieces are added as the pieces of the largest power of two below n, plus the rest, each by the same rule. Any run of
neighbouring pieces holds whole branches of that tree (:func:`branches`), so a device adds up its own pieces first and
sends what is left: the sum has the same bits for any number of devices.

Source: the order is that of binary counting; the exchange (all-to-all of slices, sum, all-gather) is that of Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.collectives.base import CrossDeviceOps

SMALL = 4096  # elements; smaller values are sent whole and together


@dataclass(frozen=True)
class PartialSum:
    """The sum of the pieces ``start`` to ``stop``, in a slot of a device."""

    start: int
    stop: int
    device: int
    slot: int


class TreeAllReduce(CrossDeviceOps):
    """All-reduce that adds the devices' values in a fixed binary tree: the same bits in every run and on every platform.

    Each device gets a slice of every value, adds the slices in the order of the tree, and sends the sum to all: with n
    devices it sends 2(n-1)/n of the bytes. Values below 4,096 elements are sent whole, n-1 times. Source: see the module.

    This operation alone makes the sum over *devices* reproducible. For the same bits on another number of devices use
    ``deterministic=True``, which adds the replicas in this tree.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.TreeAllReduce())
    """

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        one_each = [PartialSum(device, device + 1, device, 0) for device in range(len(devices))]
        return tree_sum([value[None] for value in values], one_each, axis)

    def describe(self, devices: Sequence[jax.Device]) -> str:
        return "all-reduce by a fixed tree"


def branches(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """Return the fewest whole branches of the tree over ``total`` pieces that make up the pieces ``start`` to ``stop``."""

    def within(low: int, high: int) -> list[tuple[int, int]]:
        if high <= start or stop <= low:
            return []
        if start <= low and high <= stop:
            return [(low, high)]
        middle = _middle(low, high)
        return within(low, middle) + within(middle, high)

    return within(0, total)


def tree_sum(values: Sequence[jax.Array], branch_slots: Sequence[PartialSum], axis: str) -> list[jax.Array]:
    """Add pieces on the devices; called inside ``jax.shard_map``.

    Args:
        values: this device's slots of each value, ``(slots, …)``.
        branch_slots: the branches that together are the whole tree, with device and slot; no other slot is read.
        axis: name of the mesh axis that runs over the devices.

    Returns:
        The sum of each value, ``(…)``, the same bits on every device.
    """
    sums: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        small = [i for i, value in enumerate(values) if value.dtype == dtype and value[0].size < SMALL]
        if small:
            flat = [values[i].reshape(len(values[i]), -1) for i in small]
            total = _sum(lax.all_gather(jnp.concatenate(flat, axis=1), axis), branch_slots)
            ends = [sum(part.shape[1] for part in flat[: n + 1]) for n in range(len(flat) - 1)]
            sums |= zip(small, jnp.split(total, ends), strict=True)
    for i, value in enumerate(values):
        if i not in sums:
            sums[i] = _sum_slices(value.reshape(len(value), -1), branch_slots, axis)
    return [sums[i].reshape(value.shape[1:]) for i, value in enumerate(values)]


def _sum_slices(slots: jax.Array, branch_slots: Sequence[PartialSum], axis: str) -> jax.Array:
    devices, size = lax.axis_size(axis), slots.shape[1]
    padded = jnp.pad(slots, [(0, 0), (0, -size % devices)])
    slices = lax.all_to_all(padded.reshape(len(slots), devices, -1), axis, split_axis=1, concat_axis=0)
    return lax.all_gather(_sum(slices, branch_slots), axis, tiled=True)[:size]


def _sum(slots: jax.Array, branch_slots: Sequence[PartialSum]) -> jax.Array:
    """Return the sum of ``slots``, ``(devices, slots, n)``."""
    ready = {(branch.start, branch.stop): slots[branch.device, branch.slot] for branch in branch_slots}

    def total(low: int, high: int) -> jax.Array:
        if (low, high) in ready:
            return ready[low, high]
        middle = _middle(low, high)
        left, right = lax.optimization_barrier((total(low, middle), total(middle, high)))
        return left + right  # One rounding for each branch: the barrier keeps the compiler from fusing additions.

    return lax.optimization_barrier(total(0, max(branch.stop for branch in branch_slots)))


def _middle(low: int, high: int) -> int:
    return low + (1 << (high - low - 1).bit_length() - 1)
