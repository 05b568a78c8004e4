"""A directory of checkpoints: one writer, any number of readers, and the search for the newest good checkpoint.

``serialization.write`` writes the files of one checkpoint, and ``_atomic_files.publish`` makes their directory appear whole or not at all. A
checkpoint may be in shards, of which each process writes its own, into a directory that all processes have.
"""

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep._atomic_files import make_directory, open_own, publish, remove, sweep
from lockstep._errors import CheckpointError, OptionError, describe_error, file_path, whole_number
from lockstep._logging import log_info
from lockstep.checkpoint import serialization
from lockstep.checkpoint.manifest import MANIFEST, signing_key
from lockstep.checkpoint.serialization import ARRAYS, Loaded, Snapshot, checkpoints_in, free_name, is_leftover, step_of
from lockstep.checkpoint.shards import PART, ArrayShard, pack
from lockstep.checkpoint.writer_lock import WriterLock

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointStore:
    """The checkpoints of one run.

    Reading needs no lock. Writing needs the directory's lock, which :meth:`lock`, ``with`` or the first :meth:`write` takes, and
    :meth:`close` or any end of the process releases. Methods may be called from any thread. If ``LOCKSTEP_CHECKPOINT_KEY_FILE`` names
    the file of a key, checkpoints are signed with it, and those that are not are refused.

    Args:
        directory: directory of the checkpoints; the first write makes it.
        keep: number of the newest checkpoints that are kept, at least 1. With 1, later damage of that one leaves none.
        timeout_seconds: how long a write waits for the write of another thread.
        log: takes a line for the user.
        clock: gives the seconds since 1970, for the lock's message only.

    Raises:
        OptionError: ``keep`` is out of its range, the directory is an address of the network, or the key cannot be read.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> with CheckpointStore(folder.name) as store:
        ...     path = store.write(7, Snapshot({"kernel": np.ones((2, 3), np.float32)}, {"epoch": 1}))
        >>> path.name
        'step-000000007'
        >>> loaded = store.newest()
        >>> loaded.step, loaded.arrays["kernel"].shape, loaded.metadata
        (7, (2, 3), {'epoch': 1})
        >>> store.verify(path)
        []
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        timeout_seconds: float = 600.0,
        log: Callable[[str], None] = log_info,
        clock: Callable[[], float] = time.time,
    ) -> None:
        file_path("CheckpointStore: directory", directory)
        if "://" in os.fspath(directory):
            raise OptionError(
                f"CheckpointStore: directory: expected a path of this machine, got {directory!r}. Fix: mount the storage, and pass a path in it."
            )
        self.directory = Path(directory).absolute()
        self.keep = whole_number("CheckpointStore: keep", keep)
        self._timeout, self._log = timeout_seconds, log
        self._lock = WriterLock(self.directory / ".lock", log, clock)
        self._turn = threading.Lock()
        self._has_reported_newer = False
        self._key = signing_key()

    def __enter__(self) -> "CheckpointStore":
        self.lock()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def lock(self) -> None:
        """Take the lock; taken early, it lets a second job fail before it trains.

        Raises:
            CheckpointError: another job holds it (the message names host, process and time), or the directory cannot be made or is itself a
                checkpoint.
        """
        with self._writing("no lock can be taken"):
            if self._lock.is_exclusive:
                self._log_errors(lambda: sweep(self.directory, serialization.is_stray))

    def close(self) -> None:
        """Release the lock, after a write of another thread has ended; one that hangs keeps it, and is logged. The store can still be read."""
        try:
            with self._write_turn("the lock is kept"):
                self._lock.release()
        except CheckpointError as error:
            self._log(str(error))

    def write(self, step: int, snapshot: Snapshot, parts: Sequence[tuple[Path, str]] = ()) -> Path:
        """Write a checkpoint, then remove the oldest beyond ``keep``.

        When this returns, the checkpoint is on the disk. If it fails, or the process is killed meanwhile, the older checkpoints are
        unchanged. A checkpoint of the same step is replaced. Checkpoints of later steps belong to an abandoned run: they are kept, and
        logged once.

        Args:
            step: number of steps that were trained, 0 or more.
            snapshot: the content.
            parts: directories of parts, which become those of the checkpoint, each with the sha256 of its manifest.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: no space, no permission, another job writes here, or another error, whose ``errno`` it has.
            OptionError: ``step`` is out of its range.
        """
        step = whole_number("step", step, minimum=0)
        with self._writing(f"the checkpoint of step {step} cannot be written", snapshot):
            if self._lock.is_exclusive:
                self._log_errors(lambda: sweep(self.directory, is_leftover))
            name = free_name(step, checkpoints_in(self.directory))
            path = publish(self.directory, name, lambda path: self._fill(path, step, snapshot, parts))
            self._log_errors(lambda: remove(self.directory, self._outdated(path)))
            self._report_newer(step)
        return path

    def write_from(self, step: int, make_snapshot: Callable[[], Snapshot]) -> None:
        """Make the content of a checkpoint and write it, as :meth:`write` does."""
        self.write(step, make_snapshot())

    def write_part(self, name: str, step: int, snapshot: Snapshot) -> str:
        """Write the shards of one process; needs no lock, as no other process writes under the same name.

        Args:
            name: name of the part's directory, until it is that of a checkpoint.
            step: step number of the checkpoint.
            snapshot: shards, as :func:`lockstep.checkpoint.shards.pack` describes them.

        Returns:
            The sha256 of its manifest.

        Raises:
            CheckpointError: it cannot be written.
        """
        digests: list[str] = []
        try:
            publish(self.directory, name, lambda path: digests.append(serialization.write(path, step, snapshot)))
        except OSError as error:
            what = f"a part of the checkpoint of step {step} cannot be written"
            raise _failed(what, self.directory, error, snapshot) from error
        return digests[0]

    def _fill(self, path: Path, step: int, snapshot: Snapshot, parts: Sequence[tuple[Path, str]]) -> None:
        for number, (part, _) in enumerate(parts):
            os.rename(part, path / f"{PART}{number}")
        serialization.write(path, step, snapshot, self._key, [digest for _, digest in parts])

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order, without checking them."""
        return sorted({_step(path) for path in self.paths()})

    def paths(self) -> list[Path]:
        """The checkpoints' directories, the newest last, without checking them.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        try:
            return checkpoints_in(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory}: cannot be read: {error.strerror or error}. Fix: name a directory that this user may read.",
                error.errno,
            ) from error

    def newest(
        self, check: Callable[[Loaded], None] = lambda loaded: None, *, keep_stored: bool = False
    ) -> Loaded | None:
        """Read the newest good checkpoint; None if there is no checkpoint at all.

        Each newer checkpoint that is damaged is logged, with the damage.

        Args:
            check: raises CheckpointError for what is no good checkpoint for the caller.
            keep_stored: all arrays are checked, and each is read again when it is asked for, so that memory need not hold all of them.
                For the holder of the lock, as another writer may remove the checkpoint meanwhile.

        Raises:
            CheckpointError: there are checkpoints, and none is good.
        """
        refused: dict[Path, str] = {}
        while fresh := [path for path in self.paths() if path not in refused]:
            try:
                loaded = self._open(fresh[-1]) if keep_stored else self.read(fresh[-1])
                check(loaded)
                return loaded
            except CheckpointError as error:
                if os.path.lexists(fresh[-1]):  # Else a writer has replaced it by a newer one meanwhile.
                    refused[fresh[-1]] = str(error)
                    self._log(f"checkpoint refused: {error}")
        if not refused:
            return None
        found = "\n".join(f"  {sentence}" for sentence in refused.values())
        raise CheckpointError(
            f"{self.directory}: no checkpoint there is good:\n{found}\nFix: to train from the beginning, start with an empty directory."
        )

    def read(self, path: str | os.PathLike[str]) -> Loaded:
        """Read and check one checkpoint, given its directory, also outside this store.

        Raises:
            CheckpointError: it is torn, truncated, damaged, foreign or of a newer version.
        """
        return serialization.read(Path(path), self._key)

    def _open(self, path: Path) -> Loaded:
        loaded = serialization.open_stored(path, self._key)
        for name in loaded.arrays:
            loaded.arrays[name]  # an error if it is damaged
        return loaded

    def verify(self, path: str | os.PathLike[str]) -> list[str]:
        """Return a sentence for each damage of a checkpoint, also outside this store; none if it is as it was written."""
        return serialization.verify(Path(path), self._key)

    @contextmanager
    def _writing(self, what: str, snapshot: Snapshot | None = None) -> Iterator[None]:
        with self._write_turn(what):
            try:
                if all((self.directory / name).exists() for name in (MANIFEST, ARRAYS)):
                    raise CheckpointError(
                        f"{self.directory}: {what}: it is itself a checkpoint. Fix: give the directory that contains it."
                    )
                make_directory(self.directory)
                self._lock.take()
                yield
            except CheckpointError:
                raise
            except OSError as error:
                raise _failed(what, self.directory, error, snapshot) from error

    @contextmanager
    def _write_turn(self, what: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._timeout):
            raise CheckpointError(
                f"{self.directory}: {what}: another thread still writes after {self._timeout:.0f} s. Fix: save more rarely, or to a faster disk."
            )
        try:
            yield
        finally:
            self._turn.release()

    def _outdated(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove, the oldest first. Of several checkpoints of one step the last is kept."""
        last = {_step(path): path for path in checkpoints_in(self.directory) if _step(path) <= _step(newest)}
        kept = {last[step] for step in sorted(last)[-self.keep :]}
        return [path for path in checkpoints_in(self.directory) if _step(path) <= _step(newest) and path not in kept]

    def _log_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._log(f"{self.directory}: old checkpoints cannot be removed yet: {error}")

    def _report_newer(self, step: int) -> None:
        newest = self.steps()[-1]
        if newest > step and not self._has_reported_newer:
            self._has_reported_newer = True
            self._log(
                f"{self.directory}: step {step} was written, but there is step {newest}, which a resumed run would start from. "
                f"Fix: if that belongs to an abandoned run, remove the directories of its steps."
            )


