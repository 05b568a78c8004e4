"""How much memory this machine has, and how much of it this process may still have."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "first_line", "host_memory"]


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
        >>> from lockstep.devices.host_memory import host_memory
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
