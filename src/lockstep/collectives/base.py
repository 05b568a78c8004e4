"""The contract of a cross-device operation: how the gradients of the devices meet."""

import abc
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CrossDeviceOps"]


class CrossDeviceOps(abc.ABC):
    """Adds up what each device holds and gives every device the sum.

    Counterpart of ``tf.distribute.CrossDeviceOps``. An implementation is called while a step is compiled, inside
    ``jax.shard_map``, and is a pure function of its arguments. ``lockstep.testing.check_cross_device_ops`` says whether
    one keeps the contract.

    Example:
        >>> import jax, lockstep
        >>> class Gathered(lockstep.CrossDeviceOps):
        ...     def all_reduce(self, values, axis, devices):
        ...         return [jax.lax.all_gather(value, axis).sum(axis=0).astype(value.dtype) for value in values]
        ...     def describe(self, devices):
        ...         return "gather everything and add it everywhere"
        >>> lockstep.testing.check_cross_device_ops(Gathered(), devices=["cpu:0", "cpu:1"], dtypes=["float32", "bool"])
        >>> Gathered().describe(jax.devices())
        'gather everything and add it everywhere'
        >>> import numpy as np
        >>> bool(Gathered().error_bound(np.ones((2, 1), "float32")) < 1e-6)
        True
    """

    @abc.abstractmethod
    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Sum of each array over the devices.

        Args:
            values: this device's arrays, any shapes and numeric dtypes; the same shapes on every device.
            axis: name of the mesh axis that runs over the devices.
            devices: the devices along that axis, in order.

        Returns:
            The sums, of the same shapes and dtypes, the same bits on every device. Integers wrap around; the sum of
            bools is whether any of them is true, as for NumPy's ``+``.
        """

    @abc.abstractmethod
    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Say how the arrays meet, for the strategy's log line.

        Args:
            devices: in their order along the axis.

        Returns:
            Half a sentence, for example ``all-reduce by XLA``.
        """

    def error_bound(self, pieces: np.ndarray) -> np.ndarray:
        """How far from the exact sum a result may be: what any order of adding in the arrays' own dtype allows.

        Source: N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, section 4.2: with n numbers the
        error is at most (n - 1) u Σ|x|, to first order in the unit roundoff u. Here 2u stands for u.

        Args:
            pieces: what the devices hold, ``(devices, …)``.

        Returns:
            A bound for each element, ``(…)``, in float64; zero for integers and bools.
        """
        if not jnp.issubdtype(pieces.dtype, jnp.inexact):
            return np.zeros(pieces.shape[1:])
        number, additions = jnp.finfo(pieces.dtype), len(pieces) - 1
        magnitude = np.sum(np.abs(pieces.astype("complex128")), axis=0)
        with np.errstate(invalid="ignore"):  # 0 × infinity, where one device holds what is not finite.
            relative = additions * float(number.eps) * magnitude
        return np.asarray(relative + additions * float(number.tiny))  # Hardware may take subnormal numbers for zero.
