"""A user's function as a cross-device operation."""

import inspect
from collections.abc import Callable, Sequence

import jax

from lockstep._errors import OptionError
from lockstep.collectives.base import CrossDeviceOps

__all__ = ["FunctionAllReduce"]


class FunctionAllReduce(CrossDeviceOps):
    """Calls a function for each array.

    Args:
        function: takes this device's array and the name of the mesh axis, and returns the sum over the devices, of the
            same shape. The sum is converted to the array's dtype.
    """

    def __init__(self, function: Callable[[jax.Array, str], jax.Array]) -> None:
        self.function = function
        self.name = function.__name__ if inspect.isroutine(function) else repr(function)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Sum of each array over the devices; see :class:`CrossDeviceOps`.

        Raises:
            OptionError: the function returns another shape, or no array.
        """
        return [self._one(value, axis) for value in values]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        """What the strategy's log line says."""
        return f"all-reduce by {self.name}"

    def _one(self, value: jax.Array, axis: str) -> jax.Array:
        total = self.function(value, axis)
        if not isinstance(total, jax.Array) or total.shape != value.shape:
            found = f"shape {total.shape}" if isinstance(total, jax.Array) else repr(total)
            raise OptionError(
                f"cross_device_ops: {self.name} was given an array of shape {value.shape} and must return one of the "
                f"same shape, the sum over the devices; it returned {found}."
            )
        return total.astype(value.dtype)
