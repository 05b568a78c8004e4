"""The lock of the writer of a directory of checkpoints; a lock that another machine holds is waited for."""

import errno
import fcntl
import functools
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lockstep._atomic_files import open_own
from lockstep._errors import CheckpointError
from lockstep._logging import WaitLogger

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_MAX_NOTE_BYTES = 1000
_LEASE_SECONDS = 120.0  # A server of NFS 4 keeps the locks of a lost machine for 90 seconds.
_LOCK_POLL_SECONDS = 1.0


class WriterLock:
    """The lock of the writer of a directory; its file is made, and never removed. ``clock`` gives the time since 1970.

    Attributes:
        is_exclusive: whether no other process can hold it; False before it is taken, and if the file system has no locks.
    """

    def __init__(self, path: Path, log: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._path, self._log, self._clock = path, log, clock
        self._held: weakref.finalize[..., WriterLock] | None = None  # closes the file, at the latest when this is freed
        self._descriptor = -1
        self.is_exclusive = False

    def take(self) -> None:
        """Take the lock, or fail at once; a lock of another machine is waited for, as a file server keeps that of a lost one for a while.

        Raises:
            CheckpointError: another process, or another store in this process, holds it.
            OSError: the file cannot be made.
        """
        if self._held is not None and self._held.alive:
            if self._is_of_path(self._descriptor):
                return
            self.release()  # Someone has removed the directory, and another job may have made it anew.
        descriptor = open_own(self._path, os.O_RDWR)
        try:
            self._lock(descriptor)
            if not self._is_of_path(descriptor):
                raise CheckpointError(f"{self._path.parent}: was removed meanwhile. Fix: start again.")
            note = self._note()  # Overwriting the old note needs no space on a full disk.
            os.ftruncate(descriptor, os.pwrite(descriptor, note, 0))
        except BaseException:
            os.close(descriptor)
            raise
        self._held, self._descriptor = weakref.finalize(self, os.close, descriptor), descriptor
        _taken.add(self)
        _release_in_children()

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._held is not None:
            self._held()

    def _is_of_path(self, descriptor: int) -> bool:
        """Return whether the file that is open is the one that the path names now."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _lock(self, descriptor: int) -> None:
        wait = WaitLogger(self._log)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_exclusive = True
                return
            except BlockingIOError as error:
                holder, is_elsewhere = _holder(descriptor)
                if not is_elsewhere or wait.seconds >= _LEASE_SECONDS:
                    raise CheckpointError(
                        f"{self._path.parent}: {holder} writes checkpoints there. Fix: give each job its own "
                        "directory, or end that process.",
                        error.errno,
                    ) from error
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._log(
                    f"{self._path.parent}: this file system has no locks: make sure that only one job writes there."
                )
                return
            wait.log(f"the lock of {self._path.parent}, which {holder} holds or has held when its machine was lost")
            time.sleep(_LOCK_POLL_SECONDS)

    def _note(self) -> bytes:
        since = datetime.fromtimestamp(self._clock(), UTC).isoformat(sep=" ", timespec="seconds")
        return json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "machine": _machine()}
        ).encode()


def _machine() -> str | None:
    """Return the name of this machine since its last start, the same in all its containers; None if the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _holder(descriptor: int) -> tuple[str, bool]:
    """Return who holds a lock, and whether that is on another machine."""
    try:
        note = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
        is_elsewhere = note.get("machine") is not None and note["machine"] != _machine()
        return f"process {note['pid']} on {note['host']}, since {note['since']},", is_elsewhere
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return "another process, which has not written its name yet,", False


_taken: weakref.WeakSet[WriterLock] = weakref.WeakSet()


@functools.cache  # Handlers of forks stay as long as the process.
def _release_in_children() -> None:
    """Have forked children close their copies of all locks at once, as they would hold them after this process has ended."""

    def release() -> None:
        for lock in list(_taken):
            lock.release()

    os.register_at_fork(after_in_child=release)
