"""The reaper: the parent of a worker, which kills the worker's descendants when it has exited, and all when the supervisor dies.

It runs in a process of its own (``worker_main``). It forwards signals, reports the exit of its worker, and kills the worker's descendants
then or when the supervisor dies. On Linux it is a subreaper, the parent of all orphans below it, so that it also finds a process that
moved to a session of its own. Other Unixes lack these calls; there it kills the worker's process group.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from lockstep.launch.signals import FORWARDED, SignalPipe

_LEFTOVER_SECONDS = 1.0  # Python's resource tracker outlives its process briefly, to remove shared memory.
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_SET_CHILD_SUBREAPER = 36
_PROCESSES = Path("/proc")
_POLL_SECONDS = 0.01
KILL_SECONDS = 5.0  # A killed process is gone in milliseconds, unless it waits for a disk or a driver.


def run_reaper(worker: int, supervisor: int, signals: SignalPipe) -> None:
    """Wait until a worker exits or the supervisor dies, then kill the worker and its descendants.

    Args:
        worker: process ID of the worker, which leads its own process group.
        supervisor: socket to the supervisor; it is closed when the supervisor dies. "CODE SECONDS" is written to it when the worker
            exits, with the time of the monotonic clock.
        signals: the signals to forward, and SIGCHLD.
    """
    with suppress(OSError):
        os.setpgid(worker, worker)  # The worker calls this, too; either may be first.
    status = _wait_for_exit(worker, supervisor, signals)
    if status is not None:
        with suppress(OSError):  # The supervisor has died in the meantime.
            os.write(supervisor, f"{os.waitstatus_to_exitcode(status)} {time.monotonic()}".encode())
    if status is None or sys.platform != "linux":  # Other systems cannot list the remaining processes.
        _send_signal(worker, signal.SIGKILL, group=True)
    terminate_children(0 if status is None else _LEFTOVER_SECONDS)


def _wait_for_exit(worker: int, supervisor: int, signals: SignalPipe) -> int | None:
    """Return the worker's wait status, or None if the supervisor died first."""
    while True:
        numbers, closed = signals.wait(None, [supervisor])
        for number in numbers:
            if number in FORWARDED:
                _send_signal(worker, number)
        status = _reap().get(worker)
        if status is not None or closed:
            return status


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent exits (Linux), so that none escapes."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent dies (Linux), also if the parent has just died."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_pids() -> set[int]:
    """Return the children of this process, also those that exited and are not reaped; empty on systems other than Linux."""
    me = os.getpid()
    return {int(path.name) for path in _PROCESSES.glob("[0-9]*") if _parent_pid(path) == me}


def terminate_children(grace: float, excluded: Set[int] = frozenset()) -> bool:
    """Wait until no child but those ``excluded`` is left, and kill those that remain after ``grace`` seconds; their children become ours then.

    Returns:
        Whether all have exited. A process that waits for a disk or a driver may not, within five more seconds.
    """
    kill_at = time.monotonic() + grace
    while True:
        _reap()
        remaining = child_pids() - excluded
        now = time.monotonic()
        if not remaining or now > kill_at + KILL_SECONDS:
            return not remaining
        if now >= kill_at:
            for process in remaining:
                _send_signal(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _reap() -> dict[int, int]:
    """Return the wait status of each child that exited since the last call."""
    exited: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exited
        if process == 0:
            return exited
        exited[process] = status


def _send_signal(process: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process, or to the group that it leads, if it still exists."""
    try:
        (os.killpg if group else os.kill)(process, number)
    except (ProcessLookupError, PermissionError):  # The latter on macOS, for a group whose processes have all exited.
        return


def _parent_pid(process: Path) -> int | None:
    try:
        # The command name, in brackets, may contain any character.
        fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # The process has just exited.
        return None
    return int(fields[1])


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
