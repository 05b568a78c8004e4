"""Log lines about a wait while it lasts: after two seconds, and again each time it has become twice as long."""

import time
from collections.abc import Callable, Iterable

__all__ = ["CancelledError", "WaitLogger", "listed"]

_FIRST = 2.0  # seconds


class CancelledError(Exception):
    """The result of a wait is no longer wanted."""


class WaitLogger:
    """Logs one wait.

    Args:
        log: takes lines.
        clock: gives seconds, and is not set back.

    Example:
        >>> times = iter([0.0, 1.0, 2.5, 3.0, 14.0])
        >>> wait = WaitLogger(print, clock=lambda: next(times))
        >>> for _ in range(4):
        ...     wait.log("worker 2 of 3 at b:12421")
        waiting for worker 2 of 3 at b:12421, 2 s
        waiting for worker 2 of 3 at b:12421, 14 s
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._begun = clock()
        self._next = _FIRST

    @property
    def seconds(self) -> float:
        """How long the wait has lasted."""
        return self._clock() - self._begun

    @property
    def has_logged(self) -> bool:
        """Whether a line was logged."""
        return self._next > _FIRST

    def log(self, whom: str) -> None:
        """Log a line that names whom this waits for, if it is time to."""
        seconds = self.seconds
        if seconds >= self._next:
            self._next = 2 * seconds
            self._log(f"waiting for {whom}, {int(seconds)} s")


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence.

    Example:
        >>> listed(["worker 1", "worker 2", "worker 3"])
        'worker 1, worker 2 and worker 3'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
