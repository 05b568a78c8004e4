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
from typing import Any

from lockstep._errors import ClusterError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.failures import Failure, FailureKind, summary_of

__all__ = ["GRACE_SECONDS", "ExitGuard"]

GRACE_SECONDS = 1.5
_WRITE_SECONDS = 1.0  # A pipe that nobody reads, or a lock of the main thread, must not hold the process.
_STANDARD_ERROR = 2


class ExitGuard:
    """Ends the process when its job cannot go on, and when nobody has caught an exception; then it tells the other workers.

    A failure of the job (:meth:`on_failure`): calls of the session have raised ClusterError by then, so Python code can unwind and
    end the process itself. Only where it is still alive after the grace is it ended. Where a worker is stuck, each writes the stacks of
    all its threads. What has become of whom is the last line: where an exception follows, it is said again below the traceback.

    An exception (:meth:`hook`, between :meth:`install` and :meth:`restore`): the exit code is that of the cause: of a
    ClusterError, of the job's failure where that came first, else of an error of the user's program. ``SystemExit`` is left alone.

    Args:
        session: who is told; may be set later.
        grace_seconds: time for the program to end by itself.
        end: ends the process.
        sleep: waits.

    Attributes:
        before_end: is given the summary of an exception that nobody has caught, and the exit code, to tell others who are not in the
            session.

    Example:
        >>> import sys
        >>> before = sys.excepthook
        >>> guard = ExitGuard()
        >>> guard.install()
        >>> sys.excepthook == guard.hook
        True
        >>> guard.restore()
        >>> sys.excepthook is before
        True
    """

    def __init__(
        self,
        session: ControlClient | None = None,
        *,
        grace_seconds: float = GRACE_SECONDS,
        end: Callable[[int], Any] = os._exit,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.session = session
        self._grace_seconds, self._end, self._sleep = grace_seconds, end, sleep
        self._process = os.getpid()
        self._before: Callable[..., Any] = sys.__excepthook__
        self._is_installed = False
        self._speaking = threading.Lock()
        self._has_said = False
        self._raised = ""
        self.before_end: Callable[[str, int], Any] = lambda summary, code: None

    def install(self) -> None:
        """Take the place of ``sys.excepthook``."""
        if not self._is_installed:
            self._before, sys.excepthook, self._is_installed = sys.excepthook, self.hook, True

    def restore(self) -> None:
        """Give the place back; where somebody else has taken it since, do nothing from now on but call who was there before."""
        if self._is_installed and sys.excepthook == self.hook:
            sys.excepthook = self._before
        self._is_installed = False

    def on_failure(self, failure: Failure) -> None:
        """Say why the job cannot go on, and end this process with the code that belongs to it."""
        if not self._raised:
            _within_limit(lambda: self._say_once(failure))
        self._sleep(self._grace_seconds)
        _within_limit(lambda: self._say_once(failure))
        self._end(failure.exit_code)

    def hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Print the traceback as before, tell the others, and end."""
        is_at_a_prompt = "ps1" in vars(sys)
        if not self._is_installed or is_at_a_prompt or os.getpid() != self._process:
            self._before(kind, error, traceback)  # A prompt goes on, and a forked child ends as it would without us.
            return
        self._raised = summary_of(error)
        self._before(kind, error, traceback)
        failure = None if self.session is None else _cause(self.session, self._raised)
        code = _code(error, failure)
        _within_limit(lambda: self.before_end(self._raised, code))
        _within_limit(_flush if failure is None else lambda: self._say_last(failure))
        self._end(code)

    def _say_once(self, failure: Failure) -> None:
        with self._speaking:
            if not self._has_said:
                self._say(failure)
        _flush()

    def _say_last(self, failure: Failure) -> None:
        """An error that all workers raise alike stands in the traceback above."""
        if not (failure.kind is FailureKind.FAILED and failure.sentence.endswith(self._raised)):
            with self._speaking:
                self._say(failure)

    def _say(self, failure: Failure) -> None:
        if failure.kind is FailureKind.STUCK and not self._has_said:
            faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
        self._has_said = True
        _flush()
        stream = sys.stderr
        if stream is not None:  # As under pythonw, and in daemons.
            stop = "" if failure.sentence.endswith((".", "!", "?")) else "."
            said = f"{failure.sentence}{stop} This process ends with code {failure.exit_code}. {failure.cure}"
            stream.write(f"lockstep: {said.rstrip()}\n")
            stream.flush()


def _cause(session: ControlClient, summary: str) -> Failure | None:
    """Tell the others; gives what has become of one of them first, if that is the cause."""
    session.fail(summary)
    failure = session.failure
    is_own = failure is not None and failure.kind is FailureKind.FAILED and failure.worker == session.group.index
    return None if is_own else failure


def _code(error: BaseException, failure: Failure | None) -> int:
    if isinstance(error, ClusterError) and error.exit_code is not None:
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    return exit_codes.USER_ERROR if failure is None else failure.exit_code


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
