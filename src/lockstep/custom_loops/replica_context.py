"""The context of one replica inside ``strategy.run``, and Keras models that are called there."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep._errors import ModelError, ScopeError, member_of
from lockstep._keras.graph import copy_keras_mask, map_in_order
from lockstep._keras.patches import CALL_ON_REPLICA, patched, value_in_context
from lockstep.collectives import AutoAllReduce, CrossDeviceOps
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.per_replica import (
    PerReplica,
    bools_as_integers,
    check_arrays,
    check_axis,
    check_shapes,
    group_replicas,
    is_array,
    is_per_replica,
    sum_over_replicas,
    value_of,
)
from lockstep.custom_loops.replica_runner import SyncPoint, sync
from lockstep.execution.call_splitter import CannotSplitError, ModelCall, merges_with, reason_for_proof, state_merges
from lockstep.execution.compiled_step import dispatch_lock
from lockstep.execution.replica import StateMerge, with_replica_seeds
from lockstep.execution.step_functions import is_in_step
from lockstep.execution.step_loop import trace_context

# Context variables: Keras's clear_session() does not touch them, and other threads do not see them.
# A tuple, because scopes in generators may close in another order than they were opened in.
open_scopes: ContextVar[tuple[Any, ...]] = ContextVar("lockstep_open_scopes", default=())
# In a function that run calls: the strategy and the replica; in one that merge_call calls: the strategy and None.
_context: ContextVar[tuple[Any, "ReplicaContext | None"] | None] = ContextVar("lockstep_context", default=None)


class ReplicaContext:
    """Context of a replica in a function that ``strategy.run`` calls: ``tf.distribute.ReplicaContext``.

    All replicas reach the same sync points (``all_reduce``, ``all_gather``, ``merge_call``) in the same order, and none of them inside
    ``lax.scan``, ``lax.cond`` or ``jax.vmap``.

    Args:
        strategy: strategy of the replica.
        replica_id: number of the replica, ``int32 ()``; one trace serves many replicas, so it is not a Python number.
        gathered_shapes: maps the shape that this replica gives to an ``all_gather`` to the shapes of all replicas.
        lengths: lengths of this replica's own arguments along their first axis, among them its number of rows.

    Attributes:
        trace: identifies the trace of this replica.
        later_traces: tells what is traced after an ``all_gather`` from what is traced before, as long as this replica runs.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=3)
        >>> def number():
        ...     context = lockstep.get_replica_context()
        ...     return context.all_reduce("SUM", context.replica_id_in_sync_group)
        >>> int(strategy.run(number))
        3
    """

    def __init__(
        self, strategy: Any, replica_id: Any, gathered_shapes: Callable[[Any], list[Any]], lengths: Iterable[int] = ()
    ) -> None:
        self.strategy, self.trace, self.lengths = strategy, object(), frozenset(lengths)
        self.later_traces = ExitStack()
        self.replica_id_in_sync_group = replica_id
        self._gathered_shapes = gathered_shapes

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
            The same tree, the same on every replica; the mean of whole numbers is a floating-point one, and the sum of
            bools counts.

        Raises:
            InputError: it holds a text or a sparse array.
            OptionError: ``reduce_op`` is unknown.
            ScopeError: this replica is not running.
        """
        self._check_is_running("all_reduce")
        op = member_of(ReduceOp, "all_reduce: reduce_op", reduce_op)
        check_arrays("all_reduce", value)
        leaves, structure = jax.tree.flatten(value)
        leaves = [as_floating(leaf) if op is ReduceOp.MEAN else bools_as_integers(leaf) for leaf in leaves]
        dtypes = [leaf.dtype for leaf in leaves]
        if op is ReduceOp.MEAN:
            leaves = [leaf.astype(dtype_of_mean(leaf.dtype)) for leaf in leaves]
        found = self._reduced(op, leaves, structure=structure)
        return jax.tree.unflatten(structure, [x.astype(dtype) for x, dtype in zip(found, dtypes, strict=True)])

    def _reduced(
        self,
        op: ReduceOp,
        leaves: list[Any],
        joined_along: int | None = None,
        ops: CrossDeviceOps | None = None,
        structure: Any = None,
    ) -> list[Any]:
        """Return sums or means over the replicas, by the strategy's operation or ``ops``.

        To join arrays, each replica gives its part with zeros around it.
        """
        count, add = self.num_replicas_in_sync, partial(self.strategy._sum_stacks, ops=ops)

        def combine(values: list[Any]) -> list[Any]:
            if joined_along is not None:
                check_shapes("all_gather", [own.shape for value in values for own in _values_of(value)], joined_along)
            sums = sum_over_replicas(values, count, add)
            return [total / count for total in sums] if op is ReduceOp.MEAN else sums

        sync_point = SyncPoint(f"all_reduce({op.name})", combine, is_linear=True, structure=structure)
        return sync(sync_point, leaves, [jax.typeof(leaf) for leaf in leaves])

    def all_gather(self, value: Any, axis: int) -> Any:
        """Join the replicas' arrays along ``axis``, the only one in which their shapes may differ; it can be differentiated.

        Args:
            value: tree of arrays with at least one axis.
            axis: number of the axis.

        Returns:
            The same tree, the same on every replica.

        Raises:
            InputError: there is no such axis, the replicas' arrays differ along another one, or an array is sparse.
            ScopeError: this replica is not running.

        Example:
            >>> import lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=3)
            >>> def numbers():
            ...     context = lockstep.get_replica_context()
            ...     return context.all_gather(context.replica_id_in_sync_group[None], axis=0)
            >>> [int(number) for number in strategy.run(numbers)]
            [0, 1, 2]
        """
        self._check_is_running("all_gather")
        check_arrays("all_gather", value)
        return jax.tree.map(lambda leaf: self._gather_one(jnp.asarray(leaf), axis), value)

    def _gather_one(self, value: jax.Array, axis: int) -> jax.Array:
        check_axis("all_gather", value.shape, axis)
        axis %= value.ndim
        lengths = [(*shape, *[0] * value.ndim)[axis] for shape in self._gathered_shapes(value.shape)]
        # JAX may not reuse the trace of a compiled function around this: the other replicas' lengths differ from call to call.
        self.later_traces.enter_context(trace_context(object()))
        starts = jnp.asarray([sum(lengths[:replica]) for replica in range(len(lengths))])
        empty = jnp.zeros((*value.shape[:axis], sum(lengths), *value.shape[axis + 1 :]), value.dtype)
        # Each replica fills in its own part, and the parts add up: a sum can be differentiated as it stands.
        start = starts[self.replica_id_in_sync_group]
        part = jax.lax.dynamic_update_slice_in_dim(empty, value, start, axis)
        return self._reduced(ReduceOp.SUM, [part], axis, AutoAllReduce())[0]

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once for all replicas.

        Args:
            merge_fn: runs in the cross-replica context, in which ``strategy.reduce`` and so on work. Its array arguments are
                :class:`PerReplica`, or arrays if all replicas share them; others are unchanged.
            args: trees of arrays, which may have other shapes on other replicas, and of other objects.
            kwargs: keyword arguments, likewise.

        Returns:
            The result of ``merge_fn``; of a :class:`PerReplica`, each replica gets its value.

        Raises:
            ScopeError: this replica is not running.

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
        self._check_is_running("merge_call")
        given, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
        given = [value_of(leaf) for leaf in given]
        leaves = [jnp.asarray(leaf) for leaf in given if is_array(leaf)]
        others = [leaf for leaf in given if not is_array(leaf)]
        returned: list[Any] = []

        def combine(values: list[Any]) -> list[Any]:
            arrays = iter(values)
            whole = [next(arrays) if is_array(leaf) else leaf for leaf in given]
            own, named = jax.tree.unflatten(structure, whole)
            with in_context(self.strategy, None):
                found = merge_fn(self.strategy, *own, **named)
            results, tree = jax.tree.flatten(found, is_leaf=is_per_replica)
            returned[:] = [tree]
            return [x if is_per_replica(x) else jnp.asarray(x) for x in results]

        shapes = [self._gathered_shapes(leaf.shape) for leaf in leaves]
        # JAX may not reuse the trace of a compiled function around this: the other replicas' shapes differ from call to call.
        self.later_traces.enter_context(trace_context(object()))
        every = [_stacked_shapes(own, leaf.dtype) for own, leaf in zip(shapes, leaves, strict=True)]
        own_shapes = [leaf.shape for leaf in leaves]
        mine = next((r for r, found in enumerate(zip(*shapes, strict=True)) if list(found) == own_shapes), 0)
        results = [_replica_shape(shape, mine) for shape in jax.eval_shape(combine, every)]
        name = f"merge_call of {[_named(leaf) for leaf in others]}" if others else "merge_call"
        found = sync(SyncPoint(name, combine, structure=structure), leaves, results)
        return jax.tree.unflatten(returned[0], found)

    def _check_is_running(self, method: str) -> None:
        if current_replica() is not self:
            raise ScopeError(
                f"{method} of a ReplicaContext was called while its replica is not running: after strategy.run, or in a function that "
                "merge_call calls. Fix: call lockstep.get_replica_context() in the function that strategy.run calls, and use its result there."
            )


