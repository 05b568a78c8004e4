"""Entries of JAX's persistent cache that processes of tests hand on: folders of files, without JAX.

JAX writes an entry of its persistent cache in place: another process could read half an entry, and a process that is killed
could leave half an entry for good. So each process has a private folder that begins with hard links to all shared entries,
and :func:`publish` links the new entries of a process that ended well into the shared folder. Making a link is atomic.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDERS = (
    "FOLDERS_OF_COMPILED_PROGRAMS"  # variable of interpreters: where each makes its private folder, and the shared one
)
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # They would put the folder into the key of an entry.
}
LIMIT = 1 << 30  # bytes of a shared folder; beyond it the oldest half goes


def use_in_new_interpreter() -> None:
    """Have this process, which has not imported JAX yet, share its programs, unless it has a cache of its own."""
    around, shared = os.environ[FOLDERS].split(os.pathsep)
    inherited = os.environ.get("JAX_COMPILATION_CACHE_DIR", around)
    if not inherited.startswith(around):
        return
    private = tempfile.mkdtemp(dir=around)
    fill(private, shared)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = private
    os.environ.update({name.upper(): str(value) for name, value in SETTINGS.items()})
    atexit.register(_publish_and_remove, private, shared, os.getpid())


def _publish_and_remove(private: str, shared: str, owner: int) -> None:
    if os.getpid() == owner:  # A fork of this process comes here too.
        with contextlib.suppress(OSError):  # The tests may have ended before.
            publish(private, shared)
            shutil.rmtree(private)


def fill(private: Path | str, shared: Path | str) -> None:
    """Add the shared entries to a private folder."""
    # There are thousands, and hundreds of processes: paths as objects would take twice as long.
    for name in {*os.listdir(shared)} - {*os.listdir(private)}:
        with contextlib.suppress(FileNotFoundError):  # Another process may prune at the same time.
            _link(f"{shared}/{name}", f"{private}/{name}")


def publish(private: Path | str, shared: Path | str) -> None:
    """Add the new entries of a process that ended well."""
    if share(private, shared):
        _prune(Path(shared))


def share(private: Path | str, shared: Path | str, is_whole: Callable[[str], bool] = lambda name: True) -> set[str]:
    """Add those of the new entries of which ``is_whole`` is true; gives their names."""
    new = {name for name in {*os.listdir(private)} - {*os.listdir(shared)} if is_whole(name)}
    for name in new:
        _link(f"{private}/{name}", f"{shared}/{name}")
    return new


def _link(source: str, target: str) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # The folders are on different file systems.
            folder, name = os.path.split(target)
            part = f"{folder}/.{name}.{os.getpid()}"
            shutil.copyfile(source, part)
            os.replace(part, target)


def _prune(shared: Path) -> None:
    entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in shared.iterdir())
    total = sum(size for _, size, _ in entries)
    if total <= LIMIT:
        return
    for _, size, entry in entries:
        if total <= LIMIT // 2:
            break
        entry.unlink(missing_ok=True)
        total -= size
