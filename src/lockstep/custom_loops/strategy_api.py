"""Methods of a strategy for custom training loops, with the names of ``tf.distribute.Strategy``."""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import ModelError, OptionError, check_depth, function, member_of, named_arguments, shown
from lockstep.collectives import CrossDeviceOps
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.distributed_dataset import DistributedDataset, InputContext, PerReplicaDataset, ValueContext
from lockstep.custom_loops.per_replica import (
    PerReplica,
    bools_as_integers,
    check_arrays,
    check_axis,
    check_hashable,
    check_host_argument,
    check_replicas,
    check_result,
    check_shapes,
    check_structures,
    is_cut,
    is_per_replica,
    is_value,
    per_replica_of,
    sum_over_replicas,
    value_of,
)
from lockstep.custom_loops.replica_context import (
    ReplicaContext,
    as_floating,
    check_not_in_replica,
    dtype_of_mean,
    in_context,
    models_on_replica,
)
from lockstep.custom_loops.replica_runner import explain_tracer_errors, run_on_replicas
from lockstep.data.input_options import InputOptions, check_input_options
from lockstep.data.process_group import ProcessGroup
from lockstep.data.sources import make_tree_source
from lockstep.devices.names import device_name
from lockstep.devices.placement import DEVICE_AXIS, Placement, combine_parts, is_spread, local_values
from lockstep.distributed.resolvers import ClusterResolver
from lockstep.execution.compiled_step import start_lock

