"""Programs for the devices, which all-reduce gradients: one ``shard_map`` over all, or one compiled program that each device runs alone.

XLA compiles a program over several devices with other passes than a program of one device, and the results may differ in bits. So
everything that rounds is compiled here for a single device, once for each of them, and the devices run it side by side.

Everything after the forward pass (loss, metrics, optimizer) is Keras's own code on the global batch. In the backward pass the
strategy's cross-device operation adds up the gradients of the devices: see :func:`_device_copies`.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lockstep.collectives import CrossDeviceOps
from lockstep.collectives.xla_all_reduce import platform_sum_bucketed
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import DEVICE_AXIS, REPLICATE_BELOW, Placement, drop_padding
from lockstep.devices.xla_flags import compiler_options
from lockstep.execution.compiled_step import StateValues
from lockstep.execution.jaxpr_utils import is_inexact
from lockstep.execution.replica import ReplicaCall, ReplicaResult, StateMerge, join_halves, run_replicas
from lockstep.execution.variable_shards import (
    Axes,
    gathered,
    scattered_sum,
    shard_axes,
    shard_spec,
    sharded_values,
    without_shard_padding,
)


class PerDevice(tuple[Any, ...]):
    """One value for each device: arrays in the order of the devices.

    None for a device without a value, and for a device of another process.
    """

    __slots__ = ()

    @property
    def own(self) -> jax.Array:
        """The first value of this process."""
        value: jax.Array = next(value for value in self if value is not None)
        return value


class PerDeviceProgram:
    """A function that is compiled for one device and run on several.

    Args:
        function: ``(*values) -> list of arrays``; the values are trees of arrays.
        placement: the devices; a process runs it on its own ones.
        donated: positions of the values whose memory the results may reuse.
    """

    def __init__(self, function: Callable[..., list[Any]], placement: Placement, donated: Sequence[int] = ()) -> None:
        self._placement = placement
        # JAX runs a program where its values are. It must keep one where no result depends on any.
        self._program = jax.jit(
            function,
            donate_argnums=tuple(donated),
            keep_unused=True,
            compiler_options=compiler_options(placement.platform),
        )
        self._compiled: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, *values: Any, places: Sequence[int] | None = None) -> list[PerDevice]:
        """Run on the devices at ``places``.

        Args:
            values: the function's, with a :class:`PerDevice` for each array.
            places: numbers of the devices, by default all. A process that has none of them runs it on its first device: that result
                is not read, but gives the shapes of the results.

        Returns:
            For each result a :class:`PerDevice`, None for all other devices.
        """
        own = self._placement.local_indices
        places = [place for place in own if places is None or place in places] or own[:1]
        leaves, structure = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, PerDevice))
        calls = [jax.tree.unflatten(structure, [leaf[place] for leaf in leaves]) for place in places]
        with self._lock:
            is_compiled = self._compiled.issuperset(places)
            self._compiled.update(places)
        if not is_compiled:
            # XLA compiles for several devices at the same time. JAX's settings, such as x64, are those of this thread.
            lowered = [self._program.lower(*call) for call in calls]
            with ThreadPoolExecutor(len(calls)) as pool:
                list(pool.map(jax.stages.Lowered.compile, lowered))
        found = [self._program(*call) for call in calls]
        by_place = dict(zip(places, found, strict=True))
        absent = [None] * len(found[0])
        columns = [by_place.get(place, absent) for place in range(self._placement.mesh.size)]
        return [PerDevice(values) for values in zip(*columns, strict=True)]


def to_per_device(value: Any, placement: Placement) -> PerDevice:
    """Return each device's shard or copy of an array; numbers are copied to each device."""
    if isinstance(value, PerDevice):
        return value
    if not isinstance(value, jax.Array):
        value = placement.put(value)
    if placement.mesh.size == 1:
        is_own = isinstance(value.sharding, SingleDeviceSharding)  # else the same memory, as an array of one device
        return PerDevice((value if is_own else value.addressable_data(0),))
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    return PerDevice(shards.get(device) for device in placement.devices)


def replicated_arrays(tree: Any, sharding: NamedSharding) -> Any:
    """Return a tree with one array in place of the copies of each value. With one device it is that device's own."""

    def whole(value: Any) -> Any:
        if not isinstance(value, PerDevice):
            return value
        if len(value) == 1:
            return value.own
        copies = [copy for copy in value if copy is not None]
        return jax.make_array_from_single_device_arrays(value.own.shape, sharding, copies)

    return jax.tree.map(whole, tree, is_leaf=lambda leaf: isinstance(leaf, PerDevice))


