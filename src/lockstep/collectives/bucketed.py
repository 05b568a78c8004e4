"""Base of the algorithms that add vectors: arrays are packed into vectors, in one place for all of them."""

import abc
from collections.abc import Sequence

import jax

from lockstep._errors import whole_number
from lockstep.collectives.base import CrossDeviceOps
from lockstep.collectives.bucketing import pack, plan_packs, unpack

__all__ = ["PackedAllReduce"]


class PackedAllReduce(CrossDeviceOps):
    """An all-reduce of vectors. A subclass says how one vector is added, and how it is described.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or no whole number.
    """

    def __init__(self, num_packs: int = 1, *, bytes_per_pack: int = 0) -> None:
        name = type(self).__name__
        self.num_packs = whole_number(f"{name}: num_packs", num_packs, least=0)
        self.bytes_per_pack = whole_number(f"{name}: bytes_per_pack", bytes_per_pack, least=0)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Sum of each array over the devices; see :class:`CrossDeviceOps`."""
        if len(devices) == 1:
            return list(values)
        plan = plan_packs(values, self.num_packs, self.bytes_per_pack)
        sums = [self.all_reduce_vector(vector, axis, len(devices)) for vector in pack(values, plan)]
        return unpack(sums, plan, values)

    @abc.abstractmethod
    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Sum of one vector over the devices.

        Args:
            vector: ``(elements,)``, at least one.
            axis: name of the mesh axis that runs over the devices.
            count: number of devices, at least 2.

        Returns:
            The sum, ``(elements,)``, of the same dtype, the same bits on every device.
        """
