"""Values that differ from replica to replica, and the checks of what ``run`` takes and returns."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import InputError, OptionError, check_depth, shown
from lockstep._keras.variable_placement import stored_value
from lockstep._padded_array import without_padding
from lockstep.data.sources import NON_NUMERIC_KINDS
from lockstep.devices.batch_layout import rows_of_replicas
from lockstep.devices.placement import Placement, count_rows


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["members"])
@dataclass(frozen=True)
class PerReplica:
    """One value for each replica: what ``strategy.run`` returns and distributed data sets yield.

    Counterpart of ``tf.distribute.DistributedValues``. It is a JAX pytree, so ``jax.jit`` takes and returns it. Replicas whose
    values have the same shape are stacked, and the stack is sharded over the devices; there is more than one group only if
    shapes differ, as in the last batch of an epoch.

    Args:
        groups: stacked values, ``(replicas of the group, …)`` each.
        members: for each group the numbers of its replicas, rising.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
        >>> value = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        >>> [int(number) for number in value.values]
        [0, 1]
    """

    groups: tuple[Any, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The replicas' values, in the order of the replicas."""
        found = {r: array[i] for array, own in zip(self.groups, self.members, strict=True) for i, r in enumerate(own)}
        return tuple(found[replica] for replica in sorted(found))

    @property
    def held(self) -> dict[int, jax.Array]:
        """The values on this process's devices, by replica; without communication."""
        found: dict[int, jax.Array] = {}
        for array, own in zip(self.groups, self.members, strict=True):
            # The host has a copy of all values; a mesh may lay a replica's value over several devices.
            if isinstance(array, np.ndarray) or is_cut(array):
                found.update((replica, array[i]) for i, replica in enumerate(own))
                continue
            for shard in array.addressable_shards:
                first = shard.index[0].start or 0
                found.update((own[first + i], value) for i, value in enumerate(shard.data))
        return found

    def of(self, replicas: Sequence[int]) -> jax.Array:
        """Return the values of some replicas, all of one shape, stacked.

        Args:
            replicas: their numbers, in the order of the result.

        Returns:
            An array ``(replicas, …)``.

        Raises:
            KeyError: their values have different shapes.
        """
        for array, own in zip(self.groups, self.members, strict=True):
            if own == tuple(replicas):
                return array
            if set(replicas) <= set(own):
                return array[np.asarray([own.index(replica) for replica in replicas])]
        raise KeyError(f"replicas {list(replicas)} are in none of the groups {self.members}")

    def __repr__(self) -> str:
        # Of a trace there are no values, and a tree of JAX may hold anything in place of arrays.
        if any(isinstance(array, jax.core.Tracer) or not is_array(array) for array in self.groups):
            return f"PerReplica(groups={self.groups}, members={self.members})"
        return "PerReplica(" + ", ".join(f"{r}: {value}" for r, value in sorted(self.held.items())) + ")"


def is_cut(array: jax.Array) -> bool:
    """Return whether devices have parts of a stack that are cut along another axis than that of the replicas."""
    return any(shard.data.shape[1:] != array.shape[1:] for shard in array.addressable_shards)


