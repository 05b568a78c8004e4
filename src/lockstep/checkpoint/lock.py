"""Allows one writer per directory: an advisory lock, which the kernel releases when its process ends in any way."""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lockstep._errors import CheckpointError

__all__ = ["WriterLock"]

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_LONGEST_NOTE = 1000  # bytes


class WriterLock:
    """The lock of the writer of a directory.

    Args:
        path: the file to lock; it is made, and never removed.
        log: takes the line that this file system has no locks.
        clock: gives the seconds since 1970, for the message to a second writer.

    Attributes:
        is_exclusive: whether no other process can hold it; False before it is taken, and if the file system has no locks.
    """

    def __init__(self, path: Path, log: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._path, self._log, self._clock = path, log, clock
        self._held: weakref.finalize[..., WriterLock] | None = None  # closes the file, at the latest when this is freed
        self.is_exclusive = False
        _forget_in_children(self)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._held is not None and self._held.alive

    def take(self) -> None:
        """Take the lock, or fail at once.

        Raises:
            CheckpointError: another process, or another store in this process, holds it.
            OSError: the file cannot be made.
        """
        if self.is_held:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(descriptor)
            note = self._note()  # Overwriting the old note needs no space on a full disk.
            os.ftruncate(descriptor, os.pwrite(descriptor, note, 0))
        except BaseException:
            os.close(descriptor)
            raise
        self._held = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._held is not None:
            self._held()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_exclusive = True
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._path.parent}: {_holder(descriptor)} writes checkpoints there. Fix: give each job its own "
                "directory, or end that process.",
                error.errno,
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._log(f"{self._path.parent}: this file system has no locks: make sure that only one job writes there.")

    def _note(self) -> bytes:
        since = datetime.fromtimestamp(self._clock(), UTC).isoformat(sep=" ", timespec="seconds")
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()


def _holder(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, _LONGEST_NOTE, 0))
        return f"process {note['pid']} on {note['host']}, since {note['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not written its name yet,"


def _forget_in_children(lock: WriterLock) -> None:
    """Have a forked child close its copy of the lock at once, as it would hold it after this process has ended."""
    reference = weakref.ref(lock)

    def forget() -> None:
        held = reference()
        if held is not None:
            held.release()

    os.register_at_fork(after_in_child=forget)
