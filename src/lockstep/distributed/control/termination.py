"""End of a worker's process when its job cannot continue, when an exception is not caught, or when JAX aborts it.

The main thread may hang in C++ for ever, and JAX holds a process that ends for minutes, waiting for the other workers. So the
process logs the reason, gives Python code a moment to unwind, and ends by ``os._exit``.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from lockstep._errors import USER_ERROR, ClusterError, exit_code_of, summary_of
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.failure_detector import Failure, FailureKind

GRACE_SECONDS = 1.5
_REPORT_SECONDS = 4.0  # Processes outside of the control channel may be busy.
_WRITE_SECONDS = 1.0  # A full pipe, or a lock that the main thread holds, must not keep the process alive.
_ABORT_SECONDS = 5.0  # For the control client to find the cause of an abort and to end the process.
_POLL_SECONDS = 0.05
_STANDARD_ERROR = 2
# With these the text of JAX's RuntimeError or ValueError begins where a collective, or the connection to the other processes, has failed.
_STATUS_OF_COLLECTIVES = tuple(
    f"{status}: "
    for status in (
        "ABORTED",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "FAILED_PRECONDITION",
        "INTERNAL",
        "UNAVAILABLE",
        "UNKNOWN",
    )
)


class ExitGuard:
    """Ends the process when its job cannot continue, or after an uncaught exception, which it reports to the other workers.

    After a failure of the job (:meth:`on_failure`), collective calls have raised ClusterError, so Python code can unwind and
    end the process itself. If it is still alive after the grace, it is ended. If a worker is stuck, each worker writes the stacks
    of all its threads. The failure is the last line: if a traceback follows, the line is repeated below it.

    After an exception (:meth:`hook`, or :meth:`end_after_missed_exception`, between :meth:`install` and :meth:`restore`), the exit
    code is that of the cause: of a ClusterError, of the job's failure if that came first, else of an error of the user's program.
    ``SystemExit`` is not handled.

    Attributes:
        client: the control client, to report exceptions; may be set later.
        before_end: gets the summary of an uncaught exception and the exit code, to report them to processes outside of the
            control channel; it has four seconds.

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
        client: ControlClient | None = None,
        *,
        grace_seconds: float = GRACE_SECONDS,
        end: Callable[[int], Any] = os._exit,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.client = client
        self._grace_seconds, self._end, self._sleep = grace_seconds, end, sleep
        self._process = os.getpid()
        self._before: Callable[..., Any] = sys.__excepthook__
        self._is_installed = False
        self._write_lock = threading.Lock()
        self._has_written = False
        self._raised = ""
        self._handles_only: BaseException | None = None
        self.before_end: Callable[[str, int], Any] = lambda summary, code: None

    def install(self) -> None:
        """Set ``sys.excepthook``."""
        if not self._is_installed:
            self._before, sys.excepthook, self._is_installed = sys.excepthook, self.hook, True

    def restore(self) -> None:
        """Restore ``sys.excepthook``; if it was replaced since, :meth:`hook` only calls the previous one from now on."""
        if self._is_installed and sys.excepthook == self.hook:
            sys.excepthook = self._before
        self._is_installed = False

    def leave_after(self, error: BaseException) -> None:
        """Leave the job after ``error``, which the caller raises: if the program catches it, the process belongs to no job any more."""
        self._handles_only = error
        if self.client is not None:
            self.client.fail(summary_of(error), may_follow=_may_follow(error))
            self.client.leave(0)

    def on_failure(self, failure: Failure) -> None:
        """Write why the job cannot continue, and end this process with the exit code of that failure, unless it leaves the job."""
        if not self._raised:
            _run_with_limit(lambda: self._write_once(failure))
        self._sleep(self._grace_seconds)
        if self._handles_only is not None:
            return  # All workers may have raised the same error, and this one has left.
        _run_with_limit(lambda: self._write_once(failure))
        self._end(failure.exit_code)

    def hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Print the traceback, report the exception to the other workers, and end the process."""
        if not self._handles(error):
            self._before(kind, error, traceback)  # A prompt continues, and a forked child ends as without Lockstep.
            return
        self._raised = summary_of(error)
        self._before(kind, error, traceback)
        self._end_after(error)

    def end_after_missed_exception(self) -> None:
        """End the process as :meth:`hook` does if another hook has taken its place and the exception; for exit handlers."""
        if sys.excepthook == self.hook:
            return  # It would have got an uncaught exception: the program has caught this one and kept it for a debugger.
        error = vars(sys).get("last_value")  # Python sets it before it calls a hook.
        if isinstance(error, BaseException) and _is_uncaught(error) and self._handles(error):
            self._raised = summary_of(error)
            self._end_after(error)

    def _handles(self, error: BaseException) -> bool:
        is_at_a_prompt = "ps1" in vars(sys)
        is_other = self._handles_only is not None and self._handles_only not in _chain(error)
        return self._is_installed and not is_at_a_prompt and not is_other and os.getpid() == self._process

    def _end_after(self, error: BaseException) -> None:
        failure = None if self.client is None else _cause(self.client, error)
        code = exit_code_of(error, USER_ERROR if failure is None else failure.exit_code)
        if failure is not None:
            for callback in _consequence_callbacks:
                callback()
        _run_with_limit(lambda: self.before_end(self._raised, code), _REPORT_SECONDS)
        _run_with_limit(_flush if failure is None else lambda: self._write_again(failure))
        self._end(code)

    def _write_once(self, failure: Failure) -> None:
        with self._write_lock:
            if not self._has_written:
                self._write(failure)
        _flush()

    def _write_again(self, failure: Failure) -> None:
        """Repeat the failure below a traceback, unless the traceback shows the same error."""
        if not (failure.kind is FailureKind.FAILED and failure.sentence.endswith(self._raised)):
            with self._write_lock:
                self._write(failure)

    def _write(self, failure: Failure) -> None:
        if failure.kind is FailureKind.STUCK and not self._has_written:
            faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
        self._has_written = True
        _flush()
        stream = sys.stderr
        if stream is not None:  # None under pythonw and in daemons.
            stop = "" if failure.sentence.endswith((".", "!", "?")) else "."
            line = f"{failure.sentence}{stop} This process ends with code {failure.exit_code}. {failure.fix}"
            stream.write(f"lockstep: {line.rstrip()}\n")
            stream.flush()


def call_if_consequence(callback: Callable[[], object]) -> None:
    """Have each guard call this, before it ends the process, if an uncaught exception follows from a failure of another worker."""
    _consequence_callbacks.append(callback)


_consequence_callbacks: list[Callable[[], object]] = []


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_uncaught(error: BaseException) -> bool:
    """Whether an exception has left the outermost frame. Those that pytest and others catch may be in ``sys.last_value``, too."""
    return error.__traceback__ is not None and error.__traceback__.tb_frame.f_back is None


def _may_follow(error: BaseException) -> bool:
    """Return whether an exception may follow from the loss of another worker: it is about workers, or of a collective of JAX's runtime."""
    return any(
        isinstance(each, ClusterError)
        or (isinstance(each, (RuntimeError, ValueError)) and str(each).startswith(_STATUS_OF_COLLECTIVES))
        for each in _chain(error)
    )


