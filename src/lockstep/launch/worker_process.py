"""A worker's process, as its supervisor sees it: its start, its output, its end through its ``reaper``, and why it failed."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from lockstep._errors import INTERRUPTED, NO_PROGRESS, PEER_LOST, USER_ERROR, signal_name
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.log_multiplexer import LogPump
from lockstep.launch.rank_assignment import ProcessName
from lockstep.launch.reaper import KILL_SECONDS
from lockstep.launch.signals import FORWARDED

_CAUSE_SECONDS = 1.0  # The exit of a process that failed because of another may be seen before that of the other.
USAGE = 2  # The exit code of argparse; a restart with the same arguments would not help.
_MEANINGS = {
    1: "the code of sys.exit('a message')",
    USAGE: "wrong usage",
    USER_ERROR: "an error in the program",
    PEER_LOST: "another worker was lost, or the job was preempted: try again",
    NO_PROGRESS: "no progress",
    INTERRUPTED: "interrupted",
}
_HINTS: dict[int, str] = {
    signal.SIGKILL: "this machine or the job may have run out of memory: see 'dmesg' or the scheduler's report",
    signal.SIGABRT: "native code aborted; its reason is printed above",
    signal.SIGSEGV: "a crash in native code; Python's stack at that time is printed above",
    signal.SIGBUS: "/dev/shm or a disk may be full",
    signal.SIGILL: "a package may have been built for another processor",
    signal.SIGTERM: "a process outside this job sent it",
}


@dataclass(frozen=True)
class ErrorRecord:
    """Exception that ended a worker's program, also one of ``sys.exit``, which the worker writes for the supervisor.

    Args:
        when: on the machine's monotonic clock, in seconds.
        is_consequence: whether the exception reports a failure of another worker.
        text: the traceback; empty for ``sys.exit``.
        code: the exit code of a process that ends with this exception.
    """

    when: float
    is_consequence: bool
    text: str
    code: int = USER_ERROR

    def to_bytes(self) -> bytes:
        """Encode the record for the supervisor."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ErrorRecord | None":
        """Decode a record; return None if it is missing or incomplete."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return None


@dataclass(frozen=True)
class ProcessFailure:
    """Unsuccessful end of a process.

    Args:
        process: the process.
        code: its exit code, or minus the number of the signal that ended it.
        when: on the machine's monotonic clock, in seconds.
        record: the exception that its program recorded, if any.
        last_lines: last lines of its output.

    Example:
        >>> ProcessFailure(ProcessName("worker", 3), -7, 0.0, None, "step 7").headline
        'worker 3 was killed by SIGBUS (/dev/shm or a disk may be full)'
    """

    process: ProcessName
    code: int
    when: float
    record: ErrorRecord | None
    last_lines: str

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another worker did, as far as can be determined.

        An exception of the program itself leaves a record; without one, exit code 13 comes from the control channel.
        """
        if self.code in (PEER_LOST, NO_PROGRESS):
            return True
        return self.code == USER_ERROR if self.record is None else self.record.is_consequence

    @property
    def confirmed_at(self) -> float:
        """Time at which its cause, if there is one, would have been seen; on the machine's monotonic clock."""
        return self.when + _CAUSE_SECONDS if self.is_consequence else self.when

    @property
    def headline(self) -> str:
        """The failure in one sentence."""
        if self.code < 0:
            hint = _HINTS.get(-self.code)
            return f"{self.process.name} was killed by {signal_name(-self.code)}" + (f" ({hint})" if hint else "")
        meaning = _MEANINGS.get(self.code)
        return f"{self.process.name} ended with exit code {self.code}" + (f" ({meaning})" if meaning else "")

    @property
    def report(self) -> str:
        """The headline, then the traceback or else the last lines of the output, so that the cause is printed last.

        Below the traceback a worker writes the failure of another worker from which its own has followed.
        """
        if self.record is not None and self.record.text:
            last = self.last_lines.rstrip("\n").rpartition("\n")[2]
            cause = f"{last}\n" if last.startswith("lockstep: ") and last not in self.record.text else ""
            return f"{self.headline}. Its traceback:\n\n{self.record.text}{cause}"
        if self.last_lines.strip():
            return f"{self.headline}. Its last lines:\n\n{self.last_lines}"
        return f"{self.headline}. It printed nothing.\n"


def root_cause(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """Return the earliest failure that is not itself a consequence of another one."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def job_exit_code(code: int) -> int:
    """Return the exit code of the job: that of the worker, or 128 plus the number of its signal, as shells do.

    Example:
        >>> job_exit_code(13), job_exit_code(-9)
        (13, 137)
    """
    return 128 - code if code < 0 else code


class WorkerProcess:
    """Starts and controls a worker or another process of a job, which gets the variables of ``environment`` only.

    ``log`` receives every byte of its output, ``show`` each line; None: nothing does.

    Attributes:
        code: its exit code, or minus the number of the signal that ended it; None while it runs.
        ended_at: time of its exit on the monotonic clock.
    """

    def __init__(
        self,
        process: ProcessName,
        job: LaunchConfig,
        environment: Mapping[str, str],
        log: io.RawIOBase | None,
        show: Callable[[bytes], object] | None,
    ) -> None:
        self.process = process
        self.code: int | None = None
        self.ended_at = 0.0
        self._error = _open_unnamed_file()  # For the exception that ends the program.
        self._record: ErrorRecord | None = None
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
        record, last_lines = self._record, self._log_pump.last_lines
        if record is None:
            return ProcessFailure(self.process, self.code, self.ended_at, None, last_lines)
        code = max(self.code, 0) or record.code  # It may have been killed after it wrote the record.
        return ProcessFailure(self.process, code, record.when, record, last_lines)

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
        else:  # The reaper itself was killed, and the worker with it; or it failed before there was a worker.
            self.code, self.ended_at = -signal.SIGKILL, time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                self.code = self._reaper.wait(KILL_SECONDS) or self.code
        with self._error:
            self._record = ErrorRecord.from_bytes(self._error.readall() or b"")

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


def _open_unnamed_file() -> io.FileIO:
    if sys.platform == "linux":  # Also where no directory is writable.
        return io.FileIO(os.memfd_create("lockstep"), "r+")
    return tempfile.TemporaryFile(buffering=0)


@contextlib.contextmanager
def _blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals; a process that is started in the block receives them when it unblocks them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# Imports nothing from the current directory, where a file may have the name of a module of Python.
_START = "import sys; sys.flags.safe_path or sys.path.pop(0); from lockstep.launch.worker_main import main; main()"


def _command(job: LaunchConfig, files: Iterable[int]) -> list[str]:
    kind = "-m" if job.is_module else "-f"
    return [sys.executable, "-c", _START, *map(str, files), kind, *job.program]
