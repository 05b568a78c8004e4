"""Values of variables sharded along an axis that is not divisible by the number of devices: JAX has equal shards only, so zeros fill the last."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape"])
@dataclass(frozen=True, eq=False)
class PaddedArray:
    """A value that is sharded along an axis that is not divisible by the number of devices.

    Attributes:
        array: the value with zeros at its end, so that all shards are equal.
        shape: shape of the value without the zeros.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.array.dtype

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all shards are on devices of this process."""
        return bool(self.array.is_fully_addressable)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device has the whole value."""
        return bool(self.array.is_fully_replicated)

    def without_padding(self) -> Any:
        """Return the value; outside of a trace each device gets all of it."""
        is_value = isinstance(self.array, jax.Array) and not isinstance(self.array, jax.core.Tracer)
        if not (is_value and isinstance(self.array.sharding, NamedSharding)):
            return self.array[tuple(map(slice, self.shape))]
        with jax.ensure_compile_time_eval():  # Else a trace would get the program, which may be for other devices.
            replicated = NamedSharding(self.array.sharding.mesh, PartitionSpec())
            return _cutting_program(self.shape, replicated)(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.asarray(self.array)[tuple(map(slice, self.shape))], dtype)

    def __jax_array__(self) -> Any:
        return self.without_padding()


def padded_shape(shape: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
    """Return ``shape`` with each sharded axis as long as equal shards need it."""
    if not isinstance(sharding, NamedSharding):
        return tuple(shape)
    named = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    counts = [math.prod(sharding.mesh.shape[name] for name in names) for names in named]
    counts += [1] * (len(shape) - len(counts))
    return tuple(-(-length // count) * count for length, count in zip(shape, counts, strict=True))


def pad(value: Any, sharding: Sharding) -> Any:
    """Return a value as it is laid over the devices by ``sharding``: as :class:`PaddedArray` if its shards would not be equal.

    Args:
        value: an array, on the host, on devices or in a trace, or its description; or a :class:`PaddedArray`.
        sharding: of the value; it is not put there.
    """
    shape = padded_shape(value.shape, sharding)
    if isinstance(value, PaddedArray):
        return value if value.array.shape == shape else pad(value.without_padding(), sharding)
    if shape == tuple(value.shape):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return PaddedArray(jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding), tuple(value.shape))
    widths = [(0, long - own) for long, own in zip(shape, value.shape, strict=True)]
    if isinstance(value, np.ndarray):
        return PaddedArray(np.pad(value, widths), value.shape)
    if isinstance(value, jax.core.Tracer):
        # Not jnp.pad, whose zero is no literal: see execution/xla_partitioner_workarounds.
        filled = lax.pad(value, np.zeros((), value.dtype)[()], [(*width, 0) for width in widths])
        return PaddedArray(lax.with_sharding_constraint(filled, sharding), value.shape)
    return PaddedArray(jnp.pad(value, widths), value.shape)


def cut(value: Any, sharding: Sharding) -> Any:
    """Return a value of a trace, which may be a :class:`PaddedArray`, without padding; its last shards are shorter."""
    return lax.with_sharding_constraint(value.without_padding(), sharding) if is_padded(value) else value


def is_padded(leaf: Any) -> bool:
    """Return whether a leaf is a value with padding; for ``is_leaf`` of JAX's tree functions."""
    return isinstance(leaf, PaddedArray)


def without_padding(tree: Any) -> Any:
    """Return a tree with its values of :class:`PaddedArray` as arrays of their own shape."""
    return jax.tree.map(lambda leaf: leaf.without_padding() if is_padded(leaf) else leaf, tree, is_leaf=is_padded)


@cache
def _cutting_program(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a program that drops padding; all processes call it that have shards of the array."""
    return jax.jit(lambda array: array[tuple(map(slice, shape))], out_shardings=sharding)