def _stacked_shapes(shapes: list[tuple[int, ...]], dtype: Any) -> PerReplica:
    """Return the shape of a PerReplica whose values have these ``shapes``, one for each replica."""
    members = group_replicas(map(tuple, shapes))
    stacks = [jax.ShapeDtypeStruct((len(own), *shape), dtype) for shape, own in members.items()]
    return PerReplica(tuple(stacks), tuple(members.values()))


def _replica_shape(result: Any, replica: int) -> Any:
    """Return the shape of a replica's value of a merge call's result."""
    if not is_per_replica(result):
        return result
    (stack,) = (stack for stack, own in zip(result.groups, result.members, strict=True) if replica in own)
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _named(argument: Any) -> Any:
    """Return what an argument is in the name of a sync point: its value, or the type of an object that each trace may make anew."""
    is_plain = argument is None or isinstance(argument, (str, bytes, int, float, complex, Enum))
    return argument if is_plain else type(argument)


@contextmanager
def in_context(strategy: Any, replica: ReplicaContext | None) -> Iterator[None]:
    """Set the context to a replica of ``strategy`` or, with None, to its cross-replica context."""
    trace = replica.trace if replica else strategy.num_replicas_in_sync
    later = replica.later_traces if replica else nullcontext()
    with value_in_context(_context, (strategy, replica)), trace_context(trace), later:
        yield


