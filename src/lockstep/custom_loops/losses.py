"""Losses averaged over the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep._errors import InputError, shown
from lockstep.custom_loops.per_replica import check_arrays, fits_jax, value_of
from lockstep.custom_loops.replica_context import as_floating, current_replica, current_strategy, dtype_of_mean
from lockstep.execution.step_functions import is_in_step


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> jax.Array:
    """Return this replica's share of the average over the global batch: ``tf.nn.compute_average_loss``.

    In code that ``fit`` calls, such as a compiled loss or ``call`` of a layer, the result is that of one device: the losses are those of
    all rows, or are averaged over the replicas.

    Args:
        per_example_loss: losses of this replica's rows, ``(rows, …)``.
        sample_weight: their weights: one number, one for each row, or one for each loss; an axis of length 1 at the end is
            ignored.
        global_batch_size: rows of all replicas. By default the rows of this replica times the number of replicas, which is
            right only if all replicas have the same number.

    Returns:
        Their sum divided by ``global_batch_size``, ``()``; 0 if there are no rows. The sum over the replicas is the average.

    Raises:
        InputError: ``per_example_loss`` has no axis of rows, ``sample_weight`` has another shape, or ``global_batch_size`` is not a
            positive whole number.

    Example:
        >>> import jax.numpy as jnp, lockstep
        >>> float(lockstep.compute_average_loss(jnp.asarray([1.0, 3.0]), global_batch_size=8))
        0.5
    """
    losses = _numbers("per_example_loss", per_example_loss)
    if losses.ndim == 0:
        raise InputError(
            "compute_average_loss: expected a loss for each row, got one number as per_example_loss. Fix: make the loss with reduction=None."
        )
    losses = as_floating(losses)
    if sample_weight is not None:
        losses = losses * _weights_of(losses, _numbers("sample_weight", sample_weight))
    if global_batch_size is not None:
        _check_rows(global_batch_size)
    rows = max(1, losses.shape[0]) * _replicas() if global_batch_size is None else global_batch_size
    return (losses.sum(dtype=dtype_of_mean(losses.dtype)) / rows).astype(losses.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Return this replica's share of a loss that does not depend on rows: ``tf.nn.scale_regularization_loss``.

    In code that ``fit`` calls it is the whole loss.

    Args:
        regularization_loss: arrays, or a list of them, such as ``model.losses``.

    Returns:
        Their sum divided by the number of replicas, ``()``.

    Raises:
        InputError: one of them is not an array.

    Example:
        >>> import lockstep
        >>> float(lockstep.scale_regularization_loss([1.0, 2.0]))
        3.0
    """
    check_arrays("scale_regularization_loss: regularization_loss", regularization_loss)
    total = sum((jnp.sum(jnp.asarray(loss)) for loss in jax.tree.leaves(regularization_loss)), start=jnp.zeros(()))
    return total / _replicas()


def _numbers(name: str, value: Any) -> jax.Array:
    check_arrays(f"compute_average_loss: {name}", value)
    try:
        return jnp.asarray(value_of(value))
    except (TypeError, ValueError):  # For example lists of different lengths.
        raise InputError(
            f"compute_average_loss: {name}: expected one array, got {shown(value)}. Fix: make it one with jnp.stack or jnp.concatenate."
        ) from None


def _weights_of(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """Return weights with as many axes as the losses, of their dtype."""
    shape = losses.shape
    if jnp.iscomplexobj(weights) and not jnp.iscomplexobj(losses):
        raise InputError(
            f"compute_average_loss: sample_weight: expected real numbers, got {weights.dtype}. Fix: pass their real part."
        )
    if weights.ndim > 1 and weights.shape[-1] == 1 and weights.shape != shape[: weights.ndim]:
        weights = weights[..., 0]
    if weights.shape != shape[: weights.ndim]:
        raise InputError(
            f"compute_average_loss: sample_weight has the shape {weights.shape}, and the losses have {shape}. Fix: pass one weight for each "
            "row, or for each loss."
        )
    return weights.astype(losses.dtype).reshape(weights.shape + (1,) * (len(shape) - weights.ndim))


def _check_rows(number: Any) -> None:
    is_number = isinstance(number, int | np.integer | np.ndarray | jax.Array) and not isinstance(number, bool)
    is_whole = (
        is_number
        and (not isinstance(number, int) or fits_jax(number))
        and jnp.ndim(number) == 0
        and jnp.issubdtype(jnp.result_type(number), jnp.integer)
    )
    if not is_whole or (not isinstance(number, jax.core.Tracer) and int(number) < 1):
        raise InputError(
            f"compute_average_loss: expected global_batch_size as a whole number of rows, 1 or more, got {shown(number)}. "
            "Fix: count the rows of all replicas."
        )


def _replicas() -> int:
    """Return the number of shares of a loss."""
    strategy = current_strategy() if current_replica() or not is_in_step() else None
    return int(strategy.num_replicas_in_sync) if strategy else 1