@jax.tree_util.register_pytree_node_class
class ReplicatedValues(StateValues):
    """One part of a state of which each device has a copy. An array is made of the copies of a value when it is read, as this takes time."""

    __slots__ = ("_arrays", "_sharding", "copies")

    def __init__(self, copies: Sequence[Any], sharding: NamedSharding) -> None:
        self.copies, self._sharding = copies, sharding
        self._arrays: tuple[jax.Array, ...] | None = None

    @property
    def _values(self) -> tuple[Any, ...]:
        if self._arrays is None:
            self._arrays = tuple(replicated_arrays(self.copies, self._sharding))
        return self._arrays

    @classmethod
    def tree_unflatten(cls, _: None, values: Iterable[Any]) -> StateValues:
        """Unflatten for JAX."""
        return StateValues(values)


def is_donated(state: Any) -> bool:
    """Return whether an array of a state was donated to a step, as far as it holds arrays; a state as Keras or a step gives it."""
    stored = (part.copies if isinstance(part, ReplicatedValues) else part for part in state)
    copies = (value if isinstance(value, PerDevice) else jax.tree.leaves(value) for part in stored for value in part)
    return any(array.is_deleted() for values in copies for array in values if isinstance(array, jax.Array))


def sharded_array(value: PerDevice, placement: Placement) -> jax.Array:
    """Return one array whose shards along the first axis are the devices' values; a device without one gets zeros, which are not read."""
    if len(value) == 1 and value[0] is not None:
        return value[0]
    shape, dtype = value.own.shape, value.own.dtype
    shards = [
        jax.device_put(np.zeros(shape, dtype), placement.devices[place]) if value[place] is None else value[place]
        for place in placement.local_indices
    ]
    whole = (shape[0] * len(placement.devices), *shape[1:])
    return jax.make_array_from_single_device_arrays(whole, placement.row_sharding, shards)


# XLA for CPUs runs several calls faster than one under vmap, but compiles each. Up to this many calls of a device, with this many
# operations in total, are separate calls.
UNROLLED, UNROLLED_OPERATIONS = 4, 600


@dataclass(frozen=True)
class SpmdForward:
    """One forward pass to distribute: the call, its values, and the layout of its rows.

    Attributes:
        model: the model that it calls.
        call: forward pass of one replica.
        merges: for each non-trainable variable how its values are merged.
        trainable: values of the trainable variables.
        non_trainable: values of the non-trainable variables.
        shared: other arguments, which every replica gets whole.
        layout: rows of replicas and devices.
        calls: for each device the number of rows of each of its calls: those of a replica, or of several.
        operations: number of operations of one call.
        allows_padding: whether rows after those of a call change none of its results.
        axes: for each trainable and each non-trainable variable the axis along which it is sharded, None if it is whole; ``call`` takes
            shards. By default all are whole.
    """

    model: keras.Model
    call: ReplicaCall
    merges: tuple[StateMerge, ...]
    trainable: list[jax.Array]
    non_trainable: list[jax.Array]
    shared: list[jax.Array]
    layout: BatchLayout
    calls: tuple[tuple[int, ...], ...]
    operations: int
    allows_padding: bool
    axes: tuple[Axes, Axes] | None = None

    @property
    def variable_axes(self) -> tuple[Axes, Axes]:
        """``axes``, with None for each variable if all are whole."""
        return self.axes or ((None,) * len(self.trainable), (None,) * len(self.non_trainable))

    def padded_calls(self) -> tuple[tuple[int, ...], np.ndarray] | None:
        """Return calls that every device may make, some of them on padding after its rows; None if devices make their own calls.

        Returns:
            The calls of the fullest device; and how many rows of the batch each of them has, ``(devices, calls)``.
        """
        if not self.allows_padding:
            return None
        fullest = max(self.calls, key=sum)
        starts = np.cumsum((0, *fullest[:-1]))
        used = np.clip(np.asarray(self.layout.device_rows)[:, None] - starts, 0, fullest)
        # If calls are replicas, which draw by their numbers, a replica's rows must begin where its call does.
        if self.calls == self.layout.per_device:
            own = [np.pad(calls, (0, len(fullest) - len(calls))) for calls in self.calls if len(calls) <= len(fullest)]
            if len(own) < len(self.calls) or not np.array_equal(own, used):
                return None
        return fullest, used


