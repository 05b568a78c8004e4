"""The last words of a process that JAX aborts.

Where the chief dies, JAX's client in every other worker aborts its process within milliseconds, with a stack of C++ frames and
no word of who is lost. The session is about to say that; here it gets the time for it.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.failures import Failure

__all__ = ["last_words_before_abort"]

_WAIT_SECONDS = 5.0  # For the session to find out why, and to end the process.
_POLL_SECONDS = 0.05
_STANDARD_ERROR = 2


class FailureSource(Protocol):
    """What is needed of a session."""

    failure: Failure | None


def last_words_before_abort(session: FailureSource) -> Callable[[int], Any]:
    """From now on ``abort()`` in any thread waits for the session to end this process.

    A handler of Python's own would not do: those run in the main thread, which hangs. This one is called in the thread that
    aborts, which stays where it is. Calling Python there is as safe as the place that aborts: this is not for crashes such as
    SIGSEGV.

    Args:
        session: knows why the job fails, or soon will.

    Returns:
        The handler; it is kept as long as the process lives.
    """

    def handler(number: int) -> None:
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end:
            if session.failure is not None:
                os.write(
                    _STANDARD_ERROR, f"lockstep: {session.failure.sentence}\n".encode()
                )  # JAX has said much since.
                time.sleep(_WAIT_SECONDS)  # The session ends the process after its own grace.
            time.sleep(_POLL_SECONDS)
        os.write(_STANDARD_ERROR, _UNKNOWN)
        os._exit(exit_codes.PEER_LOST)

    called_by_c = _HANDLER(handler)
    _kept.append(called_by_c)
    signal_function = ctypes.CDLL(None).signal
    signal_function.argtypes, signal_function.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    signal_function(signal.SIGABRT, called_by_c)
    return handler


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_UNKNOWN = b"lockstep: JAX has aborted this process, above it says why; no worker was seen to be lost.\n"
_kept: list[Any] = []  # C keeps only their address
