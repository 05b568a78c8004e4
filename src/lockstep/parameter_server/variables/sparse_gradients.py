"""Gradients as workers push them: dense, or sparse with only those rows of a variable that a batch has touched."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.parameter_server.variables.sharding import Shard

__all__ = ["Gradient", "SparseGradient", "gradient_of_shard", "mean_gradient", "pad_rows", "sum_rows"]


class SparseGradient(NamedTuple):
    """Gradient of some rows of a variable; that of all other rows is zero.

    Args:
        indices: numbers of the rows, int32; the gradients of a row that is named twice are added.
        values: the gradient of each row, in the order of ``indices``.
    """

    indices: np.ndarray
    values: np.ndarray


Gradient = np.ndarray | SparseGradient


def sum_rows(indices: np.ndarray, values: np.ndarray) -> SparseGradient:
    """Add up the gradients of equal rows: the result names each row once, in rising order.

    Args:
        indices: numbers of rows, in any shape, with repetitions.
        values: the gradient of each, of shape ``indices.shape + (sizes of a row)``.

    Example:
        >>> sum_rows(np.array([[4, 1], [1, 1]]), np.array([[[1.0], [2.0]], [[4.0], [8.0]]])).values.tolist()
        [[14.0], [1.0]]
    """
    unique, positions = np.unique(indices, return_inverse=True)
    values = values.reshape(indices.size, *values.shape[indices.ndim :])
    total = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(total, positions.reshape(-1), values)
    return SparseGradient(unique.astype(np.int32), total)


def gradient_of_shard(gradient: Gradient, shard: Shard) -> Gradient:
    """Return the part of a variable's gradient that belongs to one shard."""
    if not isinstance(gradient, SparseGradient):
        return shard.slice(gradient)
    values = gradient.values if shard.is_whole else gradient.values[shard.mask(gradient.indices)]
    return SparseGradient(shard.local_rows(gradient.indices), values)


def pad_rows(rows: SparseGradient, height: int) -> SparseGradient:
    """Pad to a power of two with rows outside the variable, so that one compiled program serves many numbers of rows.

    Args:
        rows: the rows to pad.
        height: number of rows of the variable.
    """
    missing = (1 << max(0, len(rows.indices) - 1).bit_length()) - len(rows.indices)
    padding = np.zeros((missing, *rows.values.shape[1:]), rows.values.dtype)
    indices = np.concatenate([rows.indices, np.full(missing, height, np.int32)])
    return SparseGradient(indices, np.concatenate([rows.values, padding]))


def mean_gradient(value: jax.Array, weights: Sequence[jax.Array], gradients: Sequence[Gradient]) -> jax.Array:
    """Return the weighted mean of the gradients of one variable, added in their order; traced.

    Args:
        value: of the variable.
        weights: of the gradients.
        gradients: of the variable.
    """
    first, *others = [_to_dense(value, gradient) for gradient in gradients]
    if not others:
        return first
    total = first * weights[0].astype(value.dtype)
    for weight, gradient in zip(weights[1:], others, strict=True):
        total = total + gradient * weight.astype(value.dtype)
    return total / sum(weights[1:], weights[0]).astype(value.dtype)


def _to_dense(value: jax.Array, gradient: Gradient) -> jax.Array:
    if isinstance(gradient, SparseGradient):
        return jnp.zeros_like(value).at[gradient.indices].add(gradient.values, mode="drop")
    return jnp.asarray(gradient)
