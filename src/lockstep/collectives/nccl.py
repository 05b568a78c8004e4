"""``tf.distribute.NcclAllReduce``: packs of values, each added by the platform's collective."""

from collections.abc import Sequence

import jax

from lockstep.collectives.bucketed import PackedAllReduce
from lockstep.collectives.platform import platform_sum
from lockstep.devices.names import platform_of

__all__ = ["NcclAllReduce"]


class NcclAllReduce(PackedAllReduce):
    """All-reduce of packs by NCCL; where there is no NCCL, by the platform's own collective, and the log line says so.

    Source: ``tf.distribute.NcclAllReduce``. How NCCL moves the bytes (ring or tree) is its own choice.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or no whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.NcclAllReduce(num_packs=2))
    """

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Sum of one vector over the devices; see :class:`PackedAllReduce`."""
        return platform_sum([vector], axis)[0]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """What the strategy's log line says."""
        platform = platform_of(devices[0])
        if platform == "gpu":
            return "all-reduce by NCCL"
        return f"all-reduce by XLA (NcclAllReduce was asked for; there is no NCCL between devices of type {platform})"
