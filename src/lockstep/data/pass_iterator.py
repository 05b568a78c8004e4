"""One pass over an input: what is looked at on the host, what waits on the devices, and where the pass stands."""

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from lockstep.data.iterator_state import (
    IteratorState,
    capture_random_state,
    check_same_batch,
    digest_of_batch,
    restore_random_state,
)
from lockstep.data.prefetch import BatchReader, InlineReader, Prefetcher
from lockstep.data.sources import InputSource
from lockstep.data.wait_meter import WaitMeter

__all__ = ["BatchCheck", "BatchGather", "PassIterator", "Place"]

Place = Callable[[Any], Any]


class BatchCheck(Protocol):
    """Looks at the batches of one pass before they are placed."""

    def __call__(self, number: int, batch: Any) -> None:
        """Look at a batch on the host, which is the one of that number; None: the pass has come to its end."""

    def close(self) -> None:
        """The pass is over."""


class BatchGather(Protocol):
    """Brings values together that the processes have for the batches of one pass."""

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, which are of JSON."""

    def close(self) -> None:
        """The pass is over."""


@dataclass(frozen=True)
class _HostBatch:
    placed: Any
    host: Any  # None where nobody will ask for it
    after: dict[str, Any] | None = None  # the random state after it was read, where a thread reads ahead


class PassIterator:
    """Iterator over the batches of one pass, which may last several epochs where those have a number of steps.

    ``next`` looks at the next batch on the host, and what was looked at is not taken yet; :meth:`take` takes a placed one.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead; 0 for none.
        meter: measures the waits.
        check: looks at each batch before it is placed.
        start: where an earlier process stood in this pass.
        is_kept: whether :meth:`get_state` will be asked.
    """

    def __init__(
        self,
        source: InputSource,
        place: Place,
        depth: int,
        meter: WaitMeter,
        check: BatchCheck | None = None,
        start: IteratorState | None = None,
        is_kept: bool = False,
    ) -> None:
        self._source, self._place, self._depth, self._meter = source, place, depth, meter
        self._check, self._start, self._is_kept = check, start, is_kept
        self._number = start.batches if start else 0
        self.at_begin: dict[str, Any] = {}  # the random state
        self._last: _HostBatch | None = None
        self._batches: Iterator[Any] | None = None
        self._looked: deque[Any] = deque()
        self._allowance: float | None = None
        self._running: deque[Any] = deque()
        self._closed = False
        self.successor: PassIterator | None = None  # gives the batches from now on
        self._reader: BatchReader = (
            Prefetcher(self._read, self._finish, depth, source.name)
            if depth
            else InlineReader(self._read, self._finish)
        )

    def __iter__(self) -> "PassIterator":
        return self

    def __next__(self) -> Any:
        if self.successor:
            return next(self.successor)
        batch = self._next()
        self._looked.append(batch)
        return batch

    @property
    def position(self) -> int:
        """Number of batches of this pass that steps have taken: the number of the next one."""
        return self._reader.taken + (self._start.batches if self._start else 0)

    def seek(self) -> None:
        """Go to where the earlier process stood, before a step asks for a batch."""
        self._batches = self._batches or self._begin()

    def get_state(self) -> IteratorState | None:
        """Where the pass stands; None before its first batch was taken."""
        if self._last is None:
            if self._start is None or self._depth:
                return self._start
            return replace(self._start, after=capture_random_state())
        after = self._last.after or capture_random_state()
        return IteratorState(self.position, self.at_begin, after, digest_of_batch(self._last.host))

    def allow(self, batches: float) -> None:
        """Let ``batches`` more batches be read than were taken, from the next :meth:`take` on."""
        self._allowance = batches

    def take(self, after: Any) -> Any:
        """The next batch, on the devices.

        Args:
            after: what the last step gave. No more than the steps of ``depth + 1`` batches are ever under way, so that
                memory is bounded where steps are started faster than they run.
        """
        if self.successor:
            return self.successor.take(after)
        if self._allowance is not None:
            self._reader.allow(self._allowance)
            self._allowance = None
        self._running.append(after)
        if len(self._running) > max(self._depth, 1):
            jax.block_until_ready(self._running.popleft())
        if self._reader.is_waiting():
            jax.block_until_ready(after)  # Until here devices were at work, and nobody waited for data.
            with self._meter.getting(), self._meter.waiting():
                batch = self._reader.take()
        else:
            with self._meter.getting():
                batch = self._reader.take()
        self._meter.step()
        if self._is_kept:
            self._last = batch
        return batch.placed

    def close(self, failed: bool = False) -> None:
        """End the reading ahead; batches that were not taken go back to a source that cannot yield them again."""
        if self._closed:
            return
        self._closed = True
        left = [read.host for read in self._reader.close(failed)]
        if self._check:
            self._check.close()
        self._last = None
        if not self._source.restarts:
            self._source.give_back([*left, *self._looked])

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        return next(self._batches)

    def _begin(self) -> Iterator[Any]:
        start = self._start
        if start is None:
            if self._is_kept:
                self.at_begin = self.at_begin or capture_random_state()
            return self._source.batches()
        self.at_begin = start.at_begin
        if self._source.restarts:
            restore_random_state(start.at_begin)
        batches = self._source.batches_from(start.batches - 1)
        check_same_batch(self._source.name, start, next(batches, None))
        restore_random_state(start.after)
        return batches

    def _read(self) -> _HostBatch:
        begun = time.monotonic()
        try:
            host = self._looked.popleft() if self._looked else self._next()
        except StopIteration:
            if self._check:
                self._check(self._number, None)
            raise
        self._meter.read += time.monotonic() - begun
        if self._check:
            self._check(self._number, host)
        self._number += 1
        placed = self._place(host)
        if self._depth:
            jax.block_until_ready(placed)
        is_ahead = self._is_kept and self._depth > 0
        kept = host if self._is_kept or not self._source.restarts else None
        return _HostBatch(placed, kept, capture_random_state() if is_ahead else None)

    def _finish(self) -> None:
        if inspect.isgenerator(self._batches):
            self._batches.close()
