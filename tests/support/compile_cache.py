"""Compiled programs that test processes share, and keep from run to run: see ``startup/shared_programs.py``."""

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tests.support.startup.shared_programs import FOLDERS, SETTINGS, fill, publish, share

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


@contextlib.contextmanager
def in_new_interpreters(kind: str):
    """Have interpreters with the folder ``startup`` in their path share their programs, too; gives their environment variables."""
    with tempfile.TemporaryDirectory(prefix="lockstep-compiled-", ignore_cleanup_errors=True) as private:
        yield {FOLDERS: os.pathsep.join([private, str(shared_folder(kind))])}


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

    @property
    def is_replaced(self) -> bool:
        """Whether JAX takes this process's programs from another folder; from none is intended: see :func:`unused`."""
        return jax.config.jax_compilation_cache_dir not in (None, str(self._private))

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


def exchange(private: Path, shared: Path) -> None:
    """Give other processes the new entries, and get theirs; this process goes on."""
    now = time.time()
    share(private, shared, lambda name: now - os.stat(f"{private}/{name}").st_mtime >= AT_REST)
    fill(private, shared)


def _key() -> str:
    """Digest of versions and processor; JAX's own key of an entry covers the program, flags and devices."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^(?:flags|Features)\s*:.*$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    parts = [platform.machine(), flags.group() if flags else platform.processor()]
    parts += [f"{name} {version(name)}" for name in ("jax", "jaxlib", "keras")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
