"""Compiled programs that test processes share, and keep from run to run.

JAX writes an entry of its persistent cache in place: another process could read half an entry, and a process that is killed
could leave half an entry for good. So each process has a private folder that begins with hard links to all shared entries,
and :func:`publish` links the new entries of a process that ended well into the shared folder. Making a link is atomic.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # They would put the folder into the key of an entry.
}
LIMIT = 1 << 30  # bytes of a shared folder; beyond it the oldest half goes
EVERY = 20.0  # seconds between exchanges
AT_REST = 2.0  # seconds since an entry was last changed, after which nobody is still writing it


def shared_folder(kind: str) -> Path:
    """Return the folder for one kind of process, keyed by what decides whether a compiled program may be used.

    ``LOCKSTEP_TEST_CACHE`` names another place than the user's cache.
    """
    root = os.environ.get("LOCKSTEP_TEST_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep-tests"
    folder = base / f"{kind}-{_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def use(private: Path | None) -> None:
    """Have this process take its compiled programs from a folder and write new ones there; None: compile everything."""
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", private and str(private))
    compilation_cache.reset_cache()


class SharedPrograms:
    """The programs of a process that compiles from now on with those of all processes of its kind.

    Args:
        kind: of the processes.
    """

    def __init__(self, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-compiled-")
        self._private, self._shared = Path(self._folder.name), shared_folder(kind)
        self._next = time.monotonic() + EVERY
        fill(self._private, self._shared)
        use(self._private)

    def exchange(self) -> None:
        """Exchange new programs with the other processes, if it is time to."""
        if time.monotonic() > self._next:
            exchange(self._private, self._shared)
            self._next = time.monotonic() + EVERY

    def publish(self) -> None:
        """Give the others the last ones, as this process ends well."""
        publish(self._private, self._shared)


@contextlib.contextmanager
def unused():
    """Have this process compile everything for itself."""
    before = jax.config.jax_compilation_cache_dir
    use(None)
    try:
        yield
    finally:
        use(before)


def fill(private: Path, shared: Path) -> None:
    """Add the shared entries to a private folder."""
    # There are thousands, and hundreds of processes: paths as objects would take twice as long.
    for name in {*os.listdir(shared)} - {*os.listdir(private)}:
        with contextlib.suppress(FileNotFoundError):  # Another process may prune at the same time.
            _link(f"{shared}/{name}", f"{private}/{name}")


def exchange(private: Path, shared: Path) -> None:
    """Give other processes the new entries, and get theirs; this process goes on."""
    now = time.time()
    _share(private, shared, lambda name: now - os.stat(f"{private}/{name}").st_mtime >= AT_REST)
    fill(private, shared)


def publish(private: Path, shared: Path) -> None:
    """Add the new entries of a process that ended well."""
    if _share(private, shared):
        _prune(shared)


def _share(private: Path, shared: Path, is_whole: Callable[[str], bool] = lambda name: True) -> set[str]:
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


def _key() -> str:
    """Digest of versions and processor; JAX's own key of an entry covers the program, flags and devices."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^(?:flags|Features)\s*:.*$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    parts = [platform.machine(), flags.group() if flags else platform.processor()]
    parts += [f"{name} {version(name)}" for name in ("jax", "jaxlib", "keras")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
