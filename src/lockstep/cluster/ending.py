"""How the process of a worker ends when its job cannot go on.

Its main thread may hang in C++ for ever, and JAX holds a process that ends for minutes, waiting for the others. So the
process says why, gives Python code a moment to unwind, and ends without asking anybody.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from lockstep._errors import ClusterError
from lockstep.cluster import exit_codes
from lockstep.cluster.failure import Failure, Kind

__all__ = ["GRACE_SECONDS", "Guard", "end_process"]

GRACE_SECONDS = 1.5
_WRITE_SECONDS = 1.0  # A pipe that nobody reads, or a lock of the main thread, must not hold the process.
_STANDARD_ERROR = 2

End = Callable[[int], Any]


class Failing(Protocol):
    """What a :class:`Guard` needs of a session."""

    failure: Failure | None

    def fail(self, summary: str) -> None:
        """Tell the others that this worker's program has failed."""


def end_process(
    failure: Failure,
    *,
    grace_seconds: float = GRACE_SECONDS,
    end: End = os._exit,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Say why the job cannot go on, and end this process with the code that belongs to it.

    Calls of the session have raised ClusterError by now, so Python code can unwind and end the process itself. Only where it is
    still alive after the grace is it ended here. Where a worker is stuck, the stacks of all threads are written first: on that
    worker they show where.

    Args:
        failure: of the job.
        grace_seconds: time for the program to end by itself.
        end: ends the process.
        sleep: waits.
    """
    _within_limit(lambda: _say(failure))
    sleep(grace_seconds)
    _within_limit(_flush)
    end(failure.exit_code)


class Guard:
    """Ends the process at once after an exception that nobody caught, and tells the other workers before.

    Its exit code is that of the cause: of a ClusterError, of the job's failure where that came first, else of an error of the
    user's program. ``SystemExit`` is left alone. To be used as a context manager, or with :meth:`install` and :meth:`restore`.

    Args:
        session: who is told; may be set later.
        end: ends the process.

    Example:
        >>> import sys
        >>> before = sys.excepthook
        >>> with Guard() as guard:
        ...     sys.excepthook == guard.hook
        True
        >>> sys.excepthook is before
        True
    """

    def __init__(self, session: Failing | None = None, *, end: End = os._exit) -> None:
        self.session = session
        self._end = end
        self._process = os.getpid()
        self._before: Callable[..., Any] = sys.__excepthook__
        self._is_installed = False

    def __enter__(self) -> "Guard":
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def install(self) -> None:
        """Take the place of ``sys.excepthook``."""
        if not self._is_installed:
            self._before, sys.excepthook, self._is_installed = sys.excepthook, self.hook, True

    def restore(self) -> None:
        """Give the place back; where somebody else has taken it since, do nothing from now on but call who was there before."""
        if self._is_installed and sys.excepthook == self.hook:
            sys.excepthook = self._before
        self._is_installed = False

    def hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Print the traceback as before, tell the others, and end."""
        self._before(kind, error, traceback)
        if not self._is_installed or os.getpid() != self._process:
            return  # A forked child ends as it would without us.
        if self.session is not None:
            self.session.fail(f"{kind.__name__}: {error}")
        _within_limit(_flush)
        self._end(self._code(error))

    def _code(self, error: BaseException) -> int:
        failure = None if self.session is None else self.session.failure
        if isinstance(error, ClusterError) and error.exit_code is not None:
            return error.exit_code
        if isinstance(error, KeyboardInterrupt):
            return exit_codes.INTERRUPTED
        return exit_codes.USER_ERROR if failure is None else failure.exit_code


def _say(failure: Failure) -> None:
    _flush()
    if sys.stderr is not None:
        sys.stderr.write(f"lockstep: {failure.sentence} This process ends with code {failure.exit_code}.\n")
        sys.stderr.flush()
    if failure.kind is Kind.STUCK:
        faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _within_limit(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="lockstep-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The interpreter ends, and starts no more threads.
        work()
    else:
        thread.join(_WRITE_SECONDS)
