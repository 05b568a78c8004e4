"""One process of a job as the supervisor sees it: its reaper, the socket to the reaper, and its output."""

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
    """Starts and controls a worker or another process of a job.

    Args:
        task: its name in the job.
        job: what it runs.
        environment: all of its variables.
        log: receives every byte of its output; None: nothing is logged.
        show: receives each line of its output; None: nothing is shown.

    Attributes:
        code: its exit code, or minus the number of the signal that ended it; None while it runs.
        ended_at: time of its exit on the monotonic clock.
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
        self.code: int | None = None
        self.ended_at = 0.0
        self._error = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # For the exception that ends the program.
        self._socket, remote_end = socket.socketpair()
        output, writer = os.pipe()
        with remote_end, open(writer, "wb", buffering=0) as writer_file, _blocked(FORWARDED):
            files = (remote_end.fileno(), self._error.fileno())
            self._reaper = subprocess.Popen(
                _command(job, files),
                stdin=subprocess.DEVNULL,
                stdout=writer_file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=files,
            )
        self._log_pump = LogPump(output, log, show)

    @property
    def file(self) -> int:
        """Descriptor that becomes readable when the process has exited; -1 after :meth:`read_exit`."""
        return self._socket.fileno()

    @property
    def failure(self) -> ProcessFailure | None:
        """Why it failed; None while it runs and if it succeeded."""
        if not self.code:
            return None
        error = self._error.fileno()
        record = ErrorRecord.from_bytes(os.pread(error, os.fstat(error).st_size, 0))
        if record is None:
            return ProcessFailure(self.task, self.code, self.ended_at, None, self._log_pump.last_lines)
        code = max(self.code, 0) or USER_ERROR  # It may have been killed after it wrote the record.
        return ProcessFailure(self.task, code, record.when, record, "")

    @property
    def log_error(self) -> OSError | None:
        """Why its log file is incomplete; None if it is complete."""
        return self._log_pump.log_error

    def read_exit(self) -> None:
        """Read the exit code from its reaper; to be called when ``file`` is readable."""
        fields = self._socket.recv(100).split()
        self._socket.close()
        if fields:
            self.code, self.ended_at = int(fields[0]), float(fields[1])
        else:  # The reaper itself was killed, and the worker with it.
            self.code, self.ended_at = -signal.SIGKILL, time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal to its program."""
        if self.code is None:
            self._reaper.send_signal(number)

    def kill(self) -> None:
        """Kill it and its descendants at once: its reaper does so when the socket is closed."""
        if self.code is None:
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self, until: float) -> None:
        """Wait until all of its processes are gone; at ``until``, on the monotonic clock, kill its reaper, too."""
        try:
            self._reaper.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:  # The reaper is stopped, or the worker waits for a disk or a driver.
            self._reaper.kill()

    def drain(self, until: float) -> None:
        """Wait until all of its output is written, at most until a time of the monotonic clock."""
        self._log_pump.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def _blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals; a process that is started in the block receives them when it unblocks them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _command(job: LaunchConfig, files: Iterable[int]) -> list[str]:
    kind = "-m" if job.is_module else "-f"
    return [sys.executable, "-m", "lockstep.launch.worker_main", *map(str, files), kind, *job.program]
