"""How much memory this machine has, and how much of it this process may still have."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "first_line", "host_memory"]

_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


@dataclass(frozen=True)
class HostMemory:
    """In bytes.

    Args:
        total: of the machine.
        limit: of the control group of this process, where it has one.
        free: what may still be asked for; None where the system does not say.
    """

    total: int
    limit: int | None
    free: int | None


def host_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> HostMemory:
    """The memory of this machine.

    Args:
        cgroup: folder of the control group, of version 2.
        meminfo: what Linux says.

    Example:
        >>> from lockstep.topology.host_memory import host_memory
        >>> host_memory().total > 0
        True
    """
    limit, used = first_line(cgroup / "memory.max"), first_line(cgroup / "memory.current")
    bounds = [int(limit) - int(used)] if limit.isdigit() and used.isdigit() else []
    bounds += [int(line.split()[1]) * 1024 for line in _lines(meminfo) if line.startswith("MemAvailable:")]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(total, int(limit) if limit.isdigit() else None, min(bounds, default=None))


def first_line(path: Path) -> str:
    """The first line of a file; "" where it cannot be read."""
    return next(iter(_lines(path)), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
