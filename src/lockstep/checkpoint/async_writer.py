"""Writes checkpoints while training goes on."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

from lockstep._errors import CheckpointError, LockstepError
from lockstep._logging import log_info
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.distributed.control.wait_logger import WaitLogger

__all__ = ["BackgroundWriter"]

_POLL_SECONDS = 1.0  # Between two looks at the clock; what is waited for wakes the waiting thread at once.

Job = tuple[int, Callable[[], Snapshot]]


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread of its own, in the order in which they are submitted.

    While one is written, one more may wait. Whoever submits a third waits until the second is begun: what was asked for is written,
    never left out for something newer. The thread lives only as long as there is something to write.

    Args:
        store: where to.
        timeout_seconds: limit of each wait.
        log: takes a line for the user.

    Attributes:
        last_error: why the last write failed; None where it went well.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with CheckpointStore(folder.name) as store, BackgroundWriter(store) as writer:
        ...     writer.submit(1, lambda: Snapshot({}, {"epoch": 0}))
        ...     writer.submit(2, lambda: Snapshot({}, {"epoch": 0}))
        >>> store.steps()
        [1, 2]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        timeout_seconds: float = 600.0,
        log: Callable[[str], None] = log_info,
    ) -> None:
        self.store = store
        self.last_error: BaseException | None = None
        self._timeout, self._log = timeout_seconds, log
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._written: int | None = None  # The step that is being written.
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        atexit.register(self.close)

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, step: int, make_snapshot: Callable[[], Snapshot]) -> None:
        """Have a checkpoint written; returns at once, but where another one already waits.

        Args:
            step: how many steps were trained.
            make_snapshot: is called in the thread that writes. It must give the state of this step whatever is trained meanwhile.

        Raises:
            CheckpointError: this is closed, or the one that waits could not begin within the limit.
        """
        with self._changed:
            if not self._await(lambda: self._waiting is None, self._timeout):
                raise CheckpointError(
                    f"{self.store.directory}: the checkpoint of step {step} is not taken: after {self._timeout:.0f} s that of "
                    f"step {self._written} is still being written, and another waits. Save more rarely, or to a faster disk."
                )
            if self._is_closed:
                raise CheckpointError(
                    f"The checkpoint of step {step} comes too late: the writer is closed. Submit before close()."
                )
            self._waiting = (step, make_snapshot)
            if self._written is None:
                first = self._next()
                self._thread = threading.Thread(
                    target=self._run, args=(first,), name="lockstep-checkpoint", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything submitted is written, or has failed.

        Args:
            timeout_seconds: limit; None: that of this writer.

        Returns:
            Whether that is so.
        """
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        with self._changed:
            return self._await(lambda: self._written is None, seconds)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Take no more, and wait as :meth:`wait` does; the end of the program does so by itself."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return True  # In a child that was forked: the thread is its parent's.
        with self._changed:
            self._is_closed = True
        is_done = self.wait(timeout_seconds)
        if is_done and self._thread:
            self._thread.join()  # A process that ends must not find it giving back the memory of arrays: JAX aborts there.
        if not is_done:
            self._log(f"the checkpoint of step {self._written} is not written yet, and lost if the process ends.")
        return is_done

    def _await(self, condition: Callable[[], bool], seconds: float) -> bool:
        notice = WaitLogger(self._log)
        while not self._changed.wait_for(condition, min(_POLL_SECONDS, max(0.0, seconds - notice.seconds))):
            if notice.seconds >= seconds:
                return False
            notice.tell(f"the checkpoint of step {self._written} to be written")
        return True

    def _next(self) -> Job | None:
        job, self._waiting = self._waiting, None
        self._written = None if job is None else job[0]
        self._changed.notify_all()
        return job

    def _run(self, job: Job | None) -> None:
        while job is not None:
            self.last_error = self._write(*job)
            with self._changed:
                job = self._next()

    def _write(self, step: int, make_snapshot: Callable[[], Snapshot]) -> BaseException | None:
        try:
            self.store.write(step, make_snapshot())
        except BaseException as error:  # Whatever it is, training goes on, and the others are written.
            kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
            self._log(f"the checkpoint of step {step} was not written, and training goes on: {kind}{error}")
            return error
        return None
