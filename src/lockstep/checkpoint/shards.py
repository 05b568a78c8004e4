"""Shards of arrays that no process has as a whole, and how a part of a checkpoint describes them.

If each process writes its shards, the directory of a checkpoint has directories ``part-0``, ``part-1``, … with the files of a checkpoint
each. The arrays of a part are shards, and its metadata has, for each, the name and shape of the whole array and the first place in it.
``ShardedStore`` puts the parts into one checkpoint, and ``StoredArrays`` reads whole arrays.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep._errors import whole_number

PART = "part-"  # and the number of the process


@dataclass(frozen=True, eq=False)
class ArrayShard:
    """The block of a larger array that a device has; ``shape`` is that of the whole array, ``start`` the index of the block's first element."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    value: Any


@dataclass(frozen=True)
class ShardSlice:
    """Where a stored shard belongs: name and shape of the whole array, and the index of the shard's first element in it."""

    array: str
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def __post_init__(self) -> None:
        for number in (*self.shape, *self.start):
            whole_number("a dimension or a start", number, minimum=0)
        if len(self.shape) != len(self.start):
            raise ValueError(f"a shard at {self.start} of array {self.array!r} of {self.shape}")

    def block(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of a shard of this shape in the whole array."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, shape, strict=True))


def pack(shards: Mapping[str, Sequence[ArrayShard]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the metadata of a part that has these shards, by name of the whole array.

    Example:
        >>> arrays, metadata = pack({"kernel": [ArrayShard((4, 2), (2, 0), np.ones((2, 2)))]})
        >>> list(arrays), metadata
        (['kernel from 2, 0'], {'shards': {'kernel from 2, 0': {'array': 'kernel', 'shape': [4, 2], 'start': [2, 0]}}})
    """
    arrays, described = {}, {}
    for array, blocks in shards.items():
        for block in blocks:
            name = f"{array} from {', '.join(map(str, block.start))}"
            arrays[name] = block.value
            described[name] = {"array": array, "shape": list(block.shape), "start": list(block.start)}
    return arrays, {"shards": described}


def shard_slices(metadata: Mapping[str, Any]) -> dict[str, ShardSlice]:
    """Return where the arrays of a part belong; the reverse of :func:`pack`.

    Raises:
        KeyError, TypeError, ValueError: the metadata is not that of a part.
    """
    return {
        name: ShardSlice(each["array"], tuple(each["shape"]), tuple(each["start"]))
        for name, each in metadata["shards"].items()
    }


def check_cover(stored: Iterable[tuple[ShardSlice, tuple[int, ...], str]]) -> None:
    """Check that shards make up whole arrays, given the place, shape and dtype of each.

    Raises:
        ValueError: a shard is missing, twice there, outside of its array, or of another dtype or shape than the others.
    """
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    found: dict[str, list[tuple[tuple[int, ...], int]]] = {}  # by array where each shard begins, and its numbers
    for place, shape, dtype in stored:
        kind = kinds.setdefault(place.array, (place.shape, dtype))
        if kind != (place.shape, dtype):
            raise ValueError(f"array {place.array!r} has shards of {kind} and of {(place.shape, dtype)}")
        if len(shape) != len(place.shape) or any(
            block.stop > length for block, length in zip(place.block(shape), place.shape, strict=True)
        ):
            raise ValueError(
                f"a shard of {shape} at {place.start} is outside of array {place.array!r} of {place.shape}"
            )
        found.setdefault(place.array, []).append((place.start, math.prod(shape)))
    for array, (shape, _) in kinds.items():
        total = sum(numbers for _, numbers in found[array])
        if total != math.prod(shape):
            raise ValueError(f"array {array!r} of {shape} has shards of {total:,} numbers in all")
        for start, count in Counter(start for start, numbers in found[array] if numbers).items():
            if count > 1:
                raise ValueError(f"array {array!r} of {shape} has several shards at {start}, and none elsewhere")


def put_shard(arrays: dict[str, np.ndarray], place: ShardSlice, value: np.ndarray) -> None:
    """Copy a shard into its array, which is made for the first one; the only shard of an array is the array."""
    if value.shape == place.shape:
        arrays[place.array] = value
        return
    if place.array not in arrays:
        arrays[place.array] = np.zeros(place.shape, value.dtype)
    arrays[place.array][place.block(value.shape)] = value