def _cause(client: ControlClient, error: BaseException) -> Failure | None:
    """Report an exception; returns the failure of another worker if that is its cause."""
    client.fail(summary_of(error), may_follow=_may_follow(error))
    failure = client.failure
    is_own = failure is not None and failure.kind is FailureKind.FAILED and failure.worker == client.group.index
    return None if is_own else failure


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _run_with_limit(work: Callable[[], None], seconds: float = _WRITE_SECONDS) -> None:
    thread = threading.Thread(target=work, name="lockstep-exit", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The interpreter is shutting down and starts no more threads.
        work()
    else:
        thread.join(seconds)


def install_sigabrt_handler(client: ControlClient, wait_seconds: float = _ABORT_SECONDS) -> None:
    """Have ``abort()`` in any thread wait for the control client to end this process if a worker was lost.

    When the chief dies, JAX's client in every other worker aborts its process within milliseconds, with a stack of C++ frames and
    no word of the lost worker. The control client is about to report that, and gets ``wait_seconds`` to do so. If no worker is
    seen to be lost, the reason is in this process: the handler that was there before gets the signal, such as that of ``faulthandler``.

    A handler of Python's ``signal`` module would run in the main thread, which hangs. This one runs in the thread that aborts.
    Calling Python there is as safe as the place that aborts: this is not for crashes such as SIGSEGV.
    """
    signal_function = ctypes.CDLL(None).signal
    signal_function.argtypes, signal_function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p

    def handler(number: int) -> None:
        deadline = time.monotonic() + wait_seconds
        while client.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        failure = client.lost_worker
        if failure is None:
            os.write(_STANDARD_ERROR, _OWN_ABORT)
            signal_function(signal.SIGABRT, before)
            signal.raise_signal(signal.SIGABRT)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGABRT])  # It is blocked in its handler.
            return
        os.write(_STANDARD_ERROR, f"lockstep: {failure.sentence}\n".encode())  # Again, as JAX has printed much since.
        if client.failure is not None:
            time.sleep(_ABORT_SECONDS)  # The control client ends the process after its own grace.
        os._exit(failure.exit_code)

    called_by_c = _HANDLER(handler)
    _handlers.append(called_by_c)
    before = signal_function(signal.SIGABRT, ctypes.cast(called_by_c, ctypes.c_void_p))


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_OWN_ABORT = b"lockstep: native code has aborted this process; no other worker was seen to be lost.\n"
_handlers: list[Any] = []  # Keeps them alive: C has only their addresses.
