"""Gradients as they are pushed: of a whole variable, or of those rows of it that a batch has touched."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.parameter_server.variables.sharding import Shard

__all__ = ["Gradient", "SparseGradient", "as_update", "padded", "share", "summed"]


class SparseGradient(NamedTuple):
    """The gradient of some rows of a variable; of all others it is zero.

    Args:
        indices: numbers of the rows, int32; one that is named twice counts twice.
        values: the gradient of each, in their order.
    """

    indices: np.ndarray
    values: np.ndarray


Gradient = np.ndarray | SparseGradient


def summed(indices: np.ndarray, values: np.ndarray) -> SparseGradient:
    """Rows of which each is named once, rising.

    Args:
        indices: numbers of rows, in any shape, some maybe more than once.
        values: the gradient of each, of shape ``indices.shape + (sizes of a row)``.

    Example:
        >>> summed(np.array([[4, 1], [1, 1]]), np.array([[[1.0], [2.0]], [[4.0], [8.0]]])).values.tolist()
        [[14.0], [1.0]]
    """
    unique, places = np.unique(indices, return_inverse=True)
    values = values.reshape(indices.size, *values.shape[indices.ndim :])
    total = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(total, places.reshape(-1), values)
    return SparseGradient(unique.astype(np.int32), total)


def share(gradient: Gradient, shard: Shard) -> Gradient:
    """What of a variable's gradient belongs to one shard of it."""
    if not isinstance(gradient, SparseGradient):
        return shard.of(gradient)
    values = gradient.values if shard.is_whole else gradient.values[shard.are_here(gradient.indices)]
    return SparseGradient(shard.rows_here(gradient.indices), values)


def padded(rows: SparseGradient, of: int) -> SparseGradient:
    """With more rows, up to a power of two, that lie outside the variable: one compiled program serves many numbers of rows.

    Args:
        rows: of which numbers.
        of: number of rows of the variable.
    """
    missing = (1 << max(0, len(rows.indices) - 1).bit_length()) - len(rows.indices)
    nothing = np.zeros((missing, *rows.values.shape[1:]), rows.values.dtype)
    indices = np.concatenate([rows.indices, np.full(missing, of, np.int32)])
    return SparseGradient(indices, np.concatenate([rows.values, nothing]))


def as_update(value: jax.Array, weights: Sequence[jax.Array], gradients: Sequence[Gradient]) -> jax.Array:
    """The mean of the gradients of one variable, in their order; traced.

    Args:
        value: the variable's.
        weights: of each gradient.
        gradients: of the same variable.
    """
    first, *others = [_dense(value, gradient) for gradient in gradients]
    if not others:
        return first
    total = first * weights[0].astype(value.dtype)
    for weight, gradient in zip(weights[1:], others, strict=True):
        total = total + gradient * weight.astype(value.dtype)
    return total / sum(weights[1:], weights[0]).astype(value.dtype)


def _dense(value: jax.Array, gradient: Gradient) -> jax.Array:
    if isinstance(gradient, SparseGradient):
        return jnp.zeros_like(value).at[gradient.indices].add(gradient.values, mode="drop")
    return jnp.asarray(gradient)
