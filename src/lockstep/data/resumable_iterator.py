"""One pass over an input, and its state: position, random state and digest, from which another process resumes."""

import contextlib
import hashlib
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from lockstep._errors import InputError
from lockstep.data.input_bound import WaitMeter
from lockstep.data.prefetch import InlineReader, Prefetcher
from lockstep.data.random_state import (
    capture_random_state,
    restore_random_state,
    with_repetitions,
    without_repetitions,
)
from lockstep.data.sources import InputSource
from lockstep.devices.placement import is_on_cpu

EpochHook = list[Any]  # "begin" or "end" of an epoch, and the random state before the data's hook ran


@dataclass(frozen=True)
class IteratorState:
    """State of one pass over an input, in values of JSON.

    Args:
        batches: number of batches of the pass that steps have taken.
        at_begin: the random state with which the pass began.
        after: the random state after the last of these batches was read.
        digest: digest of that batch; None if it was on devices only.
        order: state of the order of the batches, with which the pass began; see :meth:`InputSource.order_state`.
    """

    batches: int
    at_begin: dict[str, Any]
    after: dict[str, Any]
    digest: str | None
    order: dict[str, Any] | None = None


@dataclass(frozen=True)
class InputState:
    """State of an input of a call of ``fit``.

    Args:
        iterator: state of the current pass; None if a new pass begins next.
        hooks: the hooks of the data at the beginning and end of epochs that have run.
        cache: how the batches were read that a cache keeps; None if it keeps none.
        order: state of the order of the next pass; see :meth:`InputSource.order_state`.
        before: number of hooks that the process had run on these data, and of batches that it had taken of them, before the call; None:
            an earlier version has not noted them.
    """

    iterator: IteratorState | None = None
    hooks: tuple[EpochHook, ...] = ()
    cache: dict[str, Any] | None = None
    order: dict[str, Any] | None = None
    before: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state in values of JSON."""
        states = without_repetitions(state for _, state in self.hooks)
        return {
            "position": asdict(self.iterator) if self.iterator else None,
            "hooks": [[kind, state] for (kind, _), state in zip(self.hooks, states, strict=True)],
            "cache": self.cache,
            "order": self.order,
            "before": list(self.before) if self.before else None,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "InputState":
        """Return the state that :meth:`to_json` has given."""
        position = found.get("position")
        iterator = IteratorState(**position) if position else None
        before = tuple(found["before"]) if found.get("before") else None
        return cls(iterator, tuple(expanded_hooks(found["hooks"])), found.get("cache"), found.get("order"), before)


def expanded_hooks(kept: Sequence[EpochHook]) -> list[EpochHook]:
    """Return hooks as they have run, from those that :meth:`InputState.to_json` has given."""
    return [[kind, state] for (kind, _), state in zip(kept, with_repetitions(state for _, state in kept), strict=True)]


def digest_of_batch(batch: Any) -> str | None:
    """Return a digest of the arrays of a batch; None if they are on devices."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):
            return None
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(repr(array).encode() if array.dtype == object else array.tobytes())
    return found.hexdigest()


def _is_last_batch(state: IteratorState, batch: Any) -> bool:
    """Return whether a batch is the one that was used last, if that is known: not of one that is on devices only."""
    digests = {state.digest, digest_of_batch(batch)}
    return None in digests or len(digests) == 1


def read_on(source: InputSource, state: IteratorState, count: int) -> Iterator[Any]:
    """Advance the input to ``state`` by ``count`` batches; with random access read only the last one, to compare it.

    Returns:
        The batches that follow.

    Raises:
        InputError: the last of them is not the one that was used last, or more batches than these have been read.
    """
    if count < 0:
        raise InputError(
            f"The {source.name} has been read beyond the position of the checkpoint, by {-count} batches, and cannot go back. Fix: make a new one."
        )
    if not count:
        return source.batches()
    batches = source.batches_from(count - 1)
    last = next(batches, None)
    if source.can_seek and not _is_last_batch(state, last):  # It may draw from a global generator for each batch.
        restore_random_state(state.at_begin)
        source.restore_order(state.order)
        batches = itertools.islice(source.batches(), count - 1, None)
        last = next(batches, None)
    if not _is_last_batch(state, last):
        raise InputError(
            f"The {source.name} is not the one that the checkpoint was written with, or gives its batches in another order: batch "
            f"{state.batches} of this pass is not the one that was trained on. Fix: give fit the same data and class_weight, and its shuffling a seed; "
            "or start over with another directory."
        )
    return batches


PlaceBatch = Callable[[Any], Any]


class BatchCheck(Protocol):
    """Checks the batches of one pass before they are placed."""

    def __call__(self, number: int, batch: Any) -> None:
        """Check the batch of that number, on the host; None: the pass has ended."""

    def close(self) -> None:
        """End the pass."""


