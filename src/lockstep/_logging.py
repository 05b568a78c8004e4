"""Log lines of Lockstep, the lines about a wait while it lasts, and whether that wait is still wanted.

A library leaves handlers to the program. If the program has configured none, lines are written to standard error instead of
being lost. ``logging.getLogger("lockstep").setLevel("ERROR")`` switches them off.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar

_logger = logging.getLogger("lockstep")


def log_info(message: str) -> None:
    """Log one line of level INFO, which is visible unless the program has configured logging otherwise."""
    _log(logging.INFO, message)


def log_warning(message: str) -> None:
    """Log one line of level WARNING, which is visible also if the program, or a notebook, has handlers and sets no level."""
    _log(logging.WARNING, message)


def _log(level: int, message: str) -> None:
    if _logger.level <= level and not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lockstep: %(message)s"))
        handler.handle(_logger.makeRecord(_logger.name, level, __file__, 0, message, (), None))
    else:
        _logger.log(level, message)


_FIRST_LINE_SECONDS = 2.0


class CancelledError(Exception):
    """The result of a wait is no longer wanted."""


class WaitLogger:
    """Logs one wait.

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
        self._next = _FIRST_LINE_SECONDS

    @property
    def seconds(self) -> float:
        """How long the wait has lasted."""
        return self._clock() - self._begun

    @property
    def has_logged(self) -> bool:
        """Whether a line was logged."""
        return self._next > _FIRST_LINE_SECONDS

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


def abridged(names: Sequence[str], most: int = 8) -> list[str]:
    """Return at most ``most`` of the names, and the number of the others, for :func:`listed`.

    Example:
        >>> listed(abridged(["worker 1", "worker 2", "worker 3"], most=1))
        'worker 1 and 2 more'
    """
    return [*names[:most], f"{len(names) - most} more"] if len(names) > most else list(names)


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    Example:
        >>> counted(1, "worker"), counted(2, "worker")
        ('1 worker', '2 workers')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def capitalized(text: str) -> str:
    """Return a text with a capital first letter, as a sentence begins."""
    return text[0].upper() + text[1:]


# A thread that works ahead of another one sets it; waits for other processes ask it.
is_cancelled: ContextVar[Callable[[], bool]] = ContextVar("is_cancelled", default=lambda: False)
