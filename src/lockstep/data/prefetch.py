"""Batches of one input in order, read and placed ahead of the steps that take them.

A :class:`Prefetcher` has a thread; :class:`InlineReader` does the same in the thread that takes. Neither ever asks for a batch that
was not allowed: what a generator yields is left in it until an epoch needs it.
"""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lockstep._logging import log_info
from lockstep.distributed.control.wait_logger import is_cancelled

__all__ = ["PATIENCE", "BatchReader", "InlineReader", "Prefetcher"]

PATIENCE = 60.0  # seconds without a batch after which a wait is told, and again after each doubling
_GRACE = 0.5  # seconds that a thread in somebody's code gets to end after an error or Ctrl-C

Read = Callable[[], Any]  # the next batch; StopIteration where there is none


class BatchReader(Protocol):
    """Gives batches in order, as many as are allowed."""

    taken: int

    def allow(self, batches: float) -> None:
        """Let ``batches`` more batches be read than were taken so far."""

    def is_waiting(self) -> bool:
        """Whether the next batch has to be waited for."""

    def take(self) -> Any:
        """The next batch; StopIteration at the end, and where no more are allowed."""

    def close(self, failed: bool) -> list[Any]:
        """End all work; gives the batches that were read and not taken. After a failure it does not wait for long."""


class InlineReader:
    """Reads a batch when it is taken.

    Args:
        read: gives the next batch.
        finish: is called once at the end.
    """

    def __init__(self, read: Read, finish: Callable[[], None]) -> None:
        self._read, self._finish = read, finish
        self._allowed: float = 0
        self.taken = 0

    def allow(self, batches: float) -> None:
        """See :class:`BatchReader`."""
        self._allowed = self.taken + batches

    def is_waiting(self) -> bool:
        """See :class:`BatchReader`."""
        return False  # Reading is work and no wait: it takes the time of the thread that also starts the steps.

    def take(self) -> Any:
        """See :class:`BatchReader`."""
        if self.taken >= self._allowed:
            raise StopIteration
        batch = self._read()
        self.taken += 1
        return batch

    def close(self, failed: bool) -> list[Any]:
        """See :class:`BatchReader`."""
        self._finish()
        return []


class Prefetcher:
    """Reads up to ``depth`` batches ahead in a thread of its own.

    What the reading raises is raised by the :meth:`take` that would have given the batch, with the traceback that it had.

    Args:
        read: gives the next batch.
        finish: is called once at the end, in the thread that reads.
        depth: number of batches that may have been read and not taken.
        name: what is read, for messages.
        patience: seconds after which a wait is told.
    """

    def __init__(
        self, read: Read, finish: Callable[[], None], depth: int, name: str, patience: float = PATIENCE
    ) -> None:
        self._read, self._finish, self._depth = read, finish, depth
        self._name, self._patience = name, patience
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._allowed: float = 0
        self._asked = 0
        self._failure: BaseException | None = None
        self._closed = self._ended = False
        self._thread: threading.Thread | None = None
        self.taken = 0

    def allow(self, batches: float) -> None:
        """See :class:`BatchReader`."""
        with self._changed:
            self._allowed = self.taken + batches
            self._changed.notify_all()

    def is_waiting(self) -> bool:
        """See :class:`BatchReader`."""
        return not self._ready

    def take(self) -> Any:
        """See :class:`BatchReader`."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._wait(lambda: self._ready or self._ended or self.taken >= self._allowed)
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
        # The reader sees the context of who takes: the open scope, say. A daemon, because nobody can end what hangs in
        # somebody's code, and the process must be able to end.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._run,), name="lockstep-feed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_cancelled.set(lambda: self._closed)
        try:
            while self._has_turn():
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

    def _has_turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._ready) < self._depth and self._asked < self._allowed)
            )
            self._asked += 1
            return not self._closed