def forward_on_devices(
    forward: SpmdForward, inputs: Any, placement: Placement, ops: CrossDeviceOps, sliced: bool = False
) -> ReplicaResult:
    """Run the replicas on the devices of ``placement`` in parallel; called while a step is traced.

    Args:
        forward: what to call.
        inputs: tree of arrays laid over the devices, ``(devices * capacity, …)``.
        placement: mesh and number of replicas.
        ops: adds up the gradients of the devices.
        sliced: each device keeps a slice of a gradient's sum instead of all of it (a reduce-scatter).

    Returns:
        Rows joined, means and state merged over all replicas; the same on every device.
    """
    layout = forward.layout
    if layout.devices == 1:
        own = forward.calls[0]
        return finish_result(forward, run_local(forward, inputs, own, 0, _is_vectorized(forward, own, placement)))

    trainable_axes, other_axes = forward.variable_axes
    cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
    trainable = sharded_values(forward.trainable, trainable_axes, placement)
    non_trainable = sharded_values(forward.non_trainable, other_axes, placement)
    copied = [position for position, axis in enumerate(trainable_axes) if axis is None]
    copies = _device_copies([trainable[position] for position in copied], placement, ops, sliced)
    for position, copy in zip(copied, copies, strict=True):
        trainable[position] = copy
    result = jax.shard_map(
        partial(_run_in_shard_map, forward, placement),
        mesh=placement.mesh,
        in_specs=(
            [cut if axis is None else shard_spec(axis) for axis in trainable_axes],
            [shard_spec(axis) for axis in other_axes],
            whole,
            cut,
        ),
        out_specs=ReplicaResult(rows=cut, means=cut, state=whole),  # type: ignore[arg-type]  # a tree of specs
        check_vma=False,
    )(trainable, non_trainable, forward.shared, inputs)
    rows = [_global_rows(leaf, layout, placement) for leaf in result.rows]
    return finish_result(forward, ReplicaResult(rows, [share.sum(axis=0) for share in result.means], result.state))


def _run_in_shard_map(
    forward: SpmdForward,
    placement: Placement,
    trainable: list[jax.Array],
    non_trainable: list[jax.Array],
    shared: list[jax.Array],
    inputs: Any,
) -> ReplicaResult:
    """Run the replicas of this device with its part of each argument, and add the changes of state of all devices."""
    axes, other_axes = forward.variable_axes
    values = [value[0] if axis is None else value for value, axis in zip(trainable, axes, strict=True)]
    # A sum is one of changes, for which the old value has to be whole, as the new one is.
    is_sum = [merge is StateMerge.SUM for merge in forward.merges]
    whole = tuple(axis if one else None for axis, one in zip(other_axes, is_sum, strict=True))
    if any(axis is not None for axis in whole):
        non_trainable = gathered(non_trainable, whole)
        left = tuple(None if one else axis for axis, one in zip(other_axes, is_sum, strict=True))
        forward = replace(forward, axes=(axes, left))
    own = replace(forward, trainable=values, non_trainable=non_trainable, shared=shared)
    result = _run_replicas_of_device(own, inputs, placement)
    changed, form = jax.tree.flatten(result.state)
    state = jax.tree.unflatten(form, platform_sum_bucketed(changed, DEVICE_AXIS, placement.devices))
    return ReplicaResult(rows=result.rows, means=[share[None] for share in result.means], state=state)


def _device_copies(
    trainable: list[jax.Array], placement: Placement, ops: CrossDeviceOps, sliced: bool
) -> list[jax.Array]:
    """Return a copy of the variables for each device, ``(devices, …)``; no bytes move, as the values are replicated.

    The backward pass needs it: the gradient of a copy is that of one device's replicas, and ``ops`` adds these up.
    """
    count = len(placement.devices)

    @jax.custom_vjp
    def copies(values: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.with_sharding_constraint(jnp.broadcast_to(value, (count, *value.shape)), placement.row_sharding)
            for value in values
        ]

    def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array]]:
        values = [jax.ShapeDtypeStruct(gradient.shape[1:], gradient.dtype) for gradient in gradients]
        axes = shard_axes(values, placement) if sliced else (None,) * len(gradients)
        reduce = jax.shard_map(
            lambda copies: _reduce_gradients([copy[0] for copy in copies], axes, placement, ops),
            mesh=placement.mesh,
            in_specs=PartitionSpec(DEVICE_AXIS),
            out_specs=[shard_spec(axis) for axis in axes],
            check_vma=False,
        )
        return (without_shard_padding(reduce(gradients), values, placement),)

    copies.defvjp(lambda values: (copies(values), None), backward)
    return copies(trainable)


