"""Bucketing: many small arrays are packed into few long vectors, so that few collectives send them."""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep._errors import whole_number
from lockstep.collectives.base import CrossDeviceOps


@dataclass(frozen=True)
class BucketSlice:
    """Elements ``start`` to ``stop`` of the flattened array at ``position``."""

    position: int
    start: int
    stop: int


Plan = list[list[BucketSlice]]


def plan_packs(values: Sequence[jax.Array], num_packs: int = 1, bytes_per_pack: int = 0) -> Plan:
    """Return which elements are sent together. Both numbers mean what they mean in ``tf.distribute``.

    Arrays keep their order; a pack holds one dtype; an array may be cut between two packs. Empty arrays are in none.

    Args:
        values: arrays; only their shapes and dtypes are read.
        num_packs: the arrays of each dtype are split into at most so many packs of equal length. 0: every array is a
            pack of its own.
        bytes_per_pack: a pack has at most so many bytes (and at least one element). 0: no limit.

    Returns:
        The pieces of each pack, in order.
    """
    groups: dict[object, list[int]] = {}
    for position, value in enumerate(values):
        groups.setdefault(value.dtype if num_packs else position, []).append(position)
    plan: Plan = []
    for positions in groups.values():
        capacity = math.ceil(sum(values[position].size for position in positions) / max(1, num_packs))
        if bytes_per_pack:
            capacity = min(capacity, max(1, bytes_per_pack // values[positions[0]].dtype.itemsize))
        plan += _fill_packs(values, positions, capacity)
    return plan


def pack(values: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Return the vectors of a plan, each ``(elements,)``."""
    flat = [value.reshape(-1) for value in values]
    return [jnp.concatenate([flat[piece.position][piece.start : piece.stop] for piece in pieces]) for pieces in plan]


def unpack(vectors: Sequence[jax.Array], plan: Plan, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the contents of the vectors in the shapes of the ``values`` that :func:`pack` took; empty arrays as they are."""
    parts: list[list[jax.Array]] = [[] for _ in values]
    for vector, pieces in zip(vectors, plan, strict=True):
        start = 0
        for piece in pieces:
            length = piece.stop - piece.start
            parts[piece.position].append(vector[start : start + length])
            start += length
    return [
        jnp.concatenate(found).reshape(value.shape) if found else value
        for found, value in zip(parts, values, strict=True)
    ]


def _fill_packs(values: Sequence[jax.Array], positions: list[int], capacity: int) -> Plan:
    plan: Plan = []
    room = 0
    for position in positions:
        start, size = 0, values[position].size
        while start < size:
            if not room:
                plan.append([])
                room = capacity
            stop = min(size, start + room)
            plan[-1].append(BucketSlice(position, start, stop))
            room -= stop - start
            start = stop
    return plan


class PackedAllReduce(CrossDeviceOps):
    """Base of the all-reduce operations on vectors. A subclass defines how one vector is added, and its description.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.
    """

    def __init__(self, num_packs: int = 1, *, bytes_per_pack: int = 0) -> None:
        name = type(self).__name__
        self.num_packs = whole_number(f"{name}: num_packs", num_packs, least=0)
        self.bytes_per_pack = whole_number(f"{name}: bytes_per_pack", bytes_per_pack, least=0)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Return the sum of each array over the devices; see :class:`CrossDeviceOps`."""
        if len(devices) == 1:
            return list(values)
        plan = plan_packs(values, self.num_packs, self.bytes_per_pack)
        sums = [self.all_reduce_vector(vector, axis, len(devices)) for vector in pack(values, plan)]
        return unpack(sums, plan, values)

    @abc.abstractmethod
    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Return the sum of one vector over the devices.

        Args:
            vector: ``(elements,)``, at least one.
            axis: name of the mesh axis that runs over the devices.
            count: number of devices, at least 2.

        Returns:
            The sum, ``(elements,)``, of the same dtype, the same bits on every device.
        """
