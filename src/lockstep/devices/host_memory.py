"""The memory of the host: how much this process may use, and how glibc returns it.

In each step XLA allocates and frees large blocks. By default glibc maps blocks of that size from the system and unmaps them,
so that every step pays for thousands of page faults. ``mallopt`` makes glibc keep them, which a process may do at any time;
the earlier, the more of its threads share one heap. ``docs/decisions/0027`` has the figures.
"""

import ctypes
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.distributed.cluster.env_reader import KEEP_MEMORY, has_accelerators

# mallopt(3): M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD.
_ARENAS, _MAPPINGS, _TRIM_ABOVE, _GROW_BY = -8, -4, -1, -2
_SETTINGS = {_ARENAS: 1, _MAPPINGS: 0, _TRIM_ABOVE: 2**31 - 1, _GROW_BY: 2**26}


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine, in bytes.

    Args:
        total: memory of the machine.
        limit: the lowest limit of the control groups of this process, or None if they have no limit.
        free: memory that may still be allocated within these limits; None if the system does not report it.
    """

    total: int
    limit: int | None
    free: int | None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this machine, with the limits of control groups (version 2, on Linux); ``root`` has ``proc`` and ``sys``.

    Example:
        >>> from lockstep.devices.host_memory import host_memory
        >>> host_memory().total > 0
        True
    """
    groups = list(_limits(root))
    known = [max(0, limit - used) for limit, used in groups]
    known += [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(total, min((limit for limit, _ in groups), default=None), min(known, default=None))


def size_text(size: float) -> str:
    """Format a number of bytes, with its unit.

    Example:
        >>> from lockstep.devices.host_memory import size_text
        >>> size_text(5 * 2**29)
        '2.5 GiB'
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B"


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of this process's control group and of its parents."""
    groups = root / "sys/fs/cgroup"
    own = next((line[4:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")), "")
    for folder in (groups / own, *(groups / parent for parent in Path(own).parents)):
        limit, used = first_line(folder / "memory.max"), first_line(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            yield int(limit), int(used) - _reclaimable(_lines(folder / "memory.stat"))


def _reclaimable(lines: Iterable[str]) -> int:
    """Return the bytes of file cache that the kernel frees if memory is short."""
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def first_line(path: Path) -> str:
    """Return the first line of a file; "" if it cannot be read."""
    return next(iter(_lines(path)), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make glibc keep freed memory, unless there are accelerators, or the user has chosen another allocator or configured this one.

    Args:
        environ: the user's settings: ``LOCKSTEP_KEEP_MEMORY=0``, ``LD_PRELOAD``, ``MALLOC_…`` or ``GLIBC_TUNABLES``.

    Returns:
        Whether glibc keeps freed memory now.
    """
    if platform.libc_ver()[0] != "glibc" or has_accelerators(environ) or _is_configured(environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) for parameter, value in _SETTINGS.items()])


def returned_memory_reason(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process returns freed memory to the system though it could keep it; None if it keeps it or the user chose so."""
    if environ.get(KEEP_MEMORY) == "0":
        return None if _is_configured({**environ, KEEP_MEMORY: ""}) else f"{KEEP_MEMORY}=0"
    if platform.libc_ver()[0] != "glibc" and "malloc" not in environ.get("LD_PRELOAD", ""):
        return f"the C library is {platform.libc_ver()[0] or 'none that keeps it'}"
    return None


def _is_configured(environ: Mapping[str, str]) -> bool:
    return (
        environ.get(KEEP_MEMORY) == "0"
        or "malloc" in environ.get("LD_PRELOAD", "")
        or any(name.startswith("MALLOC_") for name in environ)
        or any(f"glibc.malloc.{name}" in environ.get("GLIBC_TUNABLES", "") for name in ("arena", "mmap", "trim", "top"))
    )
