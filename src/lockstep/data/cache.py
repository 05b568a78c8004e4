"""Caches: the batches that ``fit`` has read in its first epoch are kept in memory, in a file, or on the devices."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep._atomic_files import open_own, open_to_read
from lockstep._errors import InputError, OptionError
from lockstep.data.indexed_batches import run_epoch_hook
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.data.resumable_iterator import EpochHook, digest_of_batch
from lockstep.data.sources import InputSource, WrappedSource
from lockstep.devices.placement import Placement


class FileBatchStore:
    """Keeps batches in order, as a list does, in a file that exists as long as there are any.

    Raises:
        OptionError: it exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()  # The data's code may change the working directory.
        self._dtypes: list[Any] = []  # of each batch the tree of its dtypes, which NumPy's files do not all know
        if self._path.exists():
            raise OptionError(
                f"InputOptions: cache: {self._path} exists, and the cache would overwrite it. Fix: give another path; if an earlier "
                "run was killed and left it, remove it."
            )

    def append(self, batch: Any, /) -> None:
        """Keep one more batch."""
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
        """Drop all batches."""
        if self._dtypes:
            self._dtypes.clear()
            self._path.unlink(missing_ok=True)


class CachedSource(WrappedSource):
    """A source whose first whole pass reads ``source``; later passes read the kept batches.

    Args:
        source: an input that ends.
        store: keeps its batches; in a list, arrays on devices stay there.
        change: returns what is kept of a batch; the first pass yields the batch itself.
    """

    def __init__(
        self, source: InputSource, store: list[Any] | FileBatchStore, change: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        super().__init__(source)
        self._store, self._change = store, change
        self._lock = threading.Lock()
        # Stands for the pass whose batches are kept; a thread may still be in an earlier one.
        self._reading: object = None
        self._kept: int | None = None
        self._is_tracked = False
        self._hooks: list[EpochHook] = []  # that have run before what is kept was read
        self._random: dict[str, Any] | None = None  # the random state with which reading began
        self._order: dict[str, Any] | None = None  # the state of the order with which reading began
        self._state: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None  # state of another process

    @property
    def has_hooks(self) -> bool:  # type: ignore[override]  # What is kept is the first pass.
        return self._kept is None and self._source.has_hooks

    @property
    def restarts(self) -> bool:  # type: ignore[override]  # It restarts once all batches are kept.
        return self._kept is not None or self._source.restarts

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches if self._kept is None else self._kept

    def batches(self) -> Iterator[Any]:
        self._fill_as_before()
        yield from self._read() if self._kept is None else self._store

    def _read(self) -> Iterator[Any]:
        """Read the first pass, and keep it."""
        reading, number, digest = self._clear(), 0, hashlib.sha256()
        # A source that does not restart has read its first batch before, for its shapes.
        if self._random is None or self._source.restarts:
            self._random, self._order = capture_random_state(), self._source.order_state()
        for batch in self._source.batches():
            if self._is_tracked:
                digest.update(str(digest_of_batch(batch)).encode())
            if not self._keep(reading, self._change(batch)):
                return
            number += 1
            # An epoch that has taken the last batch may end without a look for another one.
            if number == self._source.num_batches:
                self._has_read(reading, number, digest.hexdigest())
            yield batch
        self._has_read(reading, number, digest.hexdigest())

    def _clear(self) -> object:
        """Drop all batches, and those that an earlier pass may still read; return what stands for the pass that begins."""
        with self._lock:
            self._reading = object()
            self._store.clear()  # An earlier pass may have been interrupted.
            return self._reading

    def _keep(self, reading: object, batch: Any) -> bool:
        """Keep a batch; return False if its pass was given up while the batch was made."""
        with self._lock:
            if self._reading is reading:
                self._store.append(batch)
            return self._reading is reading

    def _has_read(self, reading: object, number: int, digest: str) -> None:
        state = {"hooks": self._hooks, "random": self._random, "digest": digest, "order": self._order}
        with self._lock:
            if self._reading is reading:
                self._kept, self._state = number, state

    def _fill_as_before(self) -> None:
        """Read the first pass as another process has read it, unless that is done: hooks that follow may change the data."""
        if self._kept is None and self._earlier is not None:
            self._read_as_before(self._earlier)

    def _read_as_before(self, earlier: dict[str, Any]) -> None:
        """Read the first pass as another process has read it; the random state is left as it is."""
        present, self._earlier = capture_random_state(), None
        for hook in earlier["hooks"]:
            run_epoch_hook(self, hook)
        restore_random_state(earlier["random"])
        self._source.restore_order(earlier.get("order"))
        for _ in self._read():
            pass
        restore_random_state(present)
        if (self.cache_state() or {}).get("digest") != earlier["digest"]:
            raise InputError(
                f"The {self.name} is not the one that the checkpoint was written with, or gives its batches in another order: those of its "
                "first pass, which the cache keeps, have changed. Fix: give it the same data, and its shuffling a seed; or start over with "
                "another directory."
            )

    def order_state(self) -> dict[str, Any] | None:
        """See :class:`InputSource`; what is kept has one order."""
        return super().order_state() if self.cache_state() is None else None

    def give_back(self, batches: list[Any]) -> None:
        if self._kept is None:
            self._source.give_back(batches)

    def begin_epoch(self) -> None:
        self._fill_as_before()
        self._record_hook("begin")
        super().begin_epoch()

    def end_epoch(self) -> None:
        self._fill_as_before()
        self._record_hook("end")
        super().end_epoch()

    def _record_hook(self, kind: str) -> None:
        if self._is_tracked and self.has_hooks:
            self._hooks.append([kind, capture_random_state()])

    def track_cache(self, earlier: dict[str, Any] | None) -> None:
        self._is_tracked, self._earlier = True, earlier

    def cache_state(self) -> dict[str, Any] | None:
        return self._state or self._earlier

    def close(self) -> None:
        self._clear()


class DeviceSource(InputSource):
    """Arrays ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)``, or x alone, that are on every device as a whole; only the row numbers of a batch,
    which ``numbers`` gives, are sent.

    Raises:
        OptionError: they do not fit into the memory of a device.
    """

    can_seek = True  # To skip the numbers of rows costs almost nothing.

    def __init__(self, numbers: InputSource, data: Any, placement: Placement) -> None:
        super().__init__(numbers.name)
        self._numbers, self._placement = numbers, placement
        _refuse_too_large(sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(data)), placement)
        self._data = placement.put(jax.tree.map(np.asarray, data))

    @property
    def num_batches(self) -> int | None:
        return self._numbers.num_batches

    def batches(self) -> Iterator[Any]:
        return self.batches_from(0)

    def batches_from(self, number: int) -> Iterator[Any]:
        for numbers in self._numbers.batches_from(number):
            yield self._placement.select(self._data, np.asarray(numbers))


def _refuse_too_large(size: int, placement: Placement) -> None:
    for device in (placement.devices[index] for index in placement.local_indices):
        memory = device.memory_stats() or {}  # None on CPU devices.
        free = memory.get("bytes_limit", size) - memory.get("bytes_in_use", 0)
        if memory and size > free:
            raise OptionError(
                f'InputOptions: cache="device": the data set has {size:,} bytes, and {device} has {free:,} bytes free. Fix: use '
                "cache=None; batches then go to the devices as they are needed."
            )
