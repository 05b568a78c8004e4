"""Readers of the batches of one input in order: in a thread that prefetches them, or inline when a step takes one.

Neither reads a batch beyond its limit: batches of a generator stay in it until an epoch needs them.
"""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lockstep._cancellation import is_cancelled
from lockstep._logging import log_info

__all__ = ["PATIENCE", "BatchReader", "InlineReader", "Prefetcher"]

PATIENCE = 60.0  # seconds without a batch after which a wait is logged, and again after each doubling
_GRACE = 0.5  # seconds that a thread in the user's code gets to end after an error or Ctrl-C

Read = Callable[[], Any]  # returns the next batch; raises StopIteration at the end


class BatchReader(Protocol):
    """Returns batches in order, up to a limit."""

    taken: int

    def set_limit(self, batches: float) -> None:
        """Allow ``batches`` more batches to be read than were taken so far."""

    def is_waiting(self) -> bool:
        """Return whether :meth:`take` would wait for the next batch."""

    def take(self) -> Any:
        """Return the next batch; raise StopIteration at the end, and at the limit."""

    def close(self, failed: bool) -> list[Any]:
        """End all work and return the batches that were read and not taken. After a failure it does not wait for long."""


class InlineReader:
    """Reads a batch when it is taken.

    Args:
        read: returns the next batch.
        finish: is called once at the end.
    """

    def __init__(self, read: Read, finish: Callable[[], None]) -> None:
        self._read, self._finish = read, finish
        self._limit: float = 0
        self.taken = 0

    def set_limit(self, batches: float) -> None:
        """See :class:`BatchReader`."""
        self._limit = self.taken + batches

    def is_waiting(self) -> bool:
        """See :class:`BatchReader`."""
        return False  # Reading inline is work of the thread that also starts the steps, and no wait.

    def take(self) -> Any:
        """See :class:`BatchReader`."""
        if self.taken >= self._limit:
            raise StopIteration
        batch = self._read()
        self.taken += 1
        return batch

    def close(self, failed: bool) -> list[Any]:
        """See :class:`BatchReader`."""
        self._finish()
        return []


class Prefetcher:
    """Reads up to ``depth`` batches ahead in a separate thread.

    An exception of ``read`` is raised by the :meth:`take` that would have returned the batch, with its traceback.

    Args:
        read: returns the next batch.
        finish: is called once at the end, in the thread that reads.
        depth: number of batches that may have been read and not taken.
        name: name of the input, for messages.
        patience: seconds after which a wait is logged.
    """

    def __init__(
        self, read: Read, finish: Callable[[], None], depth: int, name: str, patience: float = PATIENCE
    ) -> None:
        self._read, self._finish, self._depth = read, finish, depth
        self._name, self._patience = name, patience
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._limit: float = 0
        self._requested = 0
        self._failure: BaseException | None = None
        self._closed = self._ended = False
        self._thread: threading.Thread | None = None
        self.taken = 0

    def set_limit(self, batches: float) -> None:
        """See :class:`BatchReader`."""
        with self._changed:
            self._limit = self.taken + batches
            self._changed.notify_all()

    def is_waiting(self) -> bool:
        """See :class:`BatchReader`."""
        return not self._ready

    def take(self) -> Any:
        """See :class:`BatchReader`."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._wait(lambda: self._ready or self._ended or self.taken >= self._limit)
            if not self._ready:
                raise self._failure or StopIteration()
            self.taken += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self, failed: bool) -> list[Any]:
        """See :class:`BatchReader`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is None:
                self._finish()
                return []
            if not failed:
                self._wait(lambda: self._ended)
        self._thread.join(_GRACE if failed else None)
        return list(self._ready)

    def _wait(self, condition: Callable[[], Any]) -> None:
        begun, patience = time.monotonic(), self._patience
        while not self._changed.wait_for(condition, timeout=patience):
            waited = time.monotonic() - begun
            log_info(
                f"{waited:.0f} s without batch {self.taken + 1} of {self._name}: its code has not returned it yet."
            )
            patience = waited

    def _start(self) -> None:
        # The thread has the context of the caller: the open scope, for example. It is a daemon, so that user code that hangs cannot
        # keep the process alive.
        run_in_context = contextvars.copy_context().run
        self._thread = threading.Thread(target=run_in_context, args=(self._run,), name="lockstep-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_cancelled.set(lambda: self._closed)
        try:
            while self._wait_for_room():
                batch = self._read()
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        try:
            self._finish()
        except BaseException as error:
            self._failure = self._failure or error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another batch may be read; return whether it is wanted."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._ready) < self._depth and self._requested < self._limit)
            )
            self._requested += 1
            return not self._closed