def _reduce_gradients(
    gradients: list[jax.Array], axes: Axes, placement: Placement, ops: CrossDeviceOps
) -> list[jax.Array]:
    """Return the sum of each gradient over the devices, or this device's slice of it along its axis if that is not None."""
    whole = [position for position, axis in enumerate(axes) if axis is None]
    sums = dict(zip(whole, ops.all_reduce([gradients[i] for i in whole], DEVICE_AXIS, placement.devices), strict=True))
    for position, axis in enumerate(axes):
        if axis is not None:
            sums[position] = scattered_sum(gradients[position], axis, len(placement.devices))
    return [sums[position] for position in range(len(gradients))]


def _run_replicas_of_device(forward: SpmdForward, inputs: Any, placement: Placement) -> ReplicaResult:
    """Run this device's replicas. If devices make different calls, all make the same on padding, or the program has a branch for each."""
    layout = forward.layout
    shares = sorted({share for share in forward.calls if sum(share)}, reverse=True)
    place = {share: position for position, share in enumerate(shares)}
    padded, used = forward.padded_calls() or (None, ())
    tables = layout.first_replica, [place.get(share, len(shares)) for share in forward.calls], used
    device = lax.axis_index(DEVICE_AXIS)
    # The barrier works around a bug: XLA for CPUs confuses the functions of a fusion with two such table lookups (jaxlib 0.10.2).
    first_replica, choice, *own_used = lax.optimization_barrier(
        [jnp.asarray(table)[device] for table in tables if len(table)]
    )
    branches: list[Callable[..., ReplicaResult]] = [
        partial(_run_padded, forward, share, _is_vectorized(forward, share, placement)) for share in shares
    ]
    operands = forward.trainable, forward.non_trainable, forward.shared, inputs, first_replica
    if len(set(forward.calls)) == 1:
        return branches[0](*operands)
    if padded:
        vectorize = _is_vectorized(forward, padded, placement)
        return run_local(forward, inputs, padded, first_replica, vectorize, own_used[0])
    if len(shares) < len(set(forward.calls)):  # Some devices have no rows.
        branches.append(partial(_zeros_like_result_of, branches[0]))
    if placement.platform == "cpu":
        return _select(choice, branches, operands)
    if forward.axes:  # A collective inside of a branch would wait for devices that take another one.
        whole = [gathered(values, axes) for values, axes in zip(operands[:2], forward.axes, strict=True)]
        operands = (*whole, *operands[2:])
    return switch_with_common_residuals(choice, branches, operands)


def _zeros_like_result_of(branch: Callable[..., ReplicaResult], *operands: Any) -> ReplicaResult:
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(branch, *operands))


def _select(
    choice: jax.Array, branches: Sequence[Callable[..., ReplicaResult]], operands: tuple[Any, ...]
) -> ReplicaResult:
    """Return the result of one branch, like ``lax.switch``, but run all of them.

    XLA compiles a convolution inside a conditional to a naive loop on CPU, tens of times slower
    (``benchmarks/replicas_on_one_device.py``). Here a device computes each distinct share, two or three times its
    work, and only if the devices do not share a batch evenly.
    """
    chosen = branches[0](*operands)
    for position, branch in enumerate(branches[1:], start=1):
        keep = partial(jnp.where, choice == position)
        chosen = jax.tree.map(keep, branch(*operands), chosen)
    return chosen


