"""Writes checkpoints in a background thread, while training continues."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

from lockstep._errors import CheckpointError, describe_error
from lockstep._logging import WaitLogger, log_info
from lockstep.checkpoint.store import CheckpointStore, ShardedStore

_POLL_SECONDS = 1.0  # between log lines of a wait; the event itself wakes the waiting thread at once

Job = tuple[int, Callable[[], Any]]


class AsyncWriter:
    """Writes one checkpoint at a time in a thread of its own, in the order in which they are submitted.

    While one checkpoint is written, one more may wait. The submission of a third blocks until the second is begun: no checkpoint is left
    out for a newer one. The thread runs only while there is something to write. Each wait has the limit ``timeout_seconds``.

    Example:
        >>> import tempfile
        >>> from lockstep.checkpoint.serialization import Snapshot
        >>> from lockstep.checkpoint.store import CheckpointStore
        >>> folder = tempfile.TemporaryDirectory()
        >>> with CheckpointStore(folder.name) as store, AsyncWriter(store) as writer:
        ...     writer.submit(1, lambda: Snapshot({}, {"epoch": 0}))
        ...     writer.submit(2, lambda: Snapshot({}, {"epoch": 0}))
        >>> store.steps()
        [1, 2]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        store: CheckpointStore | ShardedStore,
        *,
        timeout_seconds: float = 600.0,
        log: Callable[[str], None] = log_info,
    ) -> None:
        self.store = store
        self._timeout, self._log = timeout_seconds, log
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._written: int | None = None  # the step that is being written
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> "AsyncWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def is_full(self) -> bool:
        """Whether :meth:`submit` would wait."""
        return self._waiting is not None

    def submit(self, step: int, make_snapshot: Callable[[], Any]) -> None:
        """Queue a checkpoint; returns at once, unless another one already waits.

        ``make_snapshot`` is called in the writing thread. It must return the state of this step, however far the training is by then.

        Raises:
            CheckpointError: the writer is closed, or the waiting checkpoint was not begun within the limit.
        """
        with self._changed:
            if not self._await(lambda: self._waiting is None, self._timeout):
                raise CheckpointError(
                    f"{self.store.directory}: the checkpoint of step {step} is not taken: after {self._timeout:.0f} s that of "
                    f"step {self._written} is still being written, and another waits. Fix: save more rarely, or to a faster disk."
                )
            if self._is_closed:
                raise CheckpointError(
                    f"The checkpoint of step {step} comes too late: the writer is closed. Fix: submit before close()."
                )
            self._waiting = (step, make_snapshot)
            if self._written is None:
                if self._thread is None:
                    atexit.register(self.close)
                self._start(self._next())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all submitted checkpoints are written or have failed; return whether that was within the limit, by default the writer's."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        with self._changed:
            return self._await(lambda: self._written is None, seconds)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Refuse new checkpoints, and wait as :meth:`wait` does; called at the exit of the program, too."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return True  # In a forked child: the thread belongs to the parent.
        with self._changed:
            self._is_closed = True
        is_done = self.wait(timeout_seconds)
        if is_done and self._thread:
            self._thread.join(self._timeout)  # It must not free arrays while the process exits: JAX would abort.
        if not is_done:
            self._log(f"the checkpoint of step {self._written} is not written yet, and lost if the process ends.")
        return is_done

    def _await(self, condition: Callable[[], bool], seconds: float) -> bool:
        notice = WaitLogger(self._log)
        while not self._changed.wait_for(condition, min(_POLL_SECONDS, max(0.0, seconds - notice.seconds))):
            if notice.seconds >= seconds:
                return False
            notice.log(f"the checkpoint of step {self._written} to be written")
        return True

    def _next(self) -> Job | None:
        job, self._waiting = self._waiting, None
        self._written = None if job is None else job[0]
        self._changed.notify_all()
        return job

    def _start(self, job: Job | None) -> None:
        thread = threading.Thread(target=self._run, args=(job,), name="lockstep-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._written = None
            raise CheckpointError(
                f"{self.store.directory}: no checkpoint can be written: {error}. Fix: raise the limit of threads of this process."
            ) from error
        self._thread = thread

    def _run(self, job: Job | None) -> None:
        while job is not None:
            self._write(*job)
            with self._changed:
                job = self._next()

    def _write(self, step: int, make_snapshot: Callable[[], Any]) -> None:
        try:
            self.store.write_from(step, make_snapshot)
        except BaseException as error:  # Training continues after any error, and later checkpoints are written.
            self._log(f"the checkpoint of step {step} was not written, and training continues: {describe_error(error)}")
