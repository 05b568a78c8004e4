"""One process of a job as the supervisor sees it: its keeper, a socket to it, and what it prints."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from lockstep.distributed.cluster.exit_codes import USER_ERROR
from lockstep.launch.failure_report import ErrorRecord, ProcessFailure
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.log_multiplexer import LogPump
from lockstep.launch.process_names import ProcessName
from lockstep.launch.reaper import FORWARDED

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """Starts a worker, or another process of a job, which is watched as one.

    Args:
        task: what it is in the job.
        job: what it runs.
        environment: all of its variables.
        log: takes every byte that it prints; None: nothing is logged.
        show: takes each line that it prints; None: none is shown.
    """

    def __init__(
        self,
        task: ProcessName,
        job: LaunchConfig,
        environment: Mapping[str, str],
        log: io.RawIOBase | None,
        show: Callable[[bytes], None] | None,
    ) -> None:
        self.task = task
        self.code: int | None = None  # Minus the number of the signal that ended it; None while it runs.
        self.ended_at = 0.0  # On the monotonic clock.
        self._error = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # For the exception that the program ends with.
        self._socket, theirs = socket.socketpair()
        output, writer = os.pipe()
        with theirs, open(writer, "wb", buffering=0) as writer_file, _blocked(FORWARDED):
            files = (theirs.fileno(), self._error.fileno())
            self._keeper = subprocess.Popen(
                _command(job, files),
                stdin=subprocess.DEVNULL,
                stdout=writer_file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=files,
            )
        self._pump = LogPump(output, log, show)

    @property
    def file(self) -> int:
        """What becomes readable when it has ended; -1 where it has been read."""
        return self._socket.fileno()

    @property
    def failure(self) -> ProcessFailure | None:
        """Why it failed; None while it runs and where all went well."""
        if not self.code:
            return None
        error = self._error.fileno()
        record = ErrorRecord.from_bytes(os.pread(error, os.fstat(error).st_size, 0))
        if record is None:
            return ProcessFailure(self.task, self.code, self.ended_at, None, self._pump.last_lines)
        return ProcessFailure(
            self.task, max(self.code, 0) or USER_ERROR, record.when, record, ""
        )  # Maybe killed after that.

    @property
    def log_error(self) -> OSError | None:
        """Why its log file is not complete; None where it is."""
        return self._pump.log_error

    def look(self) -> None:
        """Read what its keeper says of its end; to be called when ``file`` is readable."""
        said = self._socket.recv(100).split()
        self._socket.close()
        if said:
            self.code, self.ended_at = int(said[0]), float(said[1])
        else:  # The keeper itself was killed, and the worker with it.
            self.code, self.ended_at = -signal.SIGKILL, time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal to its program."""
        if self.code is None:
            self._keeper.send_signal(number)

    def kill(self) -> None:
        """End it and all that it has started, at once: its keeper sees the end of the socket."""
        if self.code is None:
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self, until: float) -> None:
        """Wait until nothing of it is left, at most to a time of the monotonic clock; then its keeper is killed, too."""
        try:
            self._keeper.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:  # The keeper is stopped, or the worker waits for a disk or a driver.
            self._keeper.kill()

    def drain(self, until: float) -> None:
        """Wait until all that it printed is written, at most to a time of the monotonic clock."""
        self._pump.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def _blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Hold signals back; a process that is started meanwhile gets them when it is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _command(job: LaunchConfig, files: Iterable[int]) -> list[str]:
    kind = "-m" if job.is_module else "-f"
    return [sys.executable, "-m", "lockstep.launch.worker_main", *map(str, files), kind, *job.program]