def switch_with_common_residuals(
    choice: jax.Array, branches: Sequence[Callable[..., Any]], operands: tuple[Any, ...]
) -> Any:
    """Return ``lax.switch(choice, branches, *operands)``; for its backward pass one set of residuals is kept, not one for each branch.

    ``lax.switch`` keeps the residuals of every branch, zeros for those that did not run. Here branches that differ in the number of
    rows only share their residuals: each has the shape that the largest branch needs. Branches whose residuals do not correspond,
    because they are different operations, are left to ``lax.switch``.
    """
    leaves, form = jax.tree.flatten(operands)
    is_real = [is_inexact(leaf) for leaf in leaves]
    real, other = _divided(leaves, is_real)
    calls = [partial(_differentiable, branch, form, is_real) for branch in branches]
    pullbacks = [_trace_pullback(call, real, other) for call in calls]
    slots = _common_shapes([pullback.shapes for pullback in pullbacks if pullback.shapes])
    if slots is None:
        return lax.switch(choice, branches, *operands)
    # A residual that is the same operand in all branches, such as a weight, is not kept once more.
    places = zip(*(pullback.operands for pullback in pullbacks if pullback.shapes), strict=True)
    shared = [operand[0] if len(set(operand)) == 1 else None for operand in places]

    @jax.custom_vjp
    def run(real: list[Any], other: list[Any], choice: jax.Array) -> Any:
        return lax.switch(choice, calls, real, other)

    def forward(real: list[Any], other: list[Any], choice: jax.Array) -> Any:
        result, kept = lax.switch(choice, [partial(_run_keeping, call, slots, shared) for call in calls], real, other)
        return result, (kept, real, other, choice)

    def backward(saved: Any, cotangents: Any) -> Any:
        kept, real, other, choice = saved
        pulls = [partial(_pull_back, pullback, shared) for pullback in pullbacks]
        return lax.switch(choice, pulls, kept, (*real, *other), cotangents[0]), None, None

    run.defvjp(forward, backward)
    first, second = run(real, other, choice)
    return _joined(first, second, jax.eval_shape(branches[0], *operands))


@dataclass(frozen=True)
class _Pullback:
    """The backward pass of a branch.

    Attributes:
        structure: tree of JAX's pullback, whose leaves are the residuals.
        shapes: shapes of the residuals.
        operands: for each residual the number of the operand that it is, or None.
    """

    structure: Any
    shapes: list[jax.ShapeDtypeStruct]
    operands: list[int | None]


def _trace_pullback(call: Callable[..., Any], real: list[Any], other: list[Any]) -> _Pullback:
    learned: dict[str, Any] = {}

    def residuals(real: list[Any], other: list[Any]) -> list[jax.Array]:
        _, pullback, _ = jax.vjp(lambda real: call(real, other), real, has_aux=True)
        leaves, learned["structure"] = jax.tree.flatten(pullback)
        numbers = {id(leaf): number for number, leaf in enumerate((*real, *other))}
        learned["operands"] = [numbers.get(id(leaf)) for leaf in leaves]
        return leaves

    shapes = jax.eval_shape(residuals, real, other)
    return _Pullback(learned["structure"], shapes, learned["operands"])


def _run_keeping(
    call: Callable[..., Any], slots: list[Any], shared: list[int | None], real: list[Any], other: list[Any]
) -> Any:
    """Return the result of a branch, and its residuals with the shapes of ``slots``, without those that are ``shared`` operands."""
    result, pullback, constant = jax.vjp(lambda real: call(real, other), real, has_aux=True)
    residuals = jax.tree.leaves(pullback) or [jnp.zeros(slot.shape, slot.dtype) for slot in slots]
    kept = zip(residuals, slots, shared, strict=True)
    return (result, constant), [_padded_to(leaf, slot.shape) for leaf, slot, operand in kept if operand is None]


def _pull_back(
    pullback: _Pullback, shared: list[int | None], kept: list[Any], operands: Sequence[Any], cotangents: Any
) -> Any:
    slot = iter(kept)
    residuals = [next(slot) if operand is None else operands[operand] for operand in shared]
    own = [_cut_to(leaf, one.shape) for leaf, one in zip(residuals, pullback.shapes, strict=False)]
    return jax.tree.unflatten(pullback.structure, own)(cotangents)[0]


