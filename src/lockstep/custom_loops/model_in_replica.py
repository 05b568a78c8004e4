"""A Keras model inside ``strategy.run``: its own noise on each replica, and one state for all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep._keras.layers import copy_keras_mask
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.replica_context import ReplicaContext
from lockstep.execution.call_splitter import output_merge
from lockstep.execution.replica import OutputMerge, replica_seed

__all__ = ["call_on_replica"]


def call_on_replica(model: keras.Model, original: Callable[..., Any], context: ReplicaContext) -> Callable[..., Any]:
    """``model.stateless_call`` for a function that ``strategy.run`` traces.

    Args:
        model: the model.
        original: its own ``stateless_call``.
        context: the replica that is traced.

    Returns:
        A function of the same arguments. Seeds differ from replica to replica, and the non-trainable values that it returns
        are those that ``fit`` would keep: averages by rows, sums of changes, the seeds of replica 0. The outputs of a replica
        without rows have no gradient, and its losses of rows are 0; those of weights are what they are on each replica.
    """

    def stateless_call(trainable: Any, non_trainable: Any, *args: Any, **kwargs: Any) -> Any:
        merges = [output_merge(variable) for variable in model.non_trainable_variables]
        replica = context.replica_id_in_sync_group
        own = [
            replica_seed(value, replica) if merge is OutputMerge.SEED else value
            for value, merge in zip(non_trainable, merges, strict=True)
        ]
        outputs, state, *losses = original(trainable, own, *args, **kwargs)
        rows = next(leaf.shape[0] for leaf in jax.tree.leaves((args, kwargs)) if jnp.ndim(leaf))
        if not rows:  # A mean over no rows is NaN, and so would be its gradient.
            outputs = jax.tree.map(lambda leaf: copy_keras_mask(leaf, jax.lax.stop_gradient(leaf)), outputs)
            losses = [_without_rows(model, every) for every in losses]
        changed = [i for i, (new, old) in enumerate(zip(state, own, strict=True)) if new is not old]
        shares = [_share(jnp.asarray(state[i]), own[i], merges[i], replica, rows) for i in changed]
        sums, total = context.all_reduce(ReduceOp.SUM, (shares, jnp.float32(rows)))
        merged = list(non_trainable)
        for position, value in zip(changed, sums, strict=True):
            merged[position] = _merged(value, non_trainable[position], merges[position], total)
        return outputs, merged, *losses

    return stateless_call


def _without_rows(model: keras.Model, losses: list[Any]) -> list[Any]:
    """Losses of a call without rows; Keras puts those of weights at the end."""
    of_weights = sum(variable.regularizer is not None for variable in model.trainable_weights)
    of_rows = len(losses) - of_weights
    return [jnp.zeros_like(loss) if i < of_rows else loss for i, loss in enumerate(losses)]


def _share(new: jax.Array, old: Any, merge: OutputMerge, replica: jax.Array, rows: int) -> jax.Array:
    """What a replica adds to the sum over all; one without rows adds nothing, whatever it has computed."""
    new = jax.lax.stop_gradient(new) if jnp.issubdtype(new.dtype, jnp.inexact) else new
    if merge is OutputMerge.MEAN:
        return (
            new.astype(jnp.promote_types(new.dtype, jnp.float32)) * rows if rows else jnp.zeros(new.shape, jnp.float32)
        )
    if merge is OutputMerge.SUM:
        return new - old if rows else jnp.zeros_like(new)
    return jnp.where(replica == 0, new, jnp.zeros_like(new))


def _merged(total: jax.Array, old: Any, merge: OutputMerge, rows: jax.Array) -> jax.Array:
    if merge is OutputMerge.MEAN:
        return (total / rows).astype(old.dtype)
    return old + total if merge is OutputMerge.SUM else total.astype(old.dtype)