def _failed(what: str, directory: Path, error: OSError, snapshot: Snapshot | None) -> CheckpointError:
    """Make the error for a failed operation of the operating system, which was to write the snapshot if there is one."""
    problem, _, fix = str(error.strerror or error).partition(" Fix: ")
    sentence = f"{directory}: {what}: {problem.removesuffix('.')}"
    if isinstance(error, (FileExistsError, NotADirectoryError)) and not directory.is_dir():
        there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
        sentence, fix = f"{directory}: {what}: {there} is no directory", "choose another directory"
    if error.errno in _FULL:
        fix = "free space on that disk, or choose a directory on another one"
        if snapshot is not None:
            there = next(path for path in (directory, *directory.parents) if path.exists())
            needed, free = serialization.bytes_of_files(snapshot), shutil.disk_usage(there).free
            sentence += f"; it needs about {needed:,} bytes, and {free:,} are free"
    return CheckpointError(f"{sentence}. Fix: {fix or 'choose a directory that this user may write to'}.", error.errno)


def _step(path: Path) -> int:
    return step_of(path.name) or 0


Gather = Callable[[str, Any], list[Any]]  # returns the values of all processes, which all call it with the same topic


@dataclass(frozen=True, eq=False)
class ShardedSnapshot:
    """What one process writes of a checkpoint: its shards, by name of the array, and, on the first process only, all that is in no shards."""

    shards: Mapping[str, Sequence[ArrayShard]]
    whole: Snapshot | None = None


