"""Prefetching of batches in a thread, and which inputs are read without one.

No batch is read beyond the limit: batches of a generator stay in it until an epoch needs them.
"""

import contextvars
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax

from lockstep._errors import error_text
from lockstep._keras import trainer
from lockstep._logging import is_cancelled, log_info

PATIENCE = 60.0  # seconds without a batch after which a wait is logged, and again after each doubling; or given up
_GRACE = 0.5  # seconds that the thread gets to end; after an error or Ctrl-C it may be in the user's code

Read = Callable[[], Any]  # returns the next batch; raises StopIteration at the end


class InlineReader:
    """Reads a batch when it is taken; ``finish`` is called once at the end."""

    def __init__(self, read: Read, finish: Callable[[], None]) -> None:
        self._read, self._finish = read, finish
        self._limit: float = 0
        self.taken = 0

    def set_limit(self, batches: float) -> None:
        """See :class:`Prefetcher`."""
        self._limit = self.taken + batches

    def is_waiting(self) -> bool:
        """See :class:`Prefetcher`."""
        return False  # Reading inline is work of the thread that also starts the steps, and no wait.

    def take(self) -> Any:
        """See :class:`Prefetcher`."""
        if self.taken >= self._limit:
            raise StopIteration
        batch = self._read()
        self.taken += 1
        return batch

    def is_reading_here(self) -> bool:
        """See :class:`Prefetcher`."""
        return False

    def close(self, failed: bool) -> list[Any]:
        """See :class:`Prefetcher`."""
        self._finish()
        return []


def _has_64_bits() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # JAX has no public type for it.


_THREAD = "lockstep-prefetch"


def is_reading_ahead() -> bool:
    """Return whether a thread reads batches, whose code may use the global random generators."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


class _SharedThreadState:
    """Keras's state of the thread that takes batches and of the one that reads them: what one of them sets, the other gets.

    What the taking thread sets holds until the input's code sets it for a batch that it begins later. To be made by the taking thread.
    """

    def __init__(self) -> None:
        self._taker = trainer.thread_state()  # after the last batch was taken
        self._reader: dict[str, Any] = {}  # before the batch that is being read
        self._for_reader, self._for_taker = dict(self._taker), dict[str, Any]()

    def begin_read(self) -> None:
        """Use what the taking thread has set."""
        trainer.set_thread_state(self._for_reader)
        self._for_reader.clear()
        self._reader = trainer.thread_state()

    def end_read(self) -> None:
        """Keep for the taking thread what the input's code has set."""
        found = trainer.thread_state_since(self._reader)
        self._for_taker |= {name: value for name, value in found.items() if name not in self._for_reader}

    def publish(self) -> None:
        """Keep for the reading thread what this thread has set."""
        own = trainer.thread_state_since(self._taker)
        self._for_reader |= own
        self._for_taker = {name: value for name, value in self._for_taker.items() if name not in own}
        self._taker = trainer.thread_state()

    def take(self) -> None:
        """Use what the input's code has set."""
        self.publish()
        trainer.set_thread_state(self._for_taker)
        self._for_taker.clear()
        self._taker = trainer.thread_state()


class Prefetcher:
    """Reads up to ``depth`` batches ahead in a separate thread.

    An exception of ``read`` is raised by the :meth:`take` that would have returned the batch, with its traceback.

    Args:
        read: returns the next batch.
        finish: is called once at the end, in the thread that reads.
        depth: number of batches that may have been read and not taken.
        name: name of the input, for messages.
        patience: seconds after which a wait is logged, and after which :meth:`close` gives up a batch that was read ahead.
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
        self._thread_state: _SharedThreadState  # from the start of the thread on
        self.taken = 0

    def set_limit(self, batches: float) -> None:
        """Allow ``batches`` more batches to be read than were taken so far."""
        with self._changed:
            self._limit = self.taken + batches
            if self._thread is not None:  # Before the next batch is begun.
                self._thread_state.publish()
            self._changed.notify_all()

    def is_waiting(self) -> bool:
        """Return whether :meth:`take` would wait for the next batch."""
        return not self._ready

    def take(self) -> Any:
        """Return the next batch; raise StopIteration at the end, and at the limit."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._thread_state.publish()
            self._wait(lambda: self._ready or self._ended or self.taken >= self._limit)
            if not self._ready:
                raise self._failure or StopIteration()
            self.taken += 1
            self._thread_state.take()
            self._changed.notify_all()
            return self._ready.popleft()

    def is_reading_here(self) -> bool:
        """Return whether the calling thread is the one that reads, for whose end :meth:`close` waits."""
        return threading.current_thread() is self._thread

    def close(self, failed: bool) -> list[Any]:
        """End all work and return the batches that were read and not taken; one that hangs is given up, after a failure at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is None:
                self._finish()
                return []
            if not failed and not self._changed.wait_for(lambda: self._ended, self._patience):
                log_info(
                    f"gave up batch {self.taken + len(self._ready) + 1} of {self._name}, which was read ahead: its code has "
                    f"not returned it for {self._patience:g} s."
                )
        self._thread.join(_GRACE)
        with self._changed:
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
        self._thread_state = _SharedThreadState()
        run = functools.partial(contextvars.copy_context().run, self._run, _has_64_bits())
        thread = threading.Thread(target=run, name=_THREAD, daemon=True)
        thread.start()
        self._thread = thread

    def _run(self, has_64_bits: bool) -> None:
        is_cancelled.set(lambda: self._closed)
        with nullcontext() if has_64_bits == _has_64_bits() else jax.enable_x64(has_64_bits):
            self._read_ahead()

    def _read_ahead(self) -> None:
        try:
            while self._wait_for_room():
                batch = self._read()
                with self._changed:
                    self._ready.append(batch)
                    self._thread_state.end_read()
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
            # Such as that of SQLite, whose connections belong to the thread that has made them.
            if "thread" in error_text(error):
                note = f"A thread reads the {self._name}; with InputOptions(prefetch=0) the thread of fit does."
                error.add_note(note)
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
            self._thread_state.begin_read()
            return not self._closed


_SMALL_BATCH = 1 << 20  # bytes; InputOptions states it


def are_arrays_read_inline(data: Any, shuffle: bool | str, batch_size: int | None, platform: str) -> bool:
    """Return whether a batch of arrays is read when its step is due; ``data``, ``shuffle`` and ``batch_size`` are arguments of ``fit``."""
    # On a CPU the rows are in place already, and a thread only takes time from the step; a small batch is read in less time than
    # a thread needs to pass it on. Also, with shuffle="batch", Keras draws the order within a batch from NumPy's global
    # generator, which no other thread may use at the same time.
    is_small = _bytes_of_row(data) * (batch_size or trainer.DEFAULT_BATCH_SIZE) <= _SMALL_BATCH
    return shuffle == "batch" or platform == "cpu" or is_small


def _bytes_of_row(data: tuple[Any, ...]) -> float:
    """Return the bytes of a row of arrays; infinity if they do not tell."""
    arrays = jax.tree.leaves(data)
    if not all(hasattr(array, "nbytes") and getattr(array, "shape", ()) for array in arrays):
        return math.inf
    return sum(array.nbytes / max(1, len(array)) for array in arrays)