def _values_of(value: Any) -> tuple[Any, ...]:
    return value.values if is_per_replica(value) else (value,)


def current_strategy() -> Any:
    """Return the strategy whose replica is traced or whose scope is open, or None; None in a step of ``fit``."""
    context = _context.get()
    if context is not None:
        return context[0]
    if is_in_step():  # Code that fit calls works as on one device, also if fit is called in a scope.
        return None
    return open_scopes.get()[-1] if open_scopes.get() else None


def current_replica() -> ReplicaContext | None:
    """Return the replica that is being traced, or None."""
    context = _context.get()
    return context[1] if context else None


def check_not_in_replica(what: str) -> None:
    """Refuse a call of a strategy's method in a replica: these methods work on all replicas at once."""
    if current_replica() is not None:
        raise ScopeError(
            f"strategy.{what} was called by a function that strategy.run runs on each replica. Fix: use "
            "lockstep.get_replica_context().all_reduce, all_gather or merge_call."
        )


def as_floating(value: Any) -> jax.Array:
    """Return a value as a floating-point array, so that it has a mean; floating-point dtypes stay."""
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.result_type(float))


def dtype_of_mean(dtype: Any) -> Any:
    """Return the dtype in which a mean is computed: float32 at least, as the sum of many float16 may be infinite."""
    return jnp.promote_types(dtype, jnp.float32)


@contextmanager
def models_on_replica() -> Iterator[None]:
    """Replace ``stateless_call`` of all models by :func:`_call_on_replica` while a replica is traced, also of those made outside a scope."""
    with dispatch_lock, patched(CALL_ON_REPLICA, [(keras.Model, "stateless_call", _call_on_replica)]):
        yield


# Also in a replica of a function that merges, where the attribute is replaced already.
_stateless_call = keras.Model.stateless_call


