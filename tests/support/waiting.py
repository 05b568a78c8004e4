"""Waits for a condition, with a deadline, and what the system says about a process."""

import time
from pathlib import Path

DEADLINE = 60.0  # seconds


def wait_until(condition, what, deadline=DEADLINE):
    """Wait until ``condition()`` is true."""
    until = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < until, f"waited {deadline:g} s in vain for {what}"
        time.sleep(0.01)


def state_of(process):
    """The state of a process as ``ps`` shows it, such as S, T or Z; X if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def has_ended(process):
    """Whether a process is gone, or only waits to be collected by its parent."""
    return state_of(process) in "ZX"
