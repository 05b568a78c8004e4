"""One writer a directory: an advisory lock, which the kernel takes back from a process that ends, however it ends."""

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
    """The right to write into a directory.

    Args:
        path: the file to lock; it is made, and stays.
        log: takes the line that says that this file system has no locks.
        clock: gives the seconds since 1970, for the message to a second writer.

    Attributes:
        is_exclusive: whether nobody else can have it; False before it is taken, and where the file system has no locks.
    """

    def __init__(self, path: Path, log: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._path, self._log, self._clock = path, log, clock
        self._held: weakref.finalize[..., WriterLock] | None = None  # Closes the file, also where nobody else does.
        self.is_exclusive = False
        _forget_in_children(self)

    @property
    def is_held(self) -> bool:
        """Whether it was taken."""
        return self._held is not None and self._held.alive

    def take(self) -> None:
        """Take it, or fail at once.

        Raises:
            CheckpointError: another process, or another store in this one, has it.
            OSError: the file cannot be made.
        """
        if self.is_held:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(descriptor)
            note = self._note()  # Over the old one: that needs no space where the disk is full.
            os.ftruncate(descriptor, os.pwrite(descriptor, note, 0))
        except BaseException:
            os.close(descriptor)
            raise
        self._held = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Give it back; nothing happens where it is not held."""
        if self._held is not None:
            self._held()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_exclusive = True
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._path.parent}: {_holder(descriptor)} writes checkpoints there. Two jobs need two directories; "
                "if that one should not run any more, end it.",
                error.errno,
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._log(f"{self._path.parent}: this file system has no locks: see that only one job writes there.")

    def _note(self) -> bytes:
        since = datetime.fromtimestamp(self._clock(), UTC).isoformat(sep=" ", timespec="seconds")
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()


def _holder(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, _LONGEST_NOTE, 0))
        return f"process {note['pid']} on {note['host']}, since {note['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not given its name yet,"


def _forget_in_children(lock: WriterLock) -> None:
    """A child that was forked shares the lock, which would then outlive this process: it closes its copy at once."""
    reference = weakref.ref(lock)

    def forget() -> None:
        held = reference()
        if held is not None:
            held.release()

    os.register_at_fork(after_in_child=forget)