def _call_on_replica(
    model: keras.Model, trainable: Any, non_trainable: Any, *args: Any, return_losses: bool = False, **kwargs: Any
) -> Any:
    """``model.stateless_call`` for a replica.

    Seeds differ from replica to replica, and the non-trainable values that it returns are those that ``fit`` would keep: averages
    by rows, sums of changes, the seeds of replica 0. Where ``fit`` would need the global batch, it is refused. On a replica without
    rows, the outputs have no gradient and losses over rows are 0; regularization losses of weights are the same on each replica.
    """
    original = partial(_stateless_call, model)
    if (context := current_replica()) is None:  # In a merge call, or in another thread.
        return original(trainable, non_trainable, *args, return_losses=return_losses, **kwargs)
    replica = context.replica_id_in_sync_group
    found = [leaf.shape[0] for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf) and leaf.ndim]
    shared = found[0] if found else 1  # Lists of numbers are the same on each replica, as arrays of no replica are.
    rows = next((length for length in found if length in context.lengths), shared)
    values = list(trainable), list(non_trainable)
    merges, no_proof = _state_merges(
        context, ModelCall.from_arguments(model, original, *values, (args, kwargs), return_losses, rows)
    )
    own = with_replica_seeds(non_trainable, merges, replica)
    outputs, state, *losses = original(trainable, own, *args, return_losses=return_losses, **kwargs)
    if not rows:  # A mean over no rows is NaN, and so would be its gradient.
        zero = _zero_of((trainable, args, kwargs))
        outputs = map_in_order(lambda leaf: copy_keras_mask(leaf, _constant(leaf, zero)), outputs)
        losses = [_zero_row_losses(model, own_losses, zero) for own_losses in losses]
    changed = [i for i, (new, old) in enumerate(zip(state, own, strict=True)) if new is not old]
    if not changed:
        return outputs, list(non_trainable), *losses
    if no_proof and any(reason_for_proof(model, model.non_trainable_variables[i]) for i in changed):
        raise ModelError(
            f"strategy.run: model {model.name!r} keeps values that differ between replicas: {no_proof}. Fix: make the variable with "
            "add_weight(…, aggregation='sum') or 'only_first_replica', or 'mean' for floating-point numbers; or use fit, which runs "
            "such a model on the global batch."
        )
    shares = [_share(jnp.asarray(state[i]), own[i], merges[i], replica, rows) for i in changed]
    # In the dtypes of the arrays, whichever operation adds gradients.
    *sums, total = context._reduced(ReduceOp.SUM, [*shares, jnp.float32(rows)], ops=AutoAllReduce())
    merged = list(non_trainable)
    for position, value in zip(changed, sums, strict=True):
        merged[position] = _merged(value, non_trainable[position], merges[position], total)
    return outputs, merged, *losses


def _state_merges(context: ReplicaContext, call: ModelCall) -> tuple[tuple[StateMerge, ...], str]:
    """Return how the replicas' values of each non-trainable variable are merged, and why that is not proved; "" if it is."""
    unproved = merges_with(call.model.non_trainable_variables, set())
    if context.num_replicas_in_sync == 1:
        return unproved, ""
    try:
        # Outside of the replica; no compiled function may reuse the trace.
        with value_in_context(_context, None), trace_context(object()):
            return state_merges(call), ""
    except CannotSplitError as error:
        return unproved, str(error)


def _zero_of(tree: Any) -> jax.Array:
    """Return a zero whose derivative is zero too, but known to JAX only at run time: replicas without rows sync like the others."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(
        (jnp.sum(jnp.ravel(array)[:0]).real.astype("float32") for array in arrays), start=jnp.zeros((), "float32")
    )


def _constant(leaf: jax.Array, zero: jax.Array) -> jax.Array:
    """Return an output without a gradient."""
    constant = jax.lax.stop_gradient(leaf)
    return constant + zero.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else constant


def _zero_row_losses(model: keras.Model, losses: list[Any], zero: jax.Array) -> list[Any]:
    """Set the losses over rows to 0; Keras puts those of weights at the end."""
    of_weights = sum(variable.regularizer is not None for variable in model.trainable_weights)
    of_rows = len(losses) - of_weights
    return [_constant(jnp.zeros_like(loss), zero) if i < of_rows else loss for i, loss in enumerate(losses)]


def _share(new: jax.Array, old: Any, merge: StateMerge, replica: jax.Array, rows: int) -> jax.Array:
    """Return a replica's contribution to the sum over all replicas: zeros if it has no rows."""
    new = jax.lax.stop_gradient(new) if jnp.issubdtype(new.dtype, jnp.inexact) else new
    if merge is StateMerge.MEAN:
        wide = dtype_of_mean(new.dtype)
        return new.astype(wide) * rows if rows else jnp.zeros(new.shape, wide)
    if merge is StateMerge.SUM:
        return new - old if rows else jnp.zeros_like(new)
    return jnp.where(replica == 0, new, jnp.zeros_like(new))


def _merged(total: jax.Array, old: Any, merge: StateMerge, rows: jax.Array) -> jax.Array:
    if merge is StateMerge.MEAN:
        return (total / rows).astype(old.dtype)
    return old + total if merge is StateMerge.SUM else total.astype(old.dtype)
