"""The platform's own all-reduce: NCCL between GPUs, XLA's in-process collective between CPU devices."""

from collections.abc import Sequence

import jax

from lockstep.collectives.base import CrossDeviceOps
from lockstep.topology.devices import platform_of

__all__ = ["AutoAllReduce"]


class AutoAllReduce(CrossDeviceOps):
    """All-reduce by the platform's own collective: the default.

    Source: ``jax.lax.psum``, which XLA turns into NCCL's all-reduce on GPUs.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.AutoAllReduce())
    """

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Sum of each array over the devices; see :class:`CrossDeviceOps`."""
        return list(jax.lax.psum(tuple(values), axis))

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """What the strategy's log line says."""
        return f"all-reduce by {'NCCL' if platform_of(devices[0]) == 'gpu' else 'XLA'}"
