"""Where the calling code is: in a strategy's scope, in one of its replicas, or in neither."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from lockstep._errors import InputError, OptionError, ScopeError, member_of
from lockstep.collectives.reduce_op import ReduceOp
from lockstep.loops.meeting import Meeting, meet
from lockstep.loops.values import is_per_replica, sum_over_replicas

__all__ = [
    "ReplicaContext",
    "current_replica",
    "current_strategy",
    "inside",
    "open_scopes",
    "refuse_in_replica",
    "refuse_mean_of_integers",
]

# Context variables, and not a thread's or Keras's: clear_session() does not touch them, and no other thread sees them.
# A tuple, because scopes of generators may close in another order than they were opened in.
open_scopes: ContextVar[tuple[Any, ...]] = ContextVar("lockstep_open_scopes", default=())
# In a function that run calls: the strategy and the replica; in one that merge_call calls: the strategy and None.
_inside: ContextVar[tuple[Any, "ReplicaContext | None"] | None] = ContextVar("lockstep_inside", default=None)


class ReplicaContext:
    """What a function that ``strategy.run`` calls knows of its replica: ``tf.distribute.ReplicaContext``.

    All replicas meet in the same order, and not inside ``lax.scan``, ``lax.cond`` or ``jax.vmap``.

    Args:
        strategy: whose replica it is.
        replica_id: number of the replica, ``int32 ()``; one trace stands for many replicas, so it is no Python number.
        gathering: gives the shapes that all replicas bring where this one brings some shape.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=3)
        >>> def number():
        ...     context = lockstep.get_replica_context()
        ...     return context.all_reduce("SUM", context.replica_id_in_sync_group)
        >>> int(strategy.run(number))
        3
    """

    def __init__(self, strategy: Any, replica_id: Any, gathering: Callable[[Any], list[Any]]) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica_id
        self._gathering = gathering

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return int(self.strategy.num_replicas_in_sync)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Sum or mean over the replicas; it can be differentiated.

        Args:
            reduce_op: a member of :class:`ReduceOp` or its name.
            value: tree of arrays, of the same shapes on every replica.

        Returns:
            The same tree, the same on every replica.

        Raises:
            OptionError: ``reduce_op`` is something else, or the mean of integers or bools is asked for.
        """
        op = member_of(ReduceOp, "all_reduce: reduce_op", reduce_op)
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, value))
        for leaf in leaves:
            refuse_mean_of_integers(op, leaf.dtype)
        count, add = self.num_replicas_in_sync, self.strategy._add

        def combine(values: list[Any]) -> list[Any]:
            sums = [sum_over_replicas(value, count, add) for value in values]
            return [total / count for total in sums] if op is ReduceOp.MEAN else sums

        meeting = Meeting(f"all_reduce({op.name})", combine, is_linear=True)
        return jax.tree.unflatten(structure, meet(meeting, leaves, [jax.typeof(leaf) for leaf in leaves]))

    def all_gather(self, value: Any, axis: int) -> Any:
        """The replicas' arrays joined along ``axis``, in which alone their shapes may differ; it can be differentiated.

        Args:
            value: tree of arrays with at least one axis.
            axis: number of the axis.

        Returns:
            The same tree, the same on every replica.

        Raises:
            InputError: there is no such axis.

        Example:
            >>> import lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=3)
            >>> def numbers():
            ...     context = lockstep.get_replica_context()
            ...     return context.all_gather(context.replica_id_in_sync_group[None], axis=0)
            >>> [int(number) for number in strategy.run(numbers)]
            [0, 1, 2]
        """
        return jax.tree.map(lambda leaf: self._gather_one(jnp.asarray(leaf), axis), value)

    def _gather_one(self, value: jax.Array, axis: int) -> jax.Array:
        if not -value.ndim <= axis < value.ndim:
            raise InputError(
                f"all_gather: axis {axis} is not one of an array of shape {value.shape}. Axes count from 0, and from -1 backwards."
            )
        axis %= value.ndim
        lengths = [shape[axis] for shape in self._gathering(value.shape)]
        starts = jnp.asarray([sum(lengths[:replica]) for replica in range(len(lengths))])
        empty = jnp.zeros((*value.shape[:axis], sum(lengths), *value.shape[axis + 1 :]), value.dtype)
        # Each replica fills in its own part, and the parts add up: a sum can be differentiated as it stands.
        start = starts[self.replica_id_in_sync_group]
        return self.all_reduce(ReduceOp.SUM, jax.lax.dynamic_update_slice_in_dim(empty, value, start, axis))

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once for all replicas.

        Args:
            merge_fn: works in the cross-replica context: there are ``strategy.reduce`` and so on. Its array arguments are
                :class:`PerReplica`, or arrays where all replicas share them.
            args: trees of arrays, of the same shapes on every replica.
            kwargs: the same by name.

        Returns:
            What it returns; of a :class:`PerReplica` each replica gets its own value.

        Example:
            >>> import lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=3)
            >>> def number():
            ...     context = lockstep.get_replica_context()
            ...     add = lambda strategy, values: strategy.reduce("SUM", values, axis=None)
            ...     return context.merge_call(add, (context.replica_id_in_sync_group,))
            >>> int(strategy.run(number))
            3
        """
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        returned: list[Any] = []

        def combine(values: list[Any]) -> list[Any]:
            own, named = jax.tree.unflatten(structure, values)
            with inside(self.strategy, None):
                found = merge_fn(self.strategy, *own, **named)
            results, tree = jax.tree.flatten(found, is_leaf=is_per_replica)
            returned[:] = [tree]
            return [x if is_per_replica(x) else jnp.asarray(x) for x in results]

        every = [self.strategy._each(jax.typeof(leaf)) for leaf in leaves]
        shapes = [self.strategy._one(shape) for shape in jax.eval_shape(combine, every)]
        found = meet(Meeting("merge_call", combine), leaves, shapes)
        return jax.tree.unflatten(returned[0], found)


@contextmanager
def inside(strategy: Any, replica: ReplicaContext | None) -> Iterator[None]:
    """Work in a replica of ``strategy``, or, with None, for all of them in a merge call."""
    token = _inside.set((strategy, replica))
    try:
        yield
    finally:
        _inside.reset(token)


def current_strategy() -> Any:
    """The strategy whose replica is traced or whose scope is open, or None."""
    within = _inside.get()
    if within is not None:
        return within[0]
    return open_scopes.get()[-1] if open_scopes.get() else None


def current_replica() -> ReplicaContext | None:
    """The replica that is traced now, or None."""
    within = _inside.get()
    return within[1] if within else None


def refuse_in_replica(what: str) -> None:
    """Methods of a strategy work on all replicas at once."""
    if current_replica() is not None:
        raise ScopeError(
            f"strategy.{what} was called by a function that strategy.run runs on each replica. There, use "
            "lockstep.get_replica_context().all_reduce, all_gather or merge_call."
        )


def refuse_mean_of_integers(op: ReduceOp, dtype: Any) -> None:
    """A mean of whole numbers is no whole number."""
    if op is ReduceOp.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise OptionError(
            f"reduce_op: the mean of {dtype} numbers is no {dtype} number; convert them to a floating-point dtype first, or "
            "take ReduceOp.SUM."
        )