_MAX_REMEMBERED_CALLS = 4096  # of one function, and which variables they read: as many as jax.jit keeps

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a call of ``run`` but for the values among them: calls of a function with equal ones share one compiled program."""

    structure: jax.tree_util.PyTreeDef
    are_values: tuple[bool, ...]
    fixed: tuple[Any, ...]

    def call(self, fn: Function, values: Iterable[Any]) -> Any:
        own, others = iter(values), iter(self.fixed)
        leaves = [next(own) if is_value else next(others) for is_value in self.are_values]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return fn(*args, **kwargs)


@dataclass(frozen=True)
class _Program:
    """What a function that ``run`` has called is compiled to.

    Args:
        compiled: is called with :class:`_Arguments`, the values among the arguments, and those of the variables that it reads.
        variables_read: returns the variables that it reads without having them as arguments, in the order in which they were found.
    """

    compiled: Callable[[_Arguments, list[Any], list[jax.Array]], Any]
    variables_read: Callable[[_Arguments], list[keras.Variable]]


class _Programs:
    """Programs by function, which they do not keep alive: each is dropped with its function, as those of ``jax.jit`` are.

    Equal objects of a class that has a hash of its own share a program. Of these a limited number is kept, and of what has no weak references.

    Args:
        make: makes the program of a function, given what returns the function.
    """

    def __init__(self, make: Callable[[Callable[[], Any]], _Program]) -> None:
        self._make = make
        self._kept: dict[Any, tuple[Callable[[], Any], _Program]] = {}
        self._of_equal = functools.lru_cache(_MAX_REMEMBERED_CALLS)(lambda fn: make(lambda: fn))

    def of(self, fn: Function) -> _Program:
        """Return the program of a function; a bound method is another object each time, and has that of its object and function."""
        is_method = isinstance(fn, MethodType)
        if not is_method and getattr(type(fn), "__hash__", None) not in (None, object.__hash__):
            return self._of_equal(fn)
        key = (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else id(fn)
        if key not in self._kept:
            kept = self._kept
            try:
                reference = (weakref.WeakMethod if is_method else weakref.ref)(fn, lambda _: kept.pop(key, None))
            except TypeError:  # A method of a named tuple, for example, has no weak references.
                return self._of_equal(fn)
            kept[key] = reference, self._make(reference)
        return self._kept[key][1]


class StrategyApi:
    """Base of the strategies: run a function on every replica, reduce and gather values, distribute inputs."""

    _placement: Placement
    _input_options: InputOptions
    _process_group: ProcessGroup
    _ops: CrossDeviceOps
    _deterministic: bool = False

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that a global batch is split over."""
        return self._placement.replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, for example ``("gpu:0", "gpu:1")``."""
        return tuple(device_name(device) for device in self._placement.devices)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The operation that adds the devices' gradients."""
        return self._ops

    @property
    def deterministic(self) -> bool:
        """Whether a step has the same bits on any number of devices."""
        return self._deterministic

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The source of the cluster's addresses; None if one process trains alone."""
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that prints and writes files; True if it is the only one.

        Example:
            >>> import lockstep
            >>> lockstep.MirroredStrategy(["cpu:0"]).is_chief
            True
        """
        return True

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``fn`` on every replica.

        Inside ``jax.jit`` the call becomes part of the compiled step; outside it is compiled separately, once for each ``fn``
        and each kind of argument, and freed with ``fn``, as ``jax.jit`` would. ``fn`` is traced once for all replicas whose arguments
        have the same shapes. A Keras model draws different noise on each replica, and the non-trainable values that its
        ``stateless_call`` returns are merged over the replicas, as in ``fit``; but a variable without ``aggregation`` whose value ``fit``
        would compute on the global batch is refused.

        Args:
            fn: function of ``args`` and ``kwargs``. In it, :func:`lockstep.get_replica_context` returns the replica's context.
            args: trees; each replica gets its value of a :class:`PerReplica`, and all replicas share other arguments. A Keras
                variable is replaced by its value.
            kwargs: keyword arguments, likewise. Outside ``jax.jit`` a Keras variable that ``fn`` reads has its value at the time of the call.

        Returns:
            The result of ``fn``, with a :class:`PerReplica` for each array that depends on the replica.

        Raises:
            ModelError: the replicas do not sync in the same order, or sync inside a loop; ``fn`` assigns to a Keras variable, or needs
                the value of an array while it is traced; a model keeps a value that needs an ``aggregation``.
            OptionError: the strategy is deterministic, ``args`` is not a tuple or list, an argument has no hash, or ``fn`` returns
                something other than arrays.
            ScopeError: it is called on a replica.

        Example:
            >>> import jax.numpy as jnp, lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> (batch,) = strategy.experimental_distribute_dataset([jnp.arange(3.0)])
            >>> [float(value) for value in strategy.run(lambda rows: rows.sum(), args=(batch,)).values]
            [1.0, 2.0]
        """
        check_not_in_replica("run")
        if self._deterministic:
            raise OptionError(
                "strategy.run does not support deterministic=True, because replicas run as one batch. Fix: write a custom train_step "
                "and use fit, or make a strategy without deterministic=True."
            )
        function("strategy.run: fn", fn)
        leaves, structure = jax.tree.flatten(_checked_arguments(args, kwargs), is_leaf=is_per_replica)
        leaves = [value_of(leaf) for leaf in leaves]
        are_values = tuple(is_value(leaf) for leaf in leaves)
        fixed = tuple(leaf for leaf, value in zip(leaves, are_values, strict=True) if not value)
        for leaf in leaves:
            if is_per_replica(leaf):
                check_replicas("run", leaf, self._placement.replicas)
        for leaf in fixed:
            check_hashable(leaf)
        values = [leaf for leaf, value in zip(leaves, are_values, strict=True) if value]
        with explain_tracer_errors():
            return self._run_or_compile(fn, _Arguments(structure, are_values, fixed), values)

    def _run_or_compile(self, fn: Function, arguments: _Arguments, values: list[Any]) -> Any:
        """Run as part of the step that is being traced; outside of one, compile the call first, with the variables that it reads as arguments."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
            return self._run(fn, arguments, values)
        shared = self._placement.put([None if is_per_replica(x) else check_host_argument(x) for x in values])
        placed = [own if is_per_replica(own) else x for own, x in zip(values, shared, strict=True)]
        program = self._programs.of(fn)
        read = program.variables_read(arguments)
        while True:
            # With a dtype: Keras's first value of a number has a weak one, for which JAX would trace again.
            values = [value_of(variable) for variable in read]
            newest = self._placement.put([jnp.asarray(value, value.dtype) for value in values])
            try:
                with start_lock(self._placement.devices):
                    return program.compiled(arguments, placed, newest)
            except _UnknownVariablesError as error:
                read.extend(error.variables)

    @cached_property
    def _programs(self) -> _Programs:
        return _Programs(self._make_program)

    def _make_program(self, get_function: Callable[[], Any]) -> _Program:
        variables_read = functools.lru_cache(_MAX_REMEMBERED_CALLS)(lambda arguments: list[keras.Variable]())

        def run(arguments: _Arguments, values: list[Any], read: list[jax.Array]) -> Any:
            known = variables_read(arguments)[: len(read)]
            return self._run(get_function(), arguments, values, known, read)

        return _Program(jax.jit(run, static_argnums=0), variables_read)

    def _run(
        self,
        fn: Function,
        arguments: _Arguments,
        values: list[Any],
        known: Sequence[keras.Variable] = (),
        read: list[jax.Array] | None = None,
    ) -> Any:
        """Trace the replicas.

        Args:
            fn: what they run.
            arguments: its arguments but for values.
            values: arrays, of each replica or shared.
            known: variables that it reads.
            read: their values; None: those of all variables are constants, as in any function that the user traces.
        """

        def on_replica(replica: jax.Array, own: list[Any], gathered_shapes: Callable[[Any], list[Any]]) -> Any:
            pairs = zip(values, own, strict=False)
            lengths = [mine.shape[0] for value, mine in pairs if is_per_replica(value) and mine.ndim]
            context = ReplicaContext(self, replica, gathered_shapes, lengths)
            access = _VariableAccess(known, own[len(values) :])
            with in_context(self, context), models_on_replica(), access:
                found = arguments.call(fn, own[: len(values)])
            access.refuse_assignments()
            if read is not None:
                access.check_known()
            return jax.tree.map(check_result, found, is_leaf=is_per_replica)

        return run_on_replicas(on_replica, [*values, *(read or [])], self._placement)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
        """Sum or mean over the replicas, and over an axis of their values if one is given.

        Args:
            reduce_op: a member of :class:`ReduceOp` or its name.
            value: tree of :class:`PerReplica`, or of arrays that all replicas share.
            axis: None: over the replicas only; their shapes must be equal. Usually 0: over the rows too. The mean divides by
                the actual number of rows of all replicas.

        Returns:
            The same tree of arrays; the mean of whole numbers is a floating-point number, and the sum of bools counts.

        Raises:
            InputError: shapes differ, a value has no such axis, is a text or sparse, or belongs to another number of replicas.
            OptionError: ``"SUM"`` over several replicas of a value that all of them share.
            ScopeError: it is called on a replica.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> (batch,) = strategy.experimental_distribute_dataset([np.asarray([1.0, 2.0, 3.0])])
            >>> float(strategy.reduce("MEAN", batch, axis=0))
            2.0
        """
        check_not_in_replica("reduce")
        op = member_of(ReduceOp, "reduce: reduce_op", reduce_op)
        check_arrays("reduce: value", value)
        return jax.tree.map(lambda leaf: self._reduce_one(op, leaf, axis), value, is_leaf=is_per_replica)

    def _reduce_one(self, op: ReduceOp, value: Any, axis: int | None) -> jax.Array:
        if not is_per_replica(value):
            if axis is not None:
                check_axis("strategy.reduce: axis", jnp.shape(value), axis)
            if op is ReduceOp.MEAN:
                return as_floating(value) if axis is None else jnp.mean(jnp.asarray(value), axis=axis)
            if self._placement.replicas == 1:
                return bools_as_integers(value) if axis is None else jnp.sum(bools_as_integers(value), axis=axis)
            raise OptionError(
                f"reduce(SUM): {shown(value)} is one value and not one for each replica, so its sum over replicas is ambiguous. "
                "Fix: multiply by strategy.num_replicas_in_sync if that is meant; a number of rows is summed with all_reduce in the function "
                "that run calls."
            )
        check_replicas("reduce", value, self._placement.replicas)
        count: int = self._placement.replicas
        value = jax.tree.map(as_floating if op is ReduceOp.MEAN else bools_as_integers, value)
        dtype = value.groups[0].dtype
        if op is ReduceOp.MEAN:
            value = jax.tree.map(lambda array: array.astype(dtype_of_mean(dtype)), value)
        if axis is not None:
            for array in value.groups:
                check_axis("strategy.reduce: axis", array.shape[1:], axis)
            count = sum(array.shape[0] * array.shape[1:][axis] for array in value.groups)
            inner = axis + 1 if axis >= 0 else axis
            groups = tuple(jnp.sum(array, axis=inner, dtype=array.dtype) for array in value.groups)
            value = PerReplica(groups, value.members)
        (total,) = sum_over_replicas([value], self._placement.replicas, self._sum_stacks)
        return (total / count).astype(dtype) if op is ReduceOp.MEAN else total

    def gather(self, value: Any, axis: int) -> Any:
        """Join the replicas' arrays along ``axis``, in the order of the replicas.

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
        check_not_in_replica("gather")
        check_arrays("gather: value", value)

        def one(leaf: Any) -> jax.Array:
            if is_per_replica(leaf):
                check_replicas("gather", leaf, self._placement.replicas)
            own = leaf if is_per_replica(leaf) else PerReplica((jnp.asarray(leaf)[None],), ((0,),))
            for array in own.groups:
                check_axis("strategy.gather: axis", array.shape[1:], axis)
            check_shapes("gather", [value.shape for value in own.values], axis)
            return jnp.concatenate(own.values, axis=axis)

        return jax.tree.map(one, value, is_leaf=is_per_replica)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, in order; a value that all replicas share is returned once.

        Args:
            value: tree of :class:`PerReplica` or of arrays.

        Returns:
            One tree for each of these replicas; a single one if all replicas share the value. If replicas have unequal numbers of rows,
            all processes make this call.

        Example:
            >>> import lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> numbers = strategy.experimental_distribute_values_from_function(lambda replica: replica.replica_id_in_sync_group)
            >>> [int(number) for number in strategy.experimental_local_results(numbers)]
            [0, 1]
        """
        check_depth("experimental_local_results: value", value)
        leaves, structure = jax.tree.flatten(value, is_leaf=is_per_replica)
        if not any(map(is_per_replica, leaves)):
            return (value,)
        own = self._placement.local_replicas
        held = [_local_values(x) if is_per_replica(x) else dict.fromkeys(own, x) for x in leaves]
        columns = [[values[replica] for replica in own] for values in held]
        return tuple(jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True))

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make one value for each replica.

        Args:
            value_fn: given a :class:`ValueContext`, returns a tree of arrays.

        Returns:
            The tree, with a :class:`PerReplica` for each array.

        Raises:
            InputError: the trees differ between replicas, or hold something other than numbers.
        """
        check_not_in_replica("experimental_distribute_values_from_function")
        count = self._placement.replicas
        function("experimental_distribute_values_from_function: value_fn", value_fn, "a function of a ValueContext")
        trees = [value_fn(ValueContext(replica, count)) for replica in range(count)]
        check_structures("experimental_distribute_values_from_function", trees)
        return jax.tree.map(lambda *values: per_replica_of(values, self._placement), *trees)

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Cut the batches of a data set into replicas, in a thread ahead of the loop.

        Args:
            dataset: batches of the *global* size: any iterable of trees of arrays ``(rows, …)``, such as a list, a generator, a
                ``tf.data.Dataset``, a torch ``DataLoader`` or a Grain data set; a ``keras.utils.PyDataset``; or a function of the
                number of the step that returns None at the end.
            options: how far ahead to read, by default the strategy's ``input_options``.

        Returns:
            An iterable of trees of :class:`PerReplica`. Each replica gets ``ceil(rows / replicas)`` rows, in order; the last
            ones may get fewer, or none. ``fit``, ``evaluate`` and ``predict`` take it, too.

        Raises:
            InputError: it is not a data set; or, during iteration, a batch has no rows or arrays of different lengths.
            OptionError: the options have a cache, which is for ``fit``.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> data = strategy.experimental_distribute_dataset([np.arange(3), np.arange(2)])
            >>> [[len(rows) for rows in batch.values] for batch in data]
            [[2, 1], [1, 1]]
        """
        check_not_in_replica("experimental_distribute_dataset")
        source = make_tree_source(dataset)
        check = self._process_group.make_batch_check(source.name, lambda: source.num_batches)
        return DistributedDataset(source, self._placement, self._prefetch(options), check)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Read a separate batch for each replica, in a thread ahead of the loop.

        Args:
            dataset_fn: given an :class:`InputContext`, returns batches of the size of *one replica*, of any kind that
                :meth:`experimental_distribute_dataset` takes. Each process calls it and reads for its own replicas.
            options: how far ahead to read, by default the strategy's ``input_options``.

        Returns:
            An iterable; each of its elements holds the next batch for every replica. If the input ends before all replicas have
            a batch, the rest get batches of 0 rows. ``fit`` takes it, too: the rows of all replicas are one global batch there.

        Raises:
            InputError: the function did not return a data set.
            OptionError: the options have a cache, which is for ``fit``; or there are more processes than replicas.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> data = strategy.distribute_datasets_from_function(lambda context: [np.zeros(3), np.ones(3)])
            >>> [[float(rows.mean()) for rows in batch.values] for batch in data]
            [[0.0, 1.0]]
        """
        check_not_in_replica("distribute_datasets_from_function")
        group = self._process_group
        function("distribute_datasets_from_function: dataset_fn", dataset_fn, "a function of an InputContext")
        if group.processes > self._placement.replicas:
            raise OptionError(
                f"distribute_datasets_from_function: {group.processes} processes share {self._placement.replicas} replicas, so some "
                "would have no rows. Fix: let all processes read the same data, with experimental_distribute_dataset."
            )
        context = InputContext(group.processes, group.process, self._placement.replicas)
        source = make_tree_source(dataset_fn(context), "distribute_datasets_from_function: what dataset_fn returns")
        return PerReplicaDataset(source, self._placement, self._prefetch(options), group.make_batch_gather(source.name))

    def _prefetch(self, options: InputOptions | None) -> int:
        if options is not None and check_input_options("options", options).cache is not None:
            raise OptionError(
                f"InputOptions(cache={str(options.cache)!r}) is for fit. Fix: in a custom training loop, keep the batches of the first epoch."
            )
        return (self._input_options if options is None else options).prefetch

    def _sum_stacks(self, values: list[list[jax.Array]], ops: CrossDeviceOps | None = None) -> list[jax.Array]:
        """Sum for each value its stacks ``(replicas of a group, …)`` over axis 0 in its dtype; between devices by one cross-device operation."""
        devices, operation = self._placement.devices, ops or self._ops

        def local(stacks: list[jax.Array]) -> jax.Array:
            is_bool = stacks[0].dtype == bool
            sums = [stack.any(axis=0) if is_bool else stack.sum(axis=0, dtype=stack.dtype) for stack in stacks]
            return functools.reduce(operator.add, sums)

        if len(devices) == 1:
            return [local(stacks) for stacks in values]

        def of_all(stack: jax.Array) -> jax.Array:
            """Add zeros, for devices that have fewer replicas; XLA moves no value for that."""
            return jnp.pad(stack, [(0, -len(stack) % len(devices)), *[(0, 0)] * (stack.ndim - 1)])

        add = combine_parts(
            lambda values: operation.all_reduce([local(stacks) for stacks in values], DEVICE_AXIS, devices),
            self._placement.mesh,
        )
        return add(jax.tree.map(of_all, values))


