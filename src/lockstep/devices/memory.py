"""How much memory this machine has, and how much of it this process may still have."""

import ctypes
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NVIDIA_GPUS", "SWITCH", "HostMemory", "first_line", "host_memory", "keep_memory", "returned_memory_reason"]


@dataclass(frozen=True)
class HostMemory:
    """In bytes.

    Args:
        total: of the machine.
        limit: the least that the control groups around this process allow, where they do not allow all.
        free: what may still be asked for, within these limits; None where the system does not say.
    """

    total: int
    limit: int | None
    free: int | None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The memory of this machine; control groups are those of version 2 on Linux.

    Args:
        root: where ``proc`` and ``sys`` are.

    Example:
        >>> from lockstep.devices.memory import host_memory
        >>> host_memory().total > 0
        True
    """
    groups = list(_limits(root))
    known = [max(0, limit - used) for limit, used in groups]
    known += [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(total, min((limit for limit, _ in groups), default=None), min(known, default=None))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of this process's control group and of those around it."""
    groups = root / "sys/fs/cgroup"
    own = next((line[4:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")), "")
    for folder in (groups / own, *(groups / parent for parent in Path(own).parents)):
        limit, used = first_line(folder / "memory.max"), first_line(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            yield int(limit), int(used) - _reclaimable(_lines(folder / "memory.stat"))


def _reclaimable(lines: Iterable[str]) -> int:
    """Bytes of files that the kernel gives up where memory is short."""
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def first_line(path: Path) -> str:
    """The first line of a file; "" where it cannot be read."""
    return next(iter(_lines(path)), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


SWITCH = "LOCKSTEP_KEEP_MEMORY"  # "0" leaves the allocator as it is
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # A machine that has some trains on them.
_ARENAS, _MAPPINGS, _TRIM_ABOVE, _GROW_BY = (
    -8,
    -4,
    -1,
    -2,
)  # mallopt(3): M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
_SETTINGS = {_ARENAS: 1, _MAPPINGS: 0, _TRIM_ABOVE: 2**31 - 1, _GROW_BY: 2**26}


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep freed memory; nothing happens with another allocator, or where the user has set this one.

    Args:
        environ: may say so: ``LOCKSTEP_KEEP_MEMORY=0``, ``LD_PRELOAD``, ``MALLOC_…`` or ``GLIBC_TUNABLES``.

    Returns:
        Whether it does now.
    """
    if platform.libc_ver()[0] != "glibc" or NVIDIA_GPUS.exists() or _is_set_by_the_user(environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) for parameter, value in _SETTINGS.items()])


def returned_memory_reason(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process returns freed memory to the system, though it could keep it; None where it keeps it, or the user has chosen."""
    if environ.get(SWITCH) == "0":
        return None if _is_set_by_the_user({**environ, SWITCH: ""}) else f"{SWITCH}=0"
    if platform.libc_ver()[0] != "glibc" and "malloc" not in environ.get("LD_PRELOAD", ""):
        return f"the C library is {platform.libc_ver()[0] or 'none that keeps it'}"
    return None


def _is_set_by_the_user(environ: Mapping[str, str]) -> bool:
    return (
        environ.get(SWITCH) == "0"
        or "malloc" in environ.get("LD_PRELOAD", "")
        or any(name.startswith("MALLOC_") for name in environ)
        or any(f"glibc.malloc.{name}" in environ.get("GLIBC_TUNABLES", "") for name in ("arena", "mmap", "trim", "top"))
    )
