"""The processes below this one, and how they end. What other Unixes lack of Linux's calls is left out there."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

__all__ = ["adopt_orphans", "children", "collect", "die_with_parent", "end_children", "send"]

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_SET_CHILD_SUBREAPER = 36
_PROCESSES = Path("/proc")
_LOOK_SECONDS = 0.01
_KILL_SECONDS = 5.0  # A killed process is gone in milliseconds, unless it waits for a disk or a driver.


def adopt_orphans() -> None:
    """Make this process the parent of every process below it whose own parent ends (Linux), so that none gets away."""
    _control(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends (Linux), also if that has just happened."""
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def children() -> set[int]:
    """The processes whose parent is this one, also those that have ended and are not collected; Linux, else none."""
    own = os.getpid()
    return {int(path.name) for path in _PROCESSES.glob("[0-9]*") if _parent(path) == own}


def collect() -> dict[int, int]:
    """Children that have ended since the last call, with their wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if process == 0:
            return ended
        ended[process] = status


def end_children(patience: float, spared: Set[int] = frozenset()) -> bool:
    """Wait until no child is left, and kill those that are there after ``patience`` seconds; theirs become ours then.

    Args:
        patience: seconds that they have to end by themselves.
        spared: children that are left alone.

    Returns:
        Whether all have ended. A process that waits for a disk or a driver may not, within five seconds more.
    """
    kill_at = time.monotonic() + patience
    while True:
        collect()
        left = children() - spared
        now = time.monotonic()
        if not left or now > kill_at + _KILL_SECONDS:
            return not left
        if now >= kill_at:
            for process in left:
                send(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def send(process: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process, or to the group that it leads, if it is still there."""
    try:
        (os.killpg if group else os.kill)(process, number)
    except (ProcessLookupError, PermissionError):  # The latter on macOS, of a group whose processes have all ended.
        return


def _parent(process: Path) -> int | None:
    try:
        fields = (process / "stat").read_bytes().rpartition(b")")[2].split()  # The name in brackets may hold anything.
    except OSError:  # It has just ended.
        return None
    return int(fields[1])


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
