"""The platform's own all-reduce, the choice that ``AutoAllReduce`` makes, and gradients sent in half precision."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep._errors import one_of
from lockstep.collectives.base import PackedAllReduce, pack, plan_packs, unpack
from lockstep.devices.names import platform_of

_SMALL = 1 << 20  # bytes; larger arrays are not worth a copy


class AutoAllReduce(PackedAllReduce):
    """All-reduce by the platform's own collective: the default.

    Source: ``jax.lax.psum``, which XLA turns into NCCL's all-reduce on GPUs.

    Args:
        bytes_per_pack: the arrays are added in packs of at most so many bytes. 0: XLA decides what it joins; between
            processes on CPUs it joins nothing, and Lockstep sends arrays of at most a megabyte together.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.AutoAllReduce())
    """

    def __init__(self, *, bytes_per_pack: int = 0) -> None:
        super().__init__(bytes_per_pack=bytes_per_pack)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        if self.bytes_per_pack:
            return super().all_reduce(values, axis, devices)
        return platform_sum_bucketed(values, axis, devices)

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        return platform_sum([vector], axis)[0]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        return f"all-reduce by {'NCCL' if platform_of(devices[0]) == 'gpu' else 'XLA'}"


def platform_sum(values: Sequence[jax.Array], axis: str) -> list[jax.Array]:
    """Return the sums by ``jax.lax.psum`` in the arrays' dtypes: psum itself counts bools as int32."""
    sums = jax.lax.psum(tuple(values), axis)
    return [total.astype(value.dtype) for total, value in zip(sums, values, strict=True)]


def platform_sum_bucketed(values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Return the sums as :func:`platform_sum`, with few collectives between processes on CPUs, for which XLA would start one for each array."""
    between_processes = len({device.process_index for device in devices}) > 1
    if not between_processes or platform_of(devices[0]) != "cpu":
        return platform_sum(values, axis)
    small = [value for value in values if value.nbytes <= _SMALL]
    large = [value for value in values if value.nbytes > _SMALL]
    plan = plan_packs(small)
    sums = platform_sum([*large, *pack(small, plan)], axis)
    of_large, of_small = iter(sums[: len(large)]), iter(unpack(sums[len(large) :], plan, small))
    return [next(of_small if value.nbytes <= _SMALL else of_large) for value in values]


class NcclAllReduce(PackedAllReduce):
    """All-reduce of packs by NCCL; without NCCL by the platform's own collective, which the log line then names.

    Source: ``tf.distribute.NcclAllReduce``. How NCCL moves the bytes (ring or tree) is its own choice.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.NcclAllReduce(num_packs=2))
    """

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        return platform_sum([vector], axis)[0]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        platform = platform_of(devices[0])
        if platform == "gpu":
            return "all-reduce by NCCL"
        return f"all-reduce by XLA (NcclAllReduce was asked for; there is no NCCL between devices of type {platform})"


class HalfPrecisionAllReduce(PackedAllReduce):
    """Sends floating-point arrays in bfloat16 or float16, and adds them in float32.

    Each device gets one slice of the vector from all others, adds it in float32, and sends the rounded sum to all: a
    number is rounded once on the way there and once on the way back, whatever the number of devices. A device sends
    2(n - 1)/n of half the bytes. Arrays of two bytes a number, integers, bools and complex numbers are added by the
    platform as they are.

    In float16 a number or a sum beyond ±65,504 becomes infinite, and one below 6e-8 becomes zero; Keras's
    ``LossScaleOptimizer`` sees the infinity and skips the step. bfloat16 has the range of float32 and two to three digits.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``.
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes, counted before rounding. 0: no limit.

    Raises:
        OptionError: ``dtype`` is something else, or one of the numbers is negative or not a whole number.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(cross_device_ops=lockstep.HalfPrecisionAllReduce("bfloat16"))
    """

    def __init__(self, dtype: str = "bfloat16", num_packs: int = 1, *, bytes_per_pack: int = 0) -> None:
        super().__init__(num_packs, bytes_per_pack=bytes_per_pack)
        self.dtype = one_of(("bfloat16", "float16"), "HalfPrecisionAllReduce: dtype", dtype)

    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        if not _is_wide(vector.dtype):
            return platform_sum([vector], axis)[0]
        slices = jnp.pad(vector, (0, -vector.size % count)).astype(self.dtype).reshape(count, -1)
        received = lax.all_to_all(slices, axis, 0, 0)
        total = received.astype("float32").sum(axis=0).astype(self.dtype)
        return lax.all_gather(total, axis, tiled=True)[: vector.size].astype(vector.dtype)

    def describe(self, devices: Sequence[jax.Device]) -> str:
        return f"all-reduce in {self.dtype}, added in float32"

    def error_bound(self, pieces: np.ndarray) -> np.ndarray:
        """Return how far from the exact sum a result may be: two roundings to the half dtype, and the additions in float32."""
        if len(pieces) == 1 or not _is_wide(pieces.dtype):
            return super().error_bound(pieces)
        half = jnp.finfo(self.dtype)
        magnitude = np.abs(pieces.astype("float64")).sum(axis=0)
        relative = float(half.eps) * (1 + float(half.eps))
        return (
            super().error_bound(pieces.astype("float32")) + relative * magnitude + (len(pieces) + 1) * float(half.tiny)
        )


def _is_wide(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 2
