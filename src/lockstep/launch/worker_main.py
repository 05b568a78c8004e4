"""``python -m lockstep.launch.worker_main SUPERVISOR ERROR -f|-m PROGRAM ARGUMENTS…``: becomes a keeper, and below it the worker.

SUPERVISOR and ERROR are numbers of open files: a socket that leads there, and where the exception goes that the program ends
with. The worker is a fork of this process, made while there is nothing in it yet: no second Python starts.
"""

import contextlib
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from types import TracebackType

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.exit_codes import INTERRUPTED, USER_ERROR
from lockstep.launch import run_script
from lockstep.launch.failure_report import ErrorRecord
from lockstep.launch.process_tree import adopt_orphans, die_with_parent
from lockstep.launch.reaper import FORWARDED, keep
from lockstep.launch.signal_pipe import SignalPipe

_OURS = {__file__, run_script.__file__}


def main() -> None:
    """Fork: the parent keeps watch, the child runs the program."""
    supervisor, error = (int(number) for number in sys.argv[1:3])
    os.set_inheritable(error, False)
    adopt_orphans()
    received = SignalPipe([*FORWARDED, signal.SIGCHLD])
    parent = os.getpid()
    worker = os.fork()
    if worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # The supervisor has held them back until now.
        keep(worker, supervisor, received)
        return
    received.close()
    os.close(supervisor)
    os.setpgid(0, 0)
    die_with_parent(parent)
    _work(sys.argv[3] == "-m", sys.argv[4:], error)


def _work(is_module: bool, command: list[str], error: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # It is a pipe, and somebody watches it.
    own = os.getpid()
    try:
        (run_script.run_module if is_module else run_script.run_script)(command[0], command[1:])
    except SystemExit:
        raise
    except KeyboardInterrupt as interrupt:
        _show(interrupt.with_traceback(_own_frames(interrupt)))
        sys.exit(INTERRUPTED)
    except BaseException as exception:
        if os.getpid() != own:  # A fork that the program has made ends as under plain Python.
            raise
        _end_after(exception.with_traceback(_own_frames(exception)), error)


def _end_after(exception: BaseException, error: int) -> None:
    """Say what happened, to the supervisor first, and end at once.

    What runs at the exit of Python may wait for the other workers, who wait for this one: JAX does, for minutes.
    """
    text = "".join(traceback.format_exception(exception))
    with contextlib.suppress(OSError):
        os.pwrite(error, ErrorRecord(time.monotonic(), isinstance(exception, ClusterError), text).to_bytes(), 0)
    _show(exception)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    code = exception.exit_code if isinstance(exception, ClusterError) else None
    os._exit(code or USER_ERROR)


def _show(exception: BaseException) -> None:
    """Print a traceback the way that the program has asked for."""
    arguments = (type(exception), exception, exception.__traceback__)
    try:
        sys.excepthook(*arguments)
    except Exception:
        sys.__excepthook__(*arguments)


def _own_frames(exception: BaseException) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    frames = exception.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