def is_per_replica(leaf: Any) -> bool:
    """Whether a leaf is a :class:`PerReplica`; for ``is_leaf`` of JAX's tree functions."""
    return isinstance(leaf, PerReplica)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_value(leaf: Any) -> bool:
    """Whether a leaf of arguments can be put on devices."""
    return isinstance(leaf, (PerReplica, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def value_of(leaf: Any) -> Any:
    """Return the array of a Keras variable, which all processes ask for, or any other leaf unchanged."""
    return without_padding(stored_value(leaf)) if isinstance(leaf, keras.Variable) else leaf


def as_numeric_array(leaf: Any, where: str = "") -> np.ndarray:
    """Return a leaf of a batch or an argument as a NumPy array; errors begin with ``where``.

    Raises:
        InputError: it holds texts or other objects, or whole numbers that JAX's dtype cannot hold.
    """
    array = np.asarray(leaf)
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise InputError(
            f"{where}Values of replicas must be numbers, as they are put on devices; got an array of {array.dtype}, {array!r:.60}. Fix: turn texts "
            "into numbers in the data set, with keras.layers.StringLookup or TextVectorization."
        )
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held != array.dtype and array.dtype.kind in "iu" and array.size:
        least, most = np.iinfo(held).min, np.iinfo(held).max
        if array.min() < least or array.max() > most:
            raise InputError(
                f"{where}Values of replicas are {held} numbers, {least} to {most}, unless jax_enable_x64 is set; got {array.min()} to {array.max()}. "
                "Fix: renumber them, with keras.layers.IntegerLookup or np.unique(…, return_inverse=True)."
            )
    return array


def per_replica_of(values: Sequence[Any], placement: Placement) -> PerReplica:
    """Make a PerReplica of one value for each replica: values of equal shape are stacked and sharded over the devices."""
    arrays = [as_numeric_array(value) for value in values]
    members = group_replicas((array.shape, array.dtype) for array in arrays)
    groups = [put_stack(np.stack([arrays[replica] for replica in own]), placement) for own in members.values()]
    return PerReplica(tuple(groups), tuple(members.values()))


def group_replicas(keys: Iterable[Hashable]) -> dict[Any, tuple[int, ...]]:
    """Return the numbers of the replicas that have equal keys, by key; ``keys`` has one for each replica."""
    found: dict[Hashable, list[int]] = {}
    for replica, key in enumerate(keys):
        found.setdefault(key, []).append(replica)
    return {key: tuple(own) for key, own in found.items()}


def per_replica_of_local(values: Sequence[Any], placement: Placement) -> PerReplica:
    """Make a PerReplica of this process's values, of one shape in all processes; the number of devices must divide the replicas."""
    own = np.stack([np.asarray(value) for value in values])
    return PerReplica((placement.put_local(own, placement.replicas),), (tuple(range(placement.replicas)),))


def split_batch(batch: Any, placement: Placement) -> Any:
    """Split a global batch, a tree of arrays ``(rows, …)``, into replicas as ``tf.distribute`` does."""
    arrays = jax.tree.map(np.asarray, batch)
    sizes = rows_of_replicas(count_rows(arrays), placement.replicas)
    starts = np.cumsum((0, *sizes))
    return jax.tree.map(
        lambda leaf: per_replica_of([leaf[a : a + n] for a, n in zip(starts, sizes, strict=False)], placement), arrays
    )


def put_stack(values: np.ndarray, placement: Placement) -> jax.Array:
    """Put ``(replicas, …)`` on the devices: sharded if their number divides the replicas, else replicated."""
    divides = len(values) % len(placement.devices) == 0
    return placement.put(values, placement.row_sharding if divides else placement.replicated)


def bools_as_integers(leaf: Any) -> jax.Array:
    """Return a value as an array to be summed: bools become integers, as in NumPy."""
    array = jnp.asarray(leaf)
    return array.astype("int32") if array.dtype == bool else array


def sum_over_replicas(
    values: Sequence[Any], replicas: int, add: Callable[[list[list[jax.Array]]], list[jax.Array]]
) -> list[jax.Array]:
    """Sum each value over the replicas, in its own dtype.

    Args:
        values: :class:`PerReplica` of equal shapes, or arrays that ``replicas`` replicas share.
        replicas: number of replicas.
        add: sums for each value its stacks, ``(replicas of a group, …)``, over axis 0.

    Raises:
        InputError: the shapes of a value differ.
    """
    stacks = [list(map(jnp.asarray, value.groups)) for value in values if is_per_replica(value)]
    for own in stacks:
        shapes = {tuple(array.shape[1:]) for array in own}
        if len(shapes) > 1:
            raise InputError(
                f"The values of the replicas have different shapes ({', '.join(map(str, sorted(shapes)))}) and cannot be added. "
                "Fix: reduce each over its rows first, or use reduce(…, axis=0)."
            )
    sums = iter(add(stacks) if stacks else [])
    return [next(sums) if is_per_replica(value) else _times(jnp.asarray(value), replicas) for value in values]


def _times(value: jax.Array, replicas: int) -> jax.Array:
    return value if value.dtype == bool else value * jnp.asarray(replicas, value.dtype)


def check_axis(what: str, shape: Sequence[int], axis: int) -> None:
    """Refuse an axis that a value does not have."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise InputError(f"{what}: expected the number of an axis, got {shown(axis)}. Fix: pass an int, such as 0.")
    if not -len(shape) <= axis < len(shape):
        raise InputError(
            f"{what}: axis {shown(axis)} is not one of a value of shape {tuple(shape)}. Fix: count axes from 0, or "
            "backwards from -1; a number has none."
        )


def check_arrays(what: str, tree: Any) -> None:
    """Refuse texts and other objects, and sparse arrays, whose indices cannot be added.

    Raises:
        InputError: the tree holds one, or is nested too deeply.
    """
    check_depth(what, tree)
    for node in jax.tree.leaves(tree, is_leaf=_is_sparse):
        if _is_sparse(node):
            raise InputError(
                f"{what}: a sparse array, {type(node).__name__}, cannot be combined over replicas. Fix: use its todense()."
            )
        value = value_of(node)
        is_text = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NON_NUMERIC_KINDS
        if isinstance(value, int) and not fits_jax(value):
            raise InputError(
                f"{what}: expected numbers that JAX's integers can hold, got {shown(value)}. Fix: pass it as a float."
            )
        if is_text or not is_value(value):
            raise InputError(
                f"{what}: expected arrays and numbers, got {shown(node):.60}, a {type(node).__name__}. Fix: leave it out, or turn it into "
                "numbers."
            )


def fits_jax(number: int) -> bool:
    """Whether JAX's default integers can hold a number."""
    return number.bit_length() < np.iinfo(jax.dtypes.canonicalize_dtype(int)).bits


def check_structures(what: str, trees: Sequence[Any]) -> None:
    """Refuse values of replicas that are not the same tree of arrays.

    Raises:
        InputError: two of them differ.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in trees]
    first, *others = structures
    for number, other in enumerate(others, 1):
        if other != first:
            raise InputError(
                f"{what}: expected the same tree of arrays for each replica, got {first} and, {number} later, {other}. Fix: give each the same "
                "names and lengths."
            )


def _is_sparse(node: Any) -> bool:
    return type(node).__module__.startswith("jax.experimental.sparse")


def check_replicas(what: str, value: PerReplica, replicas: int) -> None:
    """Refuse a :class:`PerReplica` of another strategy.

    Raises:
        InputError: it has more or fewer replicas.
    """
    found = sum(map(len, value.members))
    if found != replicas:
        raise InputError(
            f"strategy.{what}: expected a value of each of {replicas} replicas, got one of {found} replicas. Fix: use the strategy "
            "whose data set or run made it."
        )
    for array, own in zip(value.groups, value.members, strict=True):
        if np.shape(array)[:1] != (len(own),):
            raise InputError(
                f"strategy.{what}: expected the values of {len(own)} replicas along the first axis of a PerReplica's array, got an array of "
                f"shape {np.shape(array)}. Fix: change the values in the function that strategy.run calls; jax.tree.map gives it the "
                "stacks of all replicas' values."
            )


def check_shapes(what: str, shapes: Sequence[Sequence[int]], axis: int) -> None:
    """Refuse to join arrays that differ along another axis."""
    kinds = {(len(shape), *(size for i, size in enumerate(shape) if i != axis % len(shapes[0]))) for shape in shapes}
    if len(kinds) > 1:
        raise InputError(
            f"{what}: replicas' values may differ along axis {axis} only, and have the shapes {', '.join(map(str, map(list, shapes)))}. "
            "Fix: give them one shape, or gather along the axis in which they differ."
        )


def check_hashable(leaf: Any) -> None:
    """Refuse arguments that are neither arrays nor hashable."""
    try:
        hash(leaf)
    except TypeError:
        raise OptionError(
            f"strategy.run: args: a {type(leaf).__name__} is not a tree of arrays and is not hashable, so a compiled step cannot be found "
            "for it. Fix: pass its arrays, or let fn use it as a closure."
        ) from None


def check_result(leaf: Any) -> Any:
    """Return a leaf of a replica's result; of a Keras variable its value.

    Raises:
        OptionError: it is not a number or an array, or it is a :class:`PerReplica`.
    """
    value = value_of(leaf)
    if is_per_replica(value):
        raise OptionError(
            "strategy.run: fn returned a PerReplica, which already has a value for each replica. Fix: pass it to run as an argument, so that "
            "fn gets the replica's value."
        )
    if not is_value(value):
        raise OptionError(
            f"strategy.run: fn returned {value!r:.60}, a {type(value).__name__}; expected arrays, numbers and trees of them. Fix: "
            "keep other objects in the code around run."
        )
    return value


def check_host_argument(leaf: Any) -> Any:
    """Return an argument unchanged if JAX can hold its numbers; Python numbers keep their weak dtype."""
    if isinstance(leaf, (np.ndarray, np.generic, int)):
        as_numeric_array(leaf, "strategy.run: args, kwargs: ")
    return leaf
