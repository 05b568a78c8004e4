"""What a strategy offers to a training loop of one's own, with the names of ``tf.distribute.Strategy``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import PartitionSpec

from lockstep._errors import ModelError, OptionError, member_of
from lockstep.collectives import CrossDeviceOps
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.input_api import InputApi
from lockstep.custom_loops.per_replica import (
    PerReplica,
    countable,
    is_per_replica,
    is_value,
    sum_over_replicas,
    value_of,
)
from lockstep.custom_loops.replica_context import ReplicaContext, inside, refuse_in_replica, with_fractions
from lockstep.custom_loops.replica_runner import run_on_replicas
from lockstep.custom_loops.value_checks import (
    check_arrays,
    check_axis,
    check_hash,
    check_replicas,
    check_shapes,
    checked_result,
    on_host,
    values_unknown,
)
from lockstep.data.device_placement import DEVICE_AXIS
from lockstep.distributed.resolvers import ClusterResolver

__all__ = ["StrategyApi"]


class StrategyApi(InputApi):
    """Base of the strategies: run a function on every replica, and bring values together."""

    _ops: CrossDeviceOps
    _deterministic: bool = False

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that a global batch is split over."""
        return self._placement.replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What said who takes part; None where one process trains alone."""
        return None

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``fn`` on every replica.

        Inside ``jax.jit`` the call becomes part of the compiled step; outside it is compiled by itself, once for each ``fn``
        and each kind of argument, as ``jax.jit`` would. ``fn`` is traced once for all replicas whose arguments have the same
        shapes. A model of this strategy draws other noise on each replica, and the non-trainable values that its
        ``stateless_call`` returns are merged over the replicas, as in ``fit``.

        Args:
            fn: what to call, of ``args`` and ``kwargs``. In it, :func:`lockstep.get_replica_context` says which replica it is.
            args: trees; each replica gets its own value of a :class:`PerReplica`, and all share what else there is. Of a Keras
                variable they get the value.
            kwargs: the same by name.

        Returns:
            What ``fn`` returns, with a :class:`PerReplica` for each array that depends on the replica.

        Raises:
            ModelError: the replicas do not meet in the same order, or inside a loop; ``fn`` assigns to a Keras variable, or needs the
                value of an array while it is traced.
            OptionError: the strategy is deterministic, ``args`` is no tuple or list or has no hash, or ``fn`` returns no arrays.
            ScopeError: it is called on a replica.

        Example:
            >>> import jax.numpy as jnp, lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> (batch,) = strategy.experimental_distribute_dataset([jnp.arange(3.0)])
            >>> [float(value) for value in strategy.run(lambda rows: rows.sum(), args=(batch,)).values]
            [1.0, 2.0]
        """
        refuse_in_replica("run")
        if self._deterministic:
            raise OptionError(
                "strategy.run does not keep the promise of deterministic=True: replicas run side by side. Write a train_step of "
                "your own and use fit, or make a strategy without deterministic=True."
            )
        if not isinstance(args, (tuple, list)):
            raise OptionError(
                f"strategy.run: args: expected a tuple or a list, got {type(args).__name__}; write args=(value,)."
            )
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})), is_leaf=is_per_replica)
        leaves = [value_of(leaf) for leaf in leaves]
        are_values = tuple(is_value(leaf) for leaf in leaves)
        fixed = tuple(leaf for leaf, value in zip(leaves, are_values, strict=True) if not value)
        for leaf in leaves:
            if is_per_replica(leaf):
                check_replicas("run", leaf, self._placement.replicas)
        for leaf in fixed:
            check_hash(leaf)
        values = [leaf for leaf, value in zip(leaves, are_values, strict=True) if value]
        with values_unknown():
            return self._called(fn, structure, are_values, fixed, values)

    def _called(self, fn: Any, structure: Any, are_values: Any, fixed: Any, values: list[Any]) -> Any:
        """As a part of a step that is traced, or compiled by itself."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
            return self._run(fn, structure, are_values, fixed, values)
        shared = self._placement.put([None if is_per_replica(x) else on_host(x) for x in values])
        placed = [own if is_per_replica(own) else x for own, x in zip(values, shared, strict=True)]
        return self._run_compiled(fn, structure, are_values, fixed, placed)

    def _run(self, fn: Any, structure: Any, are_values: Any, fixed: Any, values: list[Any]) -> Any:
        def on_replica(replica: jax.Array, own: list[Any], gathering: Callable[[Any], list[Any]]) -> Any:
            arrays, others = iter(own), iter(fixed)
            args, kwargs = jax.tree.unflatten(
                structure, [next(arrays) if value else next(others) for value in are_values]
            )
            context = ReplicaContext(self, replica, gathering)
            with inside(self, context), self._models_in_replica(context), _AssignedVariables() as assigned:
                found = fn(*args, **kwargs)
            assigned.refuse()
            return jax.tree.map(checked_result, found, is_leaf=is_per_replica)

        return run_on_replicas(on_replica, values, self._placement)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
        """Sum or mean over the replicas, and over an axis of their values if one is given.

        Args:
            reduce_op: a member of :class:`ReduceOp` or its name.
            value: tree of :class:`PerReplica`, or of arrays that all replicas share.
            axis: None: over the replicas only; their shapes must be equal. 0, as a rule: over the rows too. The mean divides by
                the true number of rows of all replicas.

        Returns:
            The same tree of arrays; the mean of whole numbers is a floating-point one, and the sum of bools counts.

        Raises:
            InputError: shapes differ, a value has no such axis, is a text or sparse, or is of another number of replicas.
            OptionError: the sum over several replicas of something that is one value is asked for.
            ScopeError: it is called on a replica.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> (batch,) = strategy.experimental_distribute_dataset([np.asarray([1.0, 2.0, 3.0])])
            >>> float(strategy.reduce("MEAN", batch, axis=0))
            2.0
        """
        refuse_in_replica("reduce")
        op = member_of(ReduceOp, "reduce: reduce_op", reduce_op)
        check_arrays("reduce", value)
        return jax.tree.map(lambda leaf: self._reduce_one(op, leaf, axis), value, is_leaf=is_per_replica)

    def _reduce_one(self, op: ReduceOp, value: Any, axis: int | None) -> jax.Array:
        if not is_per_replica(value):
            if axis is not None:
                check_axis("strategy.reduce", jnp.shape(value), axis)
            if op is ReduceOp.MEAN:
                return jnp.asarray(value) if axis is None else jnp.mean(jnp.asarray(value), axis=axis)
            if self._placement.replicas == 1:
                return countable(value) if axis is None else jnp.sum(countable(value), axis=axis)
            raise OptionError(
                f"reduce(SUM): {value!r} is one value and not one of each replica, so its sum over replicas has no meaning. "
                "Fix: multiply by strategy.num_replicas_in_sync if that is meant; where it is a number of rows, add it up in the function that "
                "run calls, with all_reduce."
            )
        check_replicas("reduce", value, self._placement.replicas)
        count: int = self._placement.replicas
        value = jax.tree.map(with_fractions if op is ReduceOp.MEAN else countable, value)
        if axis is not None:
            for array in value.groups:
                check_axis("strategy.reduce", array.shape[1:], axis)
            count = sum(array.shape[0] * array.shape[1:][axis] for array in value.groups)
            inner = axis + 1 if axis >= 0 else axis
            groups = tuple(jnp.sum(array, axis=inner, dtype=array.dtype) for array in value.groups)
            value = PerReplica(groups, value.members)
        total = sum_over_replicas(value, self._placement.replicas, self._add)
        return total / count if op is ReduceOp.MEAN else total

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' arrays joined along ``axis``, in the order of the replicas.

        Args:
            value: tree of :class:`PerReplica`, whose shapes may differ along ``axis`` only, or of arrays that all share.
            axis: number of the axis.

        Returns:
            The same tree of arrays.

        Raises:
            InputError: a value has no such axis, or other axes differ.
            ScopeError: it is called on a replica.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(3)])
            >>> strategy.gather(batch, axis=0).tolist()
            [0, 1, 2]
        """
        refuse_in_replica("gather")
        check_arrays("gather", value)

        def one(leaf: Any) -> jax.Array:
            if is_per_replica(leaf):
                check_replicas("gather", leaf, self._placement.replicas)
            own = leaf if is_per_replica(leaf) else PerReplica((jnp.asarray(leaf)[None],), ((0,),))
            for array in own.groups:
                check_axis("strategy.gather", array.shape[1:], axis)
            check_shapes("gather", [value.shape for value in own.values], axis)
            return jnp.concatenate(own.values, axis=axis)

        return jax.tree.map(one, value, is_leaf=is_per_replica)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, in order; a value that all share stands alone.

        Args:
            value: tree of :class:`PerReplica` or of arrays.

        Returns:
            One tree for each of these replicas; the value itself, once, where no replica has its own.

        Example:
            >>> import lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> numbers = strategy.experimental_distribute_values_from_function(lambda replica: replica.replica_id_in_sync_group)
            >>> [int(number) for number in strategy.experimental_local_results(numbers)]
            [0, 1]
        """
        leaves, structure = jax.tree.flatten(value, is_leaf=is_per_replica)
        if not any(map(is_per_replica, leaves)):
            return (value,)
        own = self._placement.local_replicas
        held = [_held(x) if is_per_replica(x) else dict.fromkeys(own, x) for x in leaves]
        columns = [[values[replica] for replica in own] for values in held]
        return tuple(jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True))

    @cached_property
    def _run_compiled(self) -> Any:
        return jax.jit(self._run, static_argnums=(0, 1, 2, 3))

    def _models_in_replica(self, context: ReplicaContext) -> AbstractContextManager[Any]:
        """While it is open, the strategy's models know that they are called on a replica."""
        return nullcontext()

    def _add(self, stack: jax.Array) -> jax.Array:
        """Sum of ``(replicas, …)`` in its own dtype; between devices by the strategy's cross-device operation."""
        devices = self._placement.devices

        def local(values: jax.Array) -> jax.Array:
            return values.any(axis=0) if values.dtype == bool else values.sum(axis=0, dtype=values.dtype)

        if len(devices) == 1 or len(stack) % len(devices):
            return local(stack)
        return jax.shard_map(
            lambda values: self._ops.all_reduce([local(values)], DEVICE_AXIS, devices)[0],
            mesh=self._placement.mesh,
            in_specs=PartitionSpec(DEVICE_AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(stack)

    def _each(self, shape: Any) -> PerReplica:
        """What all replicas bring where each brings ``shape``."""
        count = self._placement.replicas
        stack = jax.ShapeDtypeStruct((count, *shape.shape), shape.dtype)
        return PerReplica((stack,), (tuple(range(count)),))

    def _one(self, result: Any) -> Any:
        """What one replica gets of a result for all."""
        if not is_per_replica(result):
            return result
        (stack,) = result.groups
        return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


class _AssignedVariables(keras.StatelessScope):
    """Notes which variables are assigned to while it is open, and keeps them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.paths.append(update[0].path)
        super().add_update(update)

    def refuse(self) -> None:
        """Raise an error where there are such."""
        if self.paths:
            raise ModelError(
                f"strategy.run: fn assigned to {', '.join(dict.fromkeys(self.paths))}. A replica is traced, and its values are gone when that "
                "ends; the variables are as they were. Fix: give values to fn and return new ones, with model.stateless_call, "
                "optimizer.stateless_apply and metric.stateless_update_state (docs/custom_loops.md)."
            )


def _held(value: PerReplica) -> dict[int, jax.Array]:
    """By replica the values that this process has; all of them while a function is traced."""
    is_traced = any(isinstance(array, jax.core.Tracer) for array in value.groups)
    return dict(enumerate(value.values)) if is_traced else value.held
