"""How a wait is told while it lasts: after two seconds, and again whenever it has become twice as long."""

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar

__all__ = ["CancelledError", "WaitLogger", "is_given_up", "listed"]

_FIRST = 2.0  # seconds


# Whether anybody still wants what this thread waits for; a thread that works ahead of another one says so.
is_given_up: ContextVar[Callable[[], bool]] = ContextVar("is_given_up", default=lambda: False)


class CancelledError(Exception):
    """Nobody wants what was waited for any more."""


class WaitLogger:
    """One wait.

    Args:
        announce: takes the line.
        clock: gives seconds, and is not set back.

    Example:
        >>> times = iter([0.0, 1.0, 2.5, 3.0, 14.0])
        >>> notice = WaitLogger(print, clock=lambda: next(times))
        >>> for _ in range(4):
        ...     notice.tell("worker 2 of 3 at b:12421")
        waiting for worker 2 of 3 at b:12421, 2 s
        waiting for worker 2 of 3 at b:12421, 14 s
    """

    def __init__(self, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._announce, self._clock = announce, clock
        self._begun = clock()
        self._next = _FIRST

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return self._clock() - self._begun

    @property
    def was_told(self) -> bool:
        """Whether anybody knows of it."""
        return self._next > _FIRST

    def tell(self, whom: str) -> None:
        """Say for whom this waits, if it is time to."""
        seconds = self.seconds
        if seconds >= self._next:
            self._next = 2 * seconds
            self._announce(f"waiting for {whom}, {int(seconds)} s")


def listed(names: Iterable[str]) -> str:
    """Names as a sentence lists them.

    Example:
        >>> listed(["worker 1", "worker 2", "worker 3"])
        'worker 1, worker 2 and worker 3'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
