"""A value that each replica has its own of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import InputError
from lockstep.data.device_placement import Placement
from lockstep.devices.layout import rows_of_replicas

__all__ = [
    "NO_NUMBERS",
    "PerReplica",
    "countable",
    "is_array",
    "is_per_replica",
    "is_value",
    "of_local_replicas",
    "of_replicas",
    "rows_of_batch",
    "stacked",
    "sum_over_replicas",
    "value_of",
    "with_numbers",
]

NO_NUMBERS = "OSUTMm"  # kinds of NumPy arrays that no device holds: objects, texts and times


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["members"])
@dataclass(frozen=True)
class PerReplica:
    """One value for each replica: what ``strategy.run`` returns and distributed data sets yield.

    Counterpart of ``tf.distribute.DistributedValues``. It is a JAX tree, so it may go in and out of ``jax.jit``. Replicas whose
    values have the same shape are stacked, and the stack lies over the devices; there is more than one group only where
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
        """The values that lie on this process's devices, by replica; asks no other process."""
        return {
            own[(shard.index[0].start or 0) + i]: value
            for array, own in zip(self.groups, self.members, strict=True)
            for shard in array.addressable_shards
            for i, value in enumerate(shard.data)
        }

    def of(self, replicas: Sequence[int]) -> jax.Array:
        """The values of some replicas, all of one shape, stacked.

        Args:
            replicas: their numbers, in the order that is wanted.

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
        raise KeyError(f"replicas {list(replicas)} are in no one of the groups {self.members}")

    def __repr__(self) -> str:
        if any(isinstance(array, jax.core.Tracer) for array in self.groups):
            return f"PerReplica(groups={self.groups}, members={self.members})"
        return "PerReplica(" + ", ".join(f"{r}: {value}" for r, value in sorted(self.held.items())) + ")"


def is_per_replica(leaf: Any) -> bool:
    """For ``is_leaf`` of JAX's tree functions."""
    return isinstance(leaf, PerReplica)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of JAX or NumPy."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_value(leaf: Any) -> bool:
    """Whether a leaf of arguments can go to the devices."""
    return isinstance(leaf, (PerReplica, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def value_of(leaf: Any) -> Any:
    """The array of a Keras variable; anything else as it is."""
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def with_numbers(leaf: Any) -> np.ndarray:
    """A leaf of a batch or an argument as an array.

    Raises:
        InputError: it holds texts or other objects, or whole numbers that JAX would cut.
    """
    array = np.asarray(leaf)
    if array.dtype.kind in NO_NUMBERS:
        raise InputError(
            f"Values of replicas hold numbers, as they lie on devices; got an array of {array.dtype}, {array!r:.60}. Fix: turn texts "
            "into numbers in the data set, with keras.layers.StringLookup or TextVectorization."
        )
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held != array.dtype and array.dtype.kind in "iu" and array.size:
        least, most = np.iinfo(held).min, np.iinfo(held).max
        if array.min() < least or array.max() > most:
            raise InputError(
                f"Values of replicas hold {held} numbers, {least} to {most}, unless jax_enable_x64 is set; got {array.min()} to {array.max()}. "
                "Fix: number them anew, with keras.layers.IntegerLookup or np.unique(…, return_inverse=True)."
            )
    return array


def of_replicas(values: Sequence[Any], placement: Placement) -> PerReplica:
    """One value for each replica, as they stand: equal shapes are stacked and laid over the devices."""
    arrays = [with_numbers(value) for value in values]
    kinds = list(dict.fromkeys((array.shape, array.dtype) for array in arrays))
    members = [tuple(r for r, array in enumerate(arrays) if (array.shape, array.dtype) == kind) for kind in kinds]
    groups = [stacked(np.stack([arrays[replica] for replica in own]), placement) for own in members]
    return PerReplica(tuple(groups), tuple(members))


def of_local_replicas(values: Sequence[Any], placement: Placement) -> PerReplica:
    """One value for each replica of this process, of one shape in all processes; the devices divide the replicas."""
    own = np.stack([np.asarray(value) for value in values])
    return PerReplica((placement.put_local(own, placement.replicas),), (tuple(range(placement.replicas)),))


def rows_of_batch(batch: Any, rows: int, placement: Placement) -> Any:
    """A global batch, a tree of arrays ``(rows, …)``, cut into replicas as ``tf.distribute`` cuts it."""
    sizes = rows_of_replicas(rows, placement.replicas)
    starts = np.cumsum((0, *sizes))
    return jax.tree.map(
        lambda leaf: of_replicas([leaf[a : a + n] for a, n in zip(starts, sizes, strict=False)], placement),
        jax.tree.map(np.asarray, batch),
    )


def stacked(values: np.ndarray, placement: Placement) -> jax.Array:
    """Put ``(replicas, …)`` on the devices: cut over them if they divide the replicas, else whole on each."""
    divides = len(values) % len(placement.devices) == 0
    return placement.put(values, placement.row_sharding if divides else placement.replicated)


def countable(leaf: Any) -> jax.Array:
    """A value to add up: of true and false the number of those that are true, as in NumPy."""
    array = jnp.asarray(leaf)
    return array.astype("int32") if array.dtype == bool else array


def sum_over_replicas(value: Any, replicas: int, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sum over the replicas, in the value's own dtype.

    Args:
        value: a :class:`PerReplica` of equal shapes, or an array that ``replicas`` replicas share.
        replicas: number of replicas.
        add: adds up a stack ``(replicas of a group, …)``.

    Raises:
        InputError: the shapes differ.
    """
    if not is_per_replica(value):
        whole = jnp.asarray(value)
        return whole if whole.dtype == bool else whole * jnp.asarray(replicas, whole.dtype)
    shapes = {tuple(array.shape[1:]) for array in value.groups}
    if len(shapes) > 1:
        raise InputError(
            f"The values of the replicas have different shapes ({', '.join(map(str, sorted(shapes)))}) and cannot be added. "
            "Reduce each over its rows first, or give reduce(…, axis=0)."
        )
    total, *others = [add(jnp.asarray(array)) for array in value.groups]
    for other in others:
        total = total + other
    return total
