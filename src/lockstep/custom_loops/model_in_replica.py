"""Keras models inside ``strategy.run``: each replica draws its own noise, and all share one merged state."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep._keras.layers import copy_keras_mask
from lockstep._keras.trainer import patched_stateless_call
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.replica_context import ReplicaContext
from lockstep.execution.call_splitter import state_merge
from lockstep.execution.replica import StateMerge, replica_seed

__all__ = ["ReplicaModels"]


class ReplicaModels:
    """The models of a strategy; while a replica is traced, their ``stateless_call`` is that of :func:`_call_on_replica`."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._originals: dict[keras.Model, Any] = {}  # the models' own ``stateless_call``, while replicas are traced

    def __contains__(self, model: keras.Model) -> bool:
        return model in self._models

    def add(self, model: keras.Model) -> None:
        """Add a model."""
        self._models.add(model)

    @contextmanager
    def in_replica(self, context: ReplicaContext) -> Iterator[None]:
        """Replace the models' ``stateless_call`` for one replica; a merge call may nest further replicas."""
        is_outermost = not self._originals
        with ExitStack() as stack:
            if is_outermost:
                stack.callback(self._originals.clear)
                self._originals.update((model, model.stateless_call) for model in self._models)
            for model, original in list(self._originals.items()):
                stack.enter_context(patched_stateless_call(model, _call_on_replica(model, original, context)))
            yield


def _call_on_replica(model: keras.Model, original: Callable[..., Any], context: ReplicaContext) -> Callable[..., Any]:
    """Return a ``model.stateless_call`` for the replica of ``context``, based on the model's ``original`` one.

    Seeds differ from replica to replica, and the non-trainable values that it returns are those that ``fit`` would keep: averages
    by rows, sums of changes, the seeds of replica 0. On a replica without rows, the outputs have no gradient and losses over rows
    are 0; regularization losses of weights are the same on each replica.
    """

    def stateless_call(trainable: Any, non_trainable: Any, *args: Any, **kwargs: Any) -> Any:
        merges = [state_merge(variable) for variable in model.non_trainable_variables]
        replica = context.replica_id_in_sync_group
        own = [
            replica_seed(value, replica) if merge is StateMerge.SEED else value
            for value, merge in zip(non_trainable, merges, strict=True)
        ]
        outputs, state, *losses = original(trainable, own, *args, **kwargs)
        rows = next(leaf.shape[0] for leaf in jax.tree.leaves((args, kwargs)) if jnp.ndim(leaf))
        if not rows:  # A mean over no rows is NaN, and so would be its gradient.
            outputs = jax.tree.map(lambda leaf: copy_keras_mask(leaf, jax.lax.stop_gradient(leaf)), outputs)
            losses = [_zero_row_losses(model, own_losses) for own_losses in losses]
        changed = [i for i, (new, old) in enumerate(zip(state, own, strict=True)) if new is not old]
        shares = [_share(jnp.asarray(state[i]), own[i], merges[i], replica, rows) for i in changed]
        sums, total = context.all_reduce(ReduceOp.SUM, (shares, jnp.float32(rows)))
        merged = list(non_trainable)
        for position, value in zip(changed, sums, strict=True):
            merged[position] = _merged(value, non_trainable[position], merges[position], total)
        return outputs, merged, *losses

    return stateless_call


def _zero_row_losses(model: keras.Model, losses: list[Any]) -> list[Any]:
    """Set the losses over rows to 0; Keras puts those of weights at the end."""
    of_weights = sum(variable.regularizer is not None for variable in model.trainable_weights)
    of_rows = len(losses) - of_weights
    return [jnp.zeros_like(loss) if i < of_rows else loss for i, loss in enumerate(losses)]


def _share(new: jax.Array, old: Any, merge: StateMerge, replica: jax.Array, rows: int) -> jax.Array:
    """Return a replica's contribution to the sum over all replicas: zeros if it has no rows."""
    new = jax.lax.stop_gradient(new) if jnp.issubdtype(new.dtype, jnp.inexact) else new
    if merge is StateMerge.MEAN:
        return (
            new.astype(jnp.promote_types(new.dtype, jnp.float32)) * rows if rows else jnp.zeros(new.shape, jnp.float32)
        )
    if merge is StateMerge.SUM:
        return new - old if rows else jnp.zeros_like(new)
    return jnp.where(replica == 0, new, jnp.zeros_like(new))


def _merged(total: jax.Array, old: Any, merge: StateMerge, rows: jax.Array) -> jax.Array:
    if merge is StateMerge.MEAN:
        return (total / rows).astype(old.dtype)
    return old + total if merge is StateMerge.SUM else total.astype(old.dtype)