class BatchGather(Protocol):
    """Gathers values of the processes for the batches of one pass."""

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all processes, which are of JSON."""

    def close(self) -> None:
        """End the pass."""


@dataclass(frozen=True)
class _HostBatch:
    placed: Any
    host: Any  # None if it is not needed again
    after: dict[str, Any] | None = None  # the random state after it was read, if a thread reads ahead


class ResumableIterator:
    """Iterator over the batches of one pass, which may last several epochs if those have a number of steps.

    ``next`` reads the next batch on the host without taking it; :meth:`take` takes a placed one.

    Args:
        source: reads the batches.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead; 0 for none.
        meter: measures the waits.
        check: checks each batch before it is placed.
        start: state of this pass in an earlier process, from which it resumes.
        tracks_state: whether :meth:`get_state` will be called.
        read_before: number of batches of ``start`` that this process has read already, of a source that does not begin again.

    Attributes:
        start: see above.
        at_begin: the random state with which the pass began, if it is known.
        order: state of the order of the batches, with which the pass began, if it is known.
        successor: the pass that gives the batches from now on.
        has_ended: whether a step has found the end.
    """

    def __init__(
        self,
        source: InputSource,
        place: PlaceBatch,
        depth: int,
        meter: WaitMeter,
        check: BatchCheck | None = None,
        start: IteratorState | None = None,
        tracks_state: bool = False,
        read_before: int = 0,
    ) -> None:
        self._read_before = read_before
        self._source, self._place, self._depth, self._meter = source, place, depth, meter
        self._check, self.start, self._tracks_state = check, start, tracks_state
        self._number = start.batches if start else 0
        self.at_begin: dict[str, Any] = {}
        self.order: dict[str, Any] | None = None
        self._last: _HostBatch | None = None
        self._batches: Iterator[Any] | None = None
        self._peeked: deque[Any] = deque()
        self._limit: float | None = None
        self._running: deque[Any] = deque()
        self._closed = False
        self.successor: ResumableIterator | None = None
        self.has_ended = False
        self._reader: Prefetcher | InlineReader = (
            Prefetcher(self._read, self._finish, depth, source.name)
            if depth
            else InlineReader(self._read, self._finish)
        )

    def __iter__(self) -> "ResumableIterator":
        return self

    def __next__(self) -> Any:
        if self.successor:
            return next(self.successor)
        batch = self._next()
        self._peeked.append(batch)
        return batch

    def peek(self) -> Any:
        """Return the next batch, on the host, without taking it; None at the end."""
        if self.successor:
            return self.successor.peek()
        return self._peeked[0] if self._peeked else next(self, None)

    @property
    def position(self) -> int:
        """Number of batches of this pass that steps have taken: the number of the next one."""
        return self._reader.taken + (self.start.batches if self.start else 0)

    def seek(self) -> None:
        """Read up to the start position, before a step requests a batch."""
        self._batches = self._batches or self._begin()

    def get_state(self) -> IteratorState | None:
        """Return the state of the pass; None before its first batch was taken."""
        if self._last is None:
            if self.start is None or self._depth:
                return self.start
            return replace(self.start, after=capture_random_state())
        after = self._last.after or capture_random_state()
        return IteratorState(self.position, self.at_begin, after, digest_of_batch(self._last.host), self.order)

    def set_limit(self, batches: float) -> None:
        """Allow ``batches`` more batches to be read than were taken, from the next :meth:`take` on."""
        self._limit = batches

    def take(self, after: Any) -> Any:
        """Return the next batch, on the devices.

        Args:
            after: result of the last step. No more than the steps of ``depth + 1`` batches run at a time, so that
                memory is bounded if steps are started faster than they run.
        """
        if self.successor:
            return self.successor.take(after)
        if self._limit is not None:
            self._reader.set_limit(self._limit)
            self._limit = None
        self._running.append(after)
        if len(self._running) > max(self._depth, 1):
            jax.block_until_ready(self._running.popleft())
        waiting = self._meter.waiting(after) if self._reader.is_waiting() else contextlib.nullcontext()
        with self._meter.getting(), waiting:
            try:
                batch = self._reader.take()
            except StopIteration:
                self.has_ended = True
                raise
        self._meter.step()
        if self._tracks_state:
            self._last = batch
        return batch.placed

    def close(self, failed: bool = False) -> None:
        """End the reading ahead; give batches that were not taken back to a source that cannot read them again."""
        if self._closed:
            return
        self._closed = True
        if self._reader.is_reading_here():  # The garbage collector runs in any thread; here it has freed the owner.
            threading.Thread(target=self._end, args=(False,), name="lockstep-prefetch-end", daemon=True).start()
        else:
            self._end(failed)

    def _end(self, failed: bool) -> None:
        left = [read.host for read in self._reader.close(failed)]
        if self._check:
            self._check.close()
        self._last = None
        if not self._source.restarts:
            self._source.give_back([*left, *self._peeked])

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        return next(self._batches)

    def _begin(self) -> Iterator[Any]:
        start = self.start
        if start is None:
            if self._tracks_state:
                self.at_begin = self.at_begin or capture_random_state()
                self.order = self._source.order_state()
            return self._source.batches()
        self.at_begin, self.order = start.at_begin, start.order
        if self._source.restarts:
            restore_random_state(start.at_begin)
            self._source.restore_order(start.order)
        batches = read_on(self._source, start, start.batches - self._read_before)
        restore_random_state(start.after)
        return batches

    def _read(self) -> _HostBatch:
        begun = time.monotonic()
        try:
            host = self._peeked.popleft() if self._peeked else self._next()
        except StopIteration:
            if self._check:
                self._check(self._number, None)
            raise
        self._meter.read += time.monotonic() - begun
        if self._check:
            self._check(self._number, host)
        self._number += 1
        placed = self._place(host)
        # An accelerator copies between steps: a wait would last until those before it have ended.
        if self._depth and is_on_cpu(placed):
            jax.block_until_ready(placed)
        is_ahead = self._tracks_state and self._depth > 0
        kept = host if self._tracks_state or not self._source.restarts else None
        return _HostBatch(placed, kept, capture_random_state() if is_ahead else None)

    def _finish(self) -> None:
        if inspect.isgenerator(self._batches):
            self._batches.close()