def shared_token(directory: Path, *, is_chief: bool, gather: Gather) -> str | None:
    """Find out whether all processes have the chief's directory, which this process names ``directory``; all call this.

    Returns:
        A random name that all processes got and saw there as a file; None if one did not see it.
    """
    token = gather("a name for parts of checkpoints", secrets.token_hex(8))[0]
    probe = directory / f".shared-{token}"
    try:
        if is_chief:
            with contextlib.suppress(OSError):  # Then no process sees it.
                os.close(open_own(probe, os.O_WRONLY))
        gather("the file by which the directory of checkpoints is known", None)
        is_shared = all(gather("whether all see the directory of checkpoints", os.path.exists(probe)))
    finally:
        if is_chief:
            probe.unlink(missing_ok=True)
    return token if is_shared else None


@dataclass(frozen=True)
class ShardedStore:
    """The store of one process for checkpoints that all processes write together.

    Each writes its shards as a part, under a hidden name. When all have, the chief moves the parts into the new checkpoint, so that it
    appears as a whole.

    Args:
        store: store of the directory; the chief's writes.
        process: number of this process.
        token: result of :func:`shared_token`; names of parts have it, so that a process of an earlier job cannot write into this one's.
        gather: returns the values of all processes, see :data:`Gather`.
    """

    store: CheckpointStore
    process: int
    token: str
    gather: Gather

    @property
    def directory(self) -> Path:
        """The directory of the checkpoints."""
        return self.store.directory

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return self.store.steps()

    def write_from(self, step: int, make_snapshot: Callable[[], ShardedSnapshot]) -> None:
        """Write this process's shards, and wait until the checkpoint is complete; all processes call this.

        Raises:
            CheckpointError: a process could not write its part, or the chief the checkpoint. Every process gets the error.
        """
        topic, own = f"the checkpoint of step {step}", self._part(step, self.process)
        made: list[ShardedSnapshot] = []
        written = self.gather(f"{topic}, shards", self._write_part(own, step, make_snapshot, made))
        problem = next((f"worker {n}: {each['error']}" for n, each in enumerate(written) if "error" in each), None)
        if problem is None and made[0].whole is not None:
            parts = [(self._part(step, n), each["sha256"]) for n, each in enumerate(written)]
            problem = self._write_whole(step, made[0].whole, parts)
        problem = self.gather(f"{topic}, outcome", problem)[0]
        if problem is not None:
            # Only then: a network file system may still find under this name the part that the chief has moved into the checkpoint.
            shutil.rmtree(own, ignore_errors=True)
            raise CheckpointError(problem)

    def _part(self, step: int, process: int) -> Path:
        return self.directory / f".{PART}{process}-of-{step:09}-{self.token}"

    # Any error is returned, as the other processes wait for the outcome.

    def _write_part(
        self, path: Path, step: int, make_snapshot: Callable[[], ShardedSnapshot], made: list[ShardedSnapshot]
    ) -> dict[str, str]:
        try:
            made.append(make_snapshot())
            return {"sha256": self.store.write_part(path.name, step, Snapshot(*pack(made[0].shards)))}
        except Exception as error:
            return {"error": describe_error(error)}

    def _write_whole(self, step: int, whole: Snapshot, parts: Sequence[tuple[Path, str]]) -> str | None:
        try:
            self.store.write(step, whole, parts)
        except Exception as error:
            return describe_error(error)
        return None
