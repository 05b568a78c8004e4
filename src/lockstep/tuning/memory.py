"""How much memory a training step may take: what an accelerator says, or what this machine has left."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax

__all__ = ["free_memory", "host_memory"]

_SHARE = 0.9  # of what is free; the rest is for what no compiler counts


def free_memory(devices: Sequence[jax.Device], processes_here: int = 1) -> int | None:
    """Bytes that a step may take: on each accelerator, or on this machine for all CPU devices of this process together.

    Args:
        devices: of this process, of one platform.
        processes_here: number of processes of the job that share this machine's memory.

    Returns:
        Nine tenths of what is free; None where an accelerator does not say.
    """
    if devices[0].platform == "cpu":
        return int(_SHARE * host_memory() / processes_here)
    known = [memory for device in devices if (memory := device.memory_stats())]
    free = [memory["bytes_limit"] - memory["bytes_in_use"] for memory in known if "bytes_limit" in memory]
    return int(_SHARE * min(free)) if free else None


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that a process may still take on this machine, within the limits of its control groups (version 2) on Linux.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = [limit - used for limit, used in _limits(root)]
    return max(0, min([_available(root), *limits]))


def _available(root: Path) -> int:
    for line in _lines(root / "proc" / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of this process's control group and of those around it."""
    groups = root / "sys" / "fs" / "cgroup"
    own = next((line[4:] for line in _lines(root / "proc" / "self" / "cgroup") if line.startswith("0::/")), "")
    for folder in (groups / own, *(groups / parent for parent in Path(own).parents)):
        limit, used = (next(iter(_lines(folder / f"memory.{name}")), "") for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            yield int(limit), int(used) - _reclaimable(_lines(folder / "memory.stat"))


def _reclaimable(lines: Iterable[str]) -> int:
    """Bytes of files that the kernel gives up where memory is short."""
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
