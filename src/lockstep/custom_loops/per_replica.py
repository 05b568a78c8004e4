"""``PerReplica``: one value for each replica, and the functions that make and sum such values."""

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
from lockstep.devices.batch_split import rows_of_replicas

__all__ = [
    "NON_NUMERIC_KINDS",
    "PerReplica",
    "as_numeric_array",
    "bools_as_integers",
    "is_array",
    "is_per_replica",
    "is_value",
    "per_replica_of",
    "per_replica_of_local",
    "put_stack",
    "split_batch",
    "sum_over_replicas",
    "value_of",
]

NON_NUMERIC_KINDS = "OSUTMm"  # kinds of NumPy arrays that no device holds: objects, texts and times


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
        return {
            own[(shard.index[0].start or 0) + i]: value
            for array, own in zip(self.groups, self.members, strict=True)
            for shard in array.addressable_shards
            for i, value in enumerate(shard.data)
        }

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
        if any(isinstance(array, jax.core.Tracer) for array in self.groups):
            return f"PerReplica(groups={self.groups}, members={self.members})"
        return "PerReplica(" + ", ".join(f"{r}: {value}" for r, value in sorted(self.held.items())) + ")"


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
    """Return the array of a Keras variable, or any other leaf unchanged."""
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def as_numeric_array(leaf: Any) -> np.ndarray:
    """Return a leaf of a batch or an argument as a NumPy array.

    Raises:
        InputError: it holds texts or other objects, or whole numbers that JAX's dtype cannot hold.
    """
    array = np.asarray(leaf)
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise InputError(
            f"Values of replicas must be numbers, as they are put on devices; got an array of {array.dtype}, {array!r:.60}. Fix: turn texts "
            "into numbers in the data set, with keras.layers.StringLookup or TextVectorization."
        )
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held != array.dtype and array.dtype.kind in "iu" and array.size:
        least, most = np.iinfo(held).min, np.iinfo(held).max
        if array.min() < least or array.max() > most:
            raise InputError(
                f"Values of replicas are {held} numbers, {least} to {most}, unless jax_enable_x64 is set; got {array.min()} to {array.max()}. "
                "Fix: renumber them, with keras.layers.IntegerLookup or np.unique(…, return_inverse=True)."
            )
    return array


def per_replica_of(values: Sequence[Any], placement: Placement) -> PerReplica:
    """Make a PerReplica of one value for each replica: values of equal shape are stacked and sharded over the devices."""
    arrays = [as_numeric_array(value) for value in values]
    kinds = list(dict.fromkeys((array.shape, array.dtype) for array in arrays))
    members = [tuple(r for r, array in enumerate(arrays) if (array.shape, array.dtype) == kind) for kind in kinds]
    groups = [put_stack(np.stack([arrays[replica] for replica in own]), placement) for own in members]
    return PerReplica(tuple(groups), tuple(members))


def per_replica_of_local(values: Sequence[Any], placement: Placement) -> PerReplica:
    """Make a PerReplica of this process's values, of one shape in all processes; the number of devices must divide the replicas."""
    own = np.stack([np.asarray(value) for value in values])
    return PerReplica((placement.put_local(own, placement.replicas),), (tuple(range(placement.replicas)),))


def split_batch(batch: Any, rows: int, placement: Placement) -> Any:
    """Split a global batch, a tree of arrays ``(rows, …)``, into replicas as ``tf.distribute`` does."""
    sizes = rows_of_replicas(rows, placement.replicas)
    starts = np.cumsum((0, *sizes))
    return jax.tree.map(
        lambda leaf: per_replica_of([leaf[a : a + n] for a, n in zip(starts, sizes, strict=False)], placement),
        jax.tree.map(np.asarray, batch),
    )


def put_stack(values: np.ndarray, placement: Placement) -> jax.Array:
    """Put ``(replicas, …)`` on the devices: sharded if their number divides the replicas, else replicated."""
    divides = len(values) % len(placement.devices) == 0
    return placement.put(values, placement.row_sharding if divides else placement.replicated)


def bools_as_integers(leaf: Any) -> jax.Array:
    """Return a value as an array to be summed: bools become integers, as in NumPy."""
    array = jnp.asarray(leaf)
    return array.astype("int32") if array.dtype == bool else array


def sum_over_replicas(value: Any, replicas: int, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sum over the replicas, in the value's own dtype.

    Args:
        value: a :class:`PerReplica` of equal shapes, or an array that ``replicas`` replicas share.
        replicas: number of replicas.
        add: sums a stack ``(replicas of a group, …)`` over axis 0.

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
            "Fix: reduce each over its rows first, or use reduce(…, axis=0)."
        )
    total, *others = [add(jnp.asarray(array)) for array in value.groups]
    for other in others:
        total = total + other
    return total
