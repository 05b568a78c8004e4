"""Placement of batches and variables: which device holds which rows, and along which axis a variable is sharded (``slice_axis``).

Arrays on the host become sharded arrays on the devices, each row on the device of its replica.

Shards are padded to equal lengths. Model inputs are always sharded. Targets and weights are usually small, and the loss is
computed on the whole batch; up to ``REPLICATE_BELOW`` bytes they are replicated, which saves a collective. New variables are laid over
the devices by ``_keras/variable_placement``.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._errors import DeviceError, InputError
from lockstep._padded_array import PaddedArray, padded_shape
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.names import platform_of

DEVICE_AXIS = "device"
REPLICATE_BELOW = 1 << 20  # bytes; larger arrays are sharded
TPU_TILE = (8, 128)  # elements of the last two axes that a TPU stores together
SHARD_FROM = 1 << 12  # numbers; smaller variables stay whole, as a collective for each would take longer than it saves


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["layout"])
@dataclass(frozen=True)
class PlacedRows:
    """Rows of a global batch on the devices: ``array`` is ``(devices * capacity, …)``, sharded on its first axis."""

    array: jax.Array
    layout: BatchLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global batch, ``(rows, …)``."""
        return (self.layout.rows, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    def global_batch(self) -> jax.Array:
        """Return the global batch, ``(rows, …)``, without padding; to be called while a step is traced."""
        return drop_padding(self.array, self.layout)


@dataclass(frozen=True)
class Placement:
    """Placement of the arrays of one strategy: ``replicas`` replicas on the devices of ``mesh``, whose axis is ``DEVICE_AXIS``."""

    mesh: Mesh
    replicas: int

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the order of the mesh."""
        return tuple(self.mesh.devices.flat)

    @property
    def row_shards(self) -> int:
        """Number of shards into which the rows of a batch are cut."""
        return int(self.mesh.shape[DEVICE_AXIS])

    @property
    def platform(self) -> str:
        """Platform of the devices: "cpu", "gpu" or "tpu"."""
        return platform_of(self.devices[0])

    @property
    def local_indices(self) -> tuple[int, ...]:
        """Indices of the devices that belong to this process."""
        return tuple(index for index, device in enumerate(self.devices) if device.process_index == jax.process_index())

    @property
    def first_local_device(self) -> jax.Device:
        """The first device of this process."""
        return self.devices[self.local_indices[0]]

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return len(self.local_indices) == len(self.devices)

    @property
    def local_replicas(self) -> range:
        """Numbers of the replicas that run on the devices of this process."""
        one_row_each = self.layout(self.replicas)
        counts = [len(one_row_each.per_device[index]) for index in self.local_indices]
        first = one_row_each.first_replica[self.local_indices[0]]
        return range(first, first + sum(counts))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding in which every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def row_sharding(self) -> NamedSharding:
        """Sharding in which each device holds an equal part of the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(DEVICE_AXIS))

    def slice_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding in slices along :meth:`slice_axis`, of which the last may be shorter; replicated if there is none."""
        axis = self.slice_axis(shape)
        if axis is None:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, DEVICE_AXIS))

    def slice_axis(self, shape: tuple[int, ...]) -> int | None:
        """Return the axis along which a variable is sharded; None if the variable is small, or every axis is shorter than the number of devices.

        On every platform, axes whose slices are whole tiles of a TPU come first, as it would pad others; then those that are
        divisible by the number of devices; then all others, whose last slices are padded (:func:`pad`). Among these it is the longest;
        the first of several.
        """
        count, tiles = self.row_shards, (*[1] * len(shape), *TPU_TILE)[-len(shape) :] if shape else ()
        if count == 1 or not is_large(shape):
            return None
        fitting = [axis for axis, length in enumerate(shape) if length % count == 0]
        whole = [axis for axis in fitting if shape[axis] % (count * tiles[axis]) == 0]
        long = [axis for axis, length in enumerate(shape) if length >= count]
        return max(whole or fitting or long, key=lambda axis: shape[axis], default=None)

    def has_short_shards(self, shape: tuple[int, ...]) -> bool:
        """Return whether the axis along which a variable is sharded is not divisible by the number of devices."""
        return padded_shape(shape, self.slice_sharding(shape)) != shape

    def on_first_device(self) -> "Placement":
        """Return a placement of the same replicas on the first device of this process."""
        return placement_on([self.devices[place] for place in self.local_indices[:1]], self.replicas)

    def on_one_cpu(self) -> "Placement":
        """Return a placement of the same replicas on a CPU device of this process."""
        if self.platform == "cpu":
            return self.on_first_device()
        try:
            return placement_on(jax.local_devices(backend="cpu")[:1], self.replicas)
        except RuntimeError as error:
            raise DeviceError(
                "JAX_PLATFORMS leaves out the CPU, which is needed here. Fix: add it, as in JAX_PLATFORMS=cuda,cpu."
            ) from error

    @property
    def along_devices(self) -> "Placement":
        """A placement on the same devices whose mesh has one axis."""
        return placement_on(self.devices, self.replicas)

    def put(self, tree: Any, shardings: Any = None) -> Any:
        """Put arrays on the devices. Every process has the whole arrays, and puts its devices' parts there.

        Args:
            tree: arrays or numbers.
            shardings: a sharding for all, or a tree of them; by default every device gets everything.
        """
        shardings = self.replicated if shardings is None else shardings
        if self.is_local:
            return jax.device_put(tree, shardings)
        return jax.tree.map(_put_local_part, tree, jax.tree.broadcast(shardings, tree))

    def put_local(self, array: np.ndarray, length: int) -> jax.Array:
        """Return an array that is sharded over the devices, of which each process has its part.

        Args:
            array: the part of this process, ``(its replicas * k, …)``; all processes have the same k.
            length: length of the whole array along the first axis, ``replicas * k``.
        """
        first = self.local_replicas.start * length // self.replicas

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(length)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((length, *array.shape[1:]), self.row_sharding, part)

    def place_local(self, batch: Any) -> Any:
        """Put a batch on the devices as :meth:`place`, if this process has only the rows of its replicas, equally many for each; the devices
        must divide the replicas.
        """
        rows = count_rows(batch) // len(self.local_replicas) * self.replicas
        layout = self.layout(rows)
        return jax.tree.map(lambda leaf: PlacedRows(self.put_local(np.asarray(leaf), rows), layout), batch)

    def layout(self, rows: int) -> BatchLayout:
        """Return the layout of a global batch of ``rows`` rows."""
        return _layout(rows, self.replicas, self.row_shards)

    def place(self, batch: Any) -> Any:
        """Put a batch, as Keras's iterators yield it, on the devices.

        Args:
            batch: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, or x alone; each a tree of arrays of one length. One
                that was placed already is returned as it is.

        Returns:
            The same tree; what is sharded is wrapped in :class:`PlacedRows`.

        Raises:
            InputError: the arrays have different lengths, or none.
        """
        if _is_placed(batch):
            return batch
        ordered = self._in_device_order(batch)
        return self.put(ordered, self._shardings(ordered))

    def abstract_batch(self, batch: Any) -> Any:
        """Return shapes, dtypes and shardings of what :meth:`place` would put on the devices, without doing it."""
        ordered = self._in_device_order(batch)
        kinds = jax.tree.map(jax.typeof, ordered)
        return jax.tree.map(
            lambda kind, sharding: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding),
            kinds,
            jax.tree.broadcast(self._shardings(ordered), kinds),
        )

    def _shardings(self, ordered: Any) -> Any:
        return jax.tree.map(
            lambda leaf: self.row_sharding if is_rows(leaf) else self.replicated, ordered, is_leaf=is_rows
        )

    def place_for_step(self, batch: Any) -> Any:
        """Place a batch for a compiled step; on a single CPU the program takes the host's arrays directly, which is faster."""
        if len(self.devices) == 1 and self.platform == "cpu" and not _is_placed(batch):
            return self._in_device_order(batch)
        return self.place(batch)

    def select(self, data: Any, numbers: np.ndarray) -> Any:
        """Return a placed batch, the rows ``numbers`` of a data set that is on every device as a whole; each device takes the rows of its
        replicas.
        """
        layout = self.layout(len(numbers))
        wanted = self.put(numbers if layout.is_full else numbers[layout.row_index()], self.row_sharding)

        def rows(tree: Any) -> Any:
            return jax.tree.map(
                lambda leaf: PlacedRows(_take(leaf, wanted, self.mesh, PartitionSpec(DEVICE_AXIS)), layout), tree
            )

        def targets(leaf: jax.Array) -> Any:
            if leaf.nbytes // len(leaf) * layout.rows > REPLICATE_BELOW:
                return rows(leaf)
            return _take(leaf, self.put(numbers), self.mesh, PartitionSpec())

        if not isinstance(data, tuple):
            return rows(data)
        return (rows(data[0]), *(jax.tree.map(targets, tree) for tree in data[1:]))

    def _in_device_order(self, batch: Any) -> Any:
        """Return a batch on the host in the order of the devices; what will be sharded is wrapped in :class:`PlacedRows`."""
        layout = self.layout(count_rows(batch))

        def rows(leaf: Any) -> Any:
            array: Any = _host(leaf)
            return PlacedRows(array if layout.is_full else array[layout.row_index()], layout)

        def targets(leaf: Any) -> Any:
            array = _host(leaf)
            return array if array.nbytes <= REPLICATE_BELOW else rows(array)

        if not isinstance(batch, (tuple, list)):
            return jax.tree.map(rows, batch)
        return (jax.tree.map(rows, batch[0]), *(jax.tree.map(targets, tree) for tree in batch[1:]))


