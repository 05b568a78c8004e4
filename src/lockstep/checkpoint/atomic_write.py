"""Writes and removes checkpoints atomically.

A checkpoint is written under a temporary name, synced to the disk and renamed; the directory is synced last. Removal renames first and
deletes then. So every directory with the name of a checkpoint is complete, whenever a process or machine ends.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from lockstep._errors import CheckpointError
from lockstep.checkpoint.format import (
    ARRAYS,
    MANIFEST,
    REMOVED,
    WRITTEN,
    Manifest,
    Snapshot,
    encode,
    is_leftover,
    write_arrays,
)

__all__ = ["failed", "make_directory", "publish", "remove", "sweep"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish(directory: Path, name: str, step: int, snapshot: Snapshot) -> Path:
    """Write a checkpoint: the whole of it, or nothing after an error.

    Args:
        directory: of the store.
        name: of the checkpoint; no checkpoint has it yet.
        step: of the checkpoint.
        snapshot: its content.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    temporary, final = directory / f"{WRITTEN}{name}", directory / name
    if temporary.exists():
        _delete(temporary)
    temporary.mkdir()
    try:
        with open(temporary / ARRAYS, "xb") as file:
            entries = write_arrays(file, snapshot.arrays)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        with open(temporary / MANIFEST, "xb") as file:
            file.write(encode(Manifest(step, size, entries, snapshot.metadata)))
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(directory)
    return final


def remove(directory: Path, paths: Iterable[Path]) -> None:
    """Remove checkpoints; one that is partly deleted no longer has the name of a checkpoint."""
    renamed = []
    for path in paths:
        renamed.append(directory / f"{REMOVED}{path.name}")
        os.rename(path, renamed[-1])
    if renamed:
        _sync(directory)
    for path in renamed:
        _delete(path)


def sweep(directory: Path) -> None:
    """Remove the temporary directories of killed writers; call it only while holding the lock."""
    for path in directory.iterdir():
        if is_leftover(path.name):
            _delete(path)


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, synced to the disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)


def failed(what: str, directory: Path, error: OSError, needed: int | None = None) -> CheckpointError:
    """Make the error for a failed operation of the operating system.

    Args:
        what: the operation, and that it failed.
        directory: of the store.
        error: of the operating system.
        needed: number of bytes that were to be written, if known.
    """
    sentence = f"{directory}: {what}: {error.strerror or error}"
    if needed is not None and error.errno in _FULL:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        sentence += f"; it needs {needed:,} bytes, and {shutil.disk_usage(there).free:,} are free"
    return CheckpointError(f"{sentence}.", error.errno)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
