"""Caches: the batches that ``fit`` has read in its first epoch are kept in memory, in a file, or on the devices."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from lockstep._errors import OptionError
from lockstep._files import open_own, open_to_read
from lockstep.data.device_placement import Placement
from lockstep.data.sources import InputSource, WrappedSource


class BatchStore(Protocol):
    """Keeps batches in order; a list does, and arrays on devices stay there."""

    def append(self, batch: Any, /) -> None:
        """Keep one more batch."""

    def __iter__(self) -> Iterator[Any]: ...

    def clear(self) -> None:
        """Drop all batches."""


class FileBatchStore:
    """Batches in a file, which exists as long as batches are kept.

    Args:
        path: of the file, which must not exist yet.

    Raises:
        OptionError: it exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._dtypes: list[Any] = []  # of each batch the tree of its dtypes, which NumPy's files do not all know
        if self._path.exists():
            raise OptionError(
                f"InputOptions: cache: {self._path} exists, and the cache would overwrite it. Give another path; if an earlier "
                "run was killed and left it, remove it."
            )

    def append(self, batch: Any, /) -> None:
        """See :class:`BatchStore`."""
        arrays = jax.tree.map(np.asarray, batch)
        flags = os.O_WRONLY | (os.O_APPEND if self._dtypes else os.O_EXCL)
        with open(open_own(self._path, flags), "ab") as file:
            # Before the arrays: from here on there is a file to remove.
            self._dtypes.append(jax.tree.map(lambda array: array.dtype, arrays))
            for array in jax.tree.leaves(arrays):
                np.lib.format.write_array(file, array, allow_pickle=False)

    def __iter__(self) -> Iterator[Any]:
        with open_to_read(self._path) as file:
            for dtypes in self._dtypes:
                yield jax.tree.map(lambda dtype: np.lib.format.read_array(file, allow_pickle=False).view(dtype), dtypes)

    def clear(self) -> None:
        """See :class:`BatchStore`."""
        if self._dtypes:
            self._dtypes.clear()
            self._path.unlink()


class CachedSource(WrappedSource):
    """A source whose first whole pass reads ``source``; later passes read the kept batches.

    Args:
        source: an input that ends.
        store: keeps its batches.
        change: is applied to each batch before it is kept.
    """

    def __init__(
        self, source: InputSource, store: BatchStore, change: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        super().__init__(source)
        self.has_hooks = False  # What is kept is the first pass.
        self._store, self._change = store, change
        self._kept: int | None = None

    @property
    def restarts(self) -> bool:  # type: ignore[override]  # It restarts once all batches are kept.
        """See :class:`InputSource`."""
        return self._kept is not None or self._source.restarts

    @property
    def num_batches(self) -> int | None:
        """See :class:`InputSource`."""
        return self._source.num_batches if self._kept is None else self._kept

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        if self._kept is not None:
            yield from self._store
            return
        self._store.clear()  # An earlier pass may have been interrupted.
        number = 0
        for batch in self._source.batches():
            changed = self._change(batch)
            self._store.append(changed)
            number += 1
            yield changed
        self._kept = number

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`InputSource`."""
        if self._kept is None:
            self._source.give_back(batches)

    def close(self) -> None:
        """See :class:`InputSource`."""
        self._store.clear()


class DeviceSource(InputSource):
    """Arrays that are on every device as a whole; only the row numbers of a batch are sent.

    Args:
        numbers: gives, batch by batch, the numbers of its rows.
        data: the arrays: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, or x alone.
        placement: the devices.

    Raises:
        OptionError: they do not fit into the memory of a device.
    """

    def __init__(self, numbers: InputSource, data: Any, placement: Placement) -> None:
        super().__init__(numbers.name)
        self._numbers, self._placement = numbers, placement
        _refuse_too_large(sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(data)), placement)
        self._data = placement.put(jax.tree.map(np.asarray, data))

    @property
    def num_batches(self) -> int | None:
        """See :class:`InputSource`."""
        return self._numbers.num_batches

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        for numbers in self._numbers.batches():
            yield self._placement.select(self._data, np.asarray(numbers))


def _refuse_too_large(size: int, placement: Placement) -> None:
    for device in (placement.devices[index] for index in placement.local_indices):
        memory = device.memory_stats() or {}  # None on CPU devices.
        free = memory.get("bytes_limit", size) - memory.get("bytes_in_use", 0)
        if memory and size > free:
            raise OptionError(
                f'InputOptions: cache="device": the data set has {size:,} bytes, and {device} has {free:,} bytes free. Use '
                "cache=None; batches then go to the devices as they are needed."
            )
