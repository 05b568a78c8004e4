"""Files in directories that others may write to: nothing planted there is written through or waited for, and no file is half written.

A file that exists is opened only if it is a regular file, and for writing only if it is not a symbolic link and has one hard link. A file
or directory that appears as a whole is written under a temporary name, synced to the disk and renamed; the directory is synced last.
Removal renames first and deletes then.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
WRITTEN, REMOVED = ".writing-", ".removing-"


def open_to_read(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; no FIFO is waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    return open(_checked(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)), "rb")


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes`` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(f"{Path(path).name} has more than {max_bytes:,} bytes")
        return file.read(size)


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for writing that only this program writes to, and make it if there is none; return its descriptor.

    Raises:
        OSError: it cannot be opened, is a link or no regular file, or has other names: what is written would go elsewhere.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        if os.path.islink(path):
            raise OSError(f"{Path(path).name} is a symbolic link. Fix: remove it") from None
        raise
    return _checked(path, descriptor, is_written=True)


def _checked(path: str | os.PathLike[str], descriptor: int, is_written: bool = False) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = "is no regular file"
    elif is_written and found.st_nlink > 1:
        problem = f"has {found.st_nlink} hard links, so writing would change another file. Fix: remove it"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(f"{Path(path).name} {problem}")


def replace_file(
    path: str | os.PathLike[str], write: Callable[[io.BufferedWriter], object], *, is_synced: bool = False
) -> None:
    """Make a file, or replace it, as a whole; a link of that name is replaced, not followed.

    With ``is_synced`` it is on the disk when this returns: a loss of power leaves the old or the new content.

    Raises:
        OSError: the file cannot be written; then it is unchanged.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")  # a name that cannot be known before
    try:
        with open(temporary, "xb") as file:
            write(file)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if is_synced:
        sync(target.parent)


def is_temporary(name: str, target: str) -> bool:
    """Return whether a killed process may have left a file of this name when it replaced ``target``."""
    return re.fullmatch(rf"\.{re.escape(target)}\.[0-9a-f]{{16}}", name) is not None


def publish(directory: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Make a directory with all its files, or nothing after an error.

    Args:
        directory: in which it is made.
        name: name of the new directory; there is nothing of that name yet.
        write: writes the files into a directory, synced to the disk.

    Returns:
        The new directory.

    Raises:
        OSError: it cannot be written.
    """
    temporary, final = directory / f"{WRITTEN}{name}", directory / name
    if os.path.lexists(temporary):
        _delete(temporary)
    temporary.mkdir()
    try:
        write(temporary)
        sync(temporary)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(final.parent)
    return final


def remove(directory: Path, paths: Iterable[Path]) -> None:
    """Remove directories; one that is partly deleted no longer has its name."""
    renamed = []
    for path in paths:
        renamed.append(directory / f"{REMOVED}{path.name}")
        os.rename(path, renamed[-1])
    if renamed:
        sync(directory)
    for path in renamed:
        _delete(path)


def sweep(directory: Path, is_leftover: Callable[[str], bool]) -> None:
    """Remove the temporary directories of killed writers, known by their names. No other process may write there meanwhile."""
    for path in directory.iterdir():
        if is_leftover(path.name):
            _delete(path)


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, synced to the disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():  # Some file systems have no sync of directories.
            raise
    finally:
        os.close(descriptor)