class _UnknownVariablesError(Exception):
    """Tells which variables a function has read of which the caller did not know."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        super().__init__()
        self.variables = variables


class _VariableAccess(keras.StatelessScope):
    """Gives values to Keras variables, records which others are read, and records assignments instead of making them."""

    def __init__(self, known: Sequence[keras.Variable], values: list[Any]) -> None:
        super().__init__(state_mapping=list(zip(known, values, strict=True)))
        self._known = {id(variable) for variable in known}
        self._unknown: dict[int, keras.Variable] = {}
        self.paths: list[str] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the value of a known variable; None: it is the one that the variable has."""
        if id(variable) not in self._known:
            self._unknown[id(variable)] = variable
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.paths.append(update[0].path)
        super().add_update(update)

    def check_known(self) -> None:
        if self._unknown:
            raise _UnknownVariablesError(list(self._unknown.values()))

    def refuse_assignments(self) -> None:
        if self.paths:
            raise ModelError(
                f"strategy.run: fn assigned to {', '.join(dict.fromkeys(self.paths))}. A replica's function is traced, and traced values cannot be "
                "kept in variables, which are unchanged. Fix: pass values to fn and return new ones, with model.stateless_call, "
                "optimizer.stateless_apply and metric.stateless_update_state (docs/custom_loops.md)."
            )


def _local_values(value: PerReplica) -> dict[int, jax.Array]:
    """Return the values of this process's replicas by replica, maybe with others; all values of a copy on the host or a traced function.

    Values of several shapes may be on other devices than those of their replicas. Then all processes call this.
    """
    if any(isinstance(array, (jax.core.Tracer, np.ndarray)) for array in value.groups):
        return dict(enumerate(value.values))
    is_partial = len(value.groups) > 1 or any(map(is_cut, value.groups))
    if is_partial and any(is_spread(array) for array in value.groups):
        return dict(enumerate(local_values(value).values))
    return value.held


def _checked_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``run`` as a tuple and a dict.

    Raises:
        OptionError: they are something else, or nested too deeply.
    """
    if not isinstance(args, (tuple, list)):
        raise OptionError(
            f"strategy.run: args: expected a tuple or a list, got {type(args).__name__}. Fix: write args=(value,)."
        )
    named = named_arguments("strategy.run: kwargs", kwargs)
    check_depth("strategy.run: args", args)
    check_depth("strategy.run: kwargs", named)
    return tuple(args), named
