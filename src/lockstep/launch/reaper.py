"""A keeper: the small process between the supervisor and one worker.

It hands signals on, says when and how its worker has ended, and sees to it that then, or when the supervisor dies, nothing of
the worker is left. On Linux it is the parent of all orphans below it, so that a process which has hidden in a session of its own is
found, too.
"""

import os
import signal
import sys
import time
from contextlib import suppress

from lockstep.launch.process_tree import collect, end_children, send
from lockstep.launch.signal_pipe import SignalPipe

__all__ = ["FORWARDED", "keep"]

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LEFTOVER_SECONDS = 1.0  # Python's resource tracker outlives its process for a moment, to remove shared memory.


def keep(worker: int, supervisor: int, received: SignalPipe) -> None:
    """Watch one worker until it ends, or until the supervisor does, and end all that is left of it.

    Args:
        worker: its process, which leads a group of its own.
        supervisor: socket to the supervisor. Its end is the supervisor's; "CODE SECONDS" goes there when the worker ends, on the
            monotonic clock.
        received: the signals to hand on, and SIGCHLD.
    """
    with suppress(OSError):
        os.setpgid(worker, worker)  # The worker does so itself; whoever comes first.
    status = _watch(worker, supervisor, received)
    if status is not None:
        with suppress(OSError):  # The supervisor has ended meanwhile.
            os.write(supervisor, f"{os.waitstatus_to_exitcode(status)} {time.monotonic()}".encode())
    if status is None or sys.platform != "linux":  # Other systems do not tell which processes are left.
        send(worker, signal.SIGKILL, group=True)
    end_children(0 if status is None else _LEFTOVER_SECONDS)


def _watch(worker: int, supervisor: int, received: SignalPipe) -> int | None:
    """The worker's wait status; None when the supervisor has ended first."""
    while True:
        numbers, has_ended = received.wait(None, [supervisor])
        for number in numbers:
            if number in FORWARDED:
                send(worker, number)
        status = collect().get(worker)
        if status is not None or has_ended:
            return status