@dataclass(frozen=True)
class MeshPlacement(Placement):
    """Placement of one replica on a mesh with more axes: its rows are sharded over the first, and variables over the others."""

    replicas: int = 1

    @property
    def local_replicas(self) -> range:
        """Numbers of the replicas that run on the devices of this process."""
        return range(1)

    def layout(self, rows: int) -> BatchLayout:
        """Return the layout of the rows over the first axis of the mesh, the same as that of as many replicas."""
        return _layout(rows, self.row_shards, self.row_shards)


# Its parts are computed once for a number of rows, and JAX compares one object with itself in each step.
_layout = cache(BatchLayout)


def is_large(shape: Sequence[int]) -> bool:
    """Return whether a variable of this shape has so many numbers that it pays to shard it."""
    return math.prod(shape) >= SHARD_FROM


def placement_on(devices: Sequence[jax.Device], replicas: int) -> Placement:
    """Return a placement of ``replicas`` replicas on ``devices``."""
    return Placement(Mesh(np.asarray(devices), (DEVICE_AXIS,)), replicas)


def _put_local_part(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf if leaf.sharding == sharding else laid_out(sharding)(leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return laid_out(sharding)(leaf)  # with its weak dtype
    host = np.asarray(leaf, dtype=jax.typeof(leaf).dtype)
    # JAX takes an aligned array as it is: a view would keep the whole value in memory, and a step could not reuse that of the shard.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


@cache
def laid_out(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """Return a program that lays an array, or a number, over devices of several processes, all of which call it."""
    return jax.jit(lambda array: array, out_shardings=sharding)


def combine_parts(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return a function of arrays that runs ``function`` on each device's part of their first axis; its results are the same on all devices."""
    cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=whole, check_vma=False)


def is_spread(array: jax.Array | PaddedArray) -> bool:
    """Return whether the shards of an array are on devices of several processes, none of which has all of it."""
    return not array.is_fully_addressable and not array.is_fully_replicated


def gather_on_host(array: jax.Array | PaddedArray, wanted: bool = True) -> Any:
    """Return an array as NumPy's, or None if it is not wanted; if it is spread over processes, by a ``NamedSharding``, all of them call this."""
    if isinstance(array, PaddedArray):
        whole = gather_on_host(array.array, wanted)
        return np.asarray(PaddedArray(whole, array.shape)) if wanted else None
    if is_spread(array):
        array = laid_out(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)  # type: ignore[attr-defined]
    return np.asarray(array) if wanted else None


def local_values(tree: Any) -> Any:
    """Return a tree with the arrays that are on devices of other processes, too, as NumPy's; if one is spread, all processes call this."""
    return jax.tree.map(lambda leaf: leaf if leaf.is_fully_addressable else gather_on_host(leaf), tree)


@partial(jax.jit, static_argnums=(2, 3))
def _take(array: jax.Array, numbers: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.shard_map(lambda a, n: a[n], mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)(array, numbers)


def count_rows(batch: Any) -> int:
    """Return the length of the first axis, which all arrays of a batch share, on the host or on devices.

    Raises:
        InputError: they have different lengths, or there is a sparse array or none.
    """
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: is_rows(leaf) or isinstance(leaf, JAXSparse))
    if any(isinstance(leaf, JAXSparse) for leaf in leaves):
        raise InputError(
            "A sparse array cannot be split into replicas yet. Fix: make it dense first: .toarray() for SciPy, .todense() for JAX."
        )
    shapes = [np.shape(leaf) for leaf in leaves]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        fix = "leave out batches without rows" if lengths == {0} else "give all arrays the same number of rows"
        raise InputError(
            "A batch cannot be split into replicas: its arrays need one common length of at least 1 along the first "
            f"axis, but their shapes are {_listed(shapes)}. Fix: {fix}."
        )
    return int(lengths.pop())  # type: ignore[arg-type]  # None was refused above


def is_rows(leaf: Any) -> bool:
    """Return whether a leaf is rows on the devices; for ``is_leaf`` of JAX's tree functions."""
    return isinstance(leaf, PlacedRows)


def _is_placed(batch: Any) -> bool:
    return any(map(is_rows, jax.tree.leaves(batch, is_leaf=is_rows)))


def is_on_cpu(tree: Any) -> bool:
    """Return whether the first array of a tree is on CPU devices."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return any(platform_of(next(iter(array.devices()))) == "cpu" for array in itertools.islice(arrays, 1))


def _host(leaf: Any) -> np.ndarray | jax.Array:
    """Return the array as a NumPy array, unless it is on an accelerator already.

    One that is on several comes from the host: a thread that reads ahead must not start programs on them, which could wait for each other.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if not leaf.is_fully_addressable:
        raise InputError(
            "A batch has an array on devices of several processes. Fix: give each process the rows on the host, as NumPy arrays."
        )
    devices = leaf.devices()
    return leaf if len(devices) == 1 and next(iter(devices)).platform != "cpu" else np.asarray(leaf)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "missing (there is no array at all)"


def drop_padding(array: jax.Array, layout: BatchLayout) -> jax.Array:
    """Drop the padding of ``(devices * capacity, …)`` and return ``(rows, …)``."""
    if layout.is_full:
        return array
    if layout.has_trailing_padding:  # XLA moves no row for a slice; it would move all of them for unequal parts.
        return array[: layout.rows]
    first = [device * layout.capacity for device in range(layout.devices)]
    kept = (array[start : start + rows] for start, rows in zip(first, layout.device_rows, strict=True) if rows)
    return jnp.concatenate(list(kept))
