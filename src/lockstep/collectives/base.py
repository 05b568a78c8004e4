"""The contract of a cross-device operation: how the gradients of the devices meet."""

import abc
from collections.abc import Sequence

import jax

__all__ = ["CrossDeviceOps"]


class CrossDeviceOps(abc.ABC):
    """Adds up what each device holds and gives every device the sum.

    Counterpart of ``tf.distribute.CrossDeviceOps``. An implementation is called while a step is compiled, inside
    ``jax.shard_map``, and is a pure function of its arguments.
    """

    @abc.abstractmethod
    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Sum of each array over the devices.

        Args:
            values: this device's arrays, any shapes and numeric dtypes; the same shapes on every device.
            axis: name of the mesh axis that runs over the devices.
            devices: the devices along that axis, in order.

        Returns:
            The sums, of the same shapes and dtypes, the same bits on every device.
        """

    @abc.abstractmethod
    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Half a sentence for the strategy's log line, for example ``all-reduce by XLA``."""