def _differentiable(
    branch: Callable[..., Any], form: Any, is_real: Sequence[bool], real: list[Any], other: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Call a branch on the leaves of its operands; return the real leaves of its result, then the others."""
    reals, others = iter(real), iter(other)
    leaves = [next(reals if one else others) for one in is_real]
    result = jax.tree.leaves(branch(*jax.tree.unflatten(form, leaves)))
    return _divided(result, [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in result])


def _divided(leaves: Sequence[Any], is_first: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(leaves, is_first, strict=True))
    return [leaf for leaf, first in pairs if first], [leaf for leaf, first in pairs if not first]


def _joined(real: list[Any], other: list[Any], types: Any) -> Any:
    """Return the tree whose leaves :func:`_differentiable` has divided."""
    reals, others = iter(real), iter(other)
    return jax.tree.map(lambda of: next(reals if jnp.issubdtype(of.dtype, jnp.inexact) else others), types)


def _common_shapes(branches: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> list[jax.ShapeDtypeStruct] | None:
    """Return for each residual the smallest shape that holds that of every branch; None if they do not correspond."""
    kinds = {tuple((one.dtype, one.ndim) for one in own) for own in branches}
    if len(kinds) > 1 or any(jnp.issubdtype(dtype, jax.dtypes.extended) for own in kinds for dtype, _ in own):
        return None
    return [
        jax.ShapeDtypeStruct(tuple(map(max, *(one.shape for one in slot))), slot[0].dtype) if len(slot) > 1 else slot[0]
        for slot in zip(*branches, strict=True)
    ]


def _padded_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    amounts = [(0, whole - own, 0) for own, whole in zip(array.shape, shape, strict=True)]
    return lax.pad(array, jnp.zeros((), array.dtype), amounts)


def _cut_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array[tuple(map(slice, shape))]


def _is_vectorized(forward: SpmdForward, rows: tuple[int, ...], placement: Placement) -> bool:
    """Return whether calls of a device with equal numbers of rows run as one under vmap."""
    is_unrolled = len(rows) <= UNROLLED and len(rows) * forward.operations <= UNROLLED_OPERATIONS
    return placement.platform != "cpu" or not is_unrolled


def _run_padded(
    forward: SpmdForward,
    share: tuple[int, ...],
    vectorize: bool,
    trainable: list[jax.Array],
    non_trainable: list[jax.Array],
    shared: list[jax.Array],
    inputs: Any,
    first_replica: jax.Array,
) -> ReplicaResult:
    """Run one share of the rows and pad its results to the capacity of a device."""
    own = replace(forward, trainable=trainable, non_trainable=non_trainable, shared=shared)
    result = run_local(own, inputs, share, first_replica, vectorize)
    rows = [_padded_to(leaf, (forward.layout.capacity, *leaf.shape[1:])) for leaf in result.rows]
    return ReplicaResult(rows=rows, means=result.means, state=result.state)


def run_local(
    forward: SpmdForward,
    inputs: Any,
    rows: tuple[int, ...],
    first_replica: jax.Array | int,
    vectorize: bool,
    rows_used: jax.Array | None = None,
) -> ReplicaResult:
    """Run the calls of ``forward`` that have these numbers of rows, on the device of ``inputs``; see :func:`run_replicas`."""
    return run_replicas(
        partial(forward.call, shared=forward.shared),
        forward.merges,
        forward.trainable,
        forward.non_trainable,
        inputs,
        rows=rows,
        first_replica=first_replica,
        global_rows=forward.layout.rows,
        vectorize=vectorize,
        rows_used=rows_used,
    )


def _global_rows(leaf: jax.Array, layout: BatchLayout, placement: Placement) -> jax.Array:
    """Return the global batch of an output, for loss and metrics.

    Small ones are gathered on every device, once, if replicas and XLA shard the rows differently. On CPUs always: there each array of an
    all-reduce takes its time, so that adding up loss and metrics is slower than one all-gather.
    """
    stays = layout.is_sharded_like_rows and placement.platform != "cpu"
    if leaf.nbytes <= REPLICATE_BELOW and not stays:
        leaf = lax.with_sharding_constraint(leaf, placement.replicated)
    return drop_padding(leaf, layout)


def finish_result(forward: SpmdForward, result: ReplicaResult) -> ReplicaResult:
    """Complete the state of a result: old values of unchanged variables, old values plus sums of changes, and the old dtypes."""
    state: list[jax.Array | None] = []
    for new, old, merge in zip(result.state, forward.non_trainable, forward.merges, strict=True):
        if new is None:
            state.append(old)
        elif merge is StateMerge.SEED:
            state.append(join_halves(new))
        else:
            state.append(old + new if merge is StateMerge.SUM else new.astype(old.dtype))
    return ReplicaResult(rows=result.rows, means=result.means, state=state)
