"""Why a process failed, and which of several failures is the root cause."""

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lockstep.distributed.cluster.exit_codes import INTERRUPTED, NO_PROGRESS, PEER_LOST, USER_ERROR
from lockstep.launch.rank_assignment import ProcessName

_CAUSE_SECONDS = 1.0  # The exit of a process that failed because of another may be seen before that of the other.
USAGE = 2  # The exit code of argparse; a restart with the same arguments would not help.
_MEANINGS = {
    1: "the code of sys.exit('a message')",
    USAGE: "wrong usage",
    USER_ERROR: "an error in the program",
    PEER_LOST: "another worker was lost: try again",
    NO_PROGRESS: "no progress",
    INTERRUPTED: "interrupted",
}
_HINTS = {
    signal.SIGKILL: "this machine or the job may have run out of memory: see 'dmesg' or the scheduler's report",
    signal.SIGABRT: "native code aborted; its reason is printed above",
    signal.SIGSEGV: "a crash in native code; Python's stack at that time is printed above",
    signal.SIGBUS: "/dev/shm or a disk may be full",
    signal.SIGILL: "a package may have been built for another processor",
    signal.SIGTERM: "a process outside this job sent it",
}


@dataclass(frozen=True)
class ErrorRecord:
    """Exception that ended a worker's program, which the worker writes for the supervisor.

    Args:
        when: on the machine's monotonic clock, in seconds.
        is_consequence: whether the exception reports a failure of another worker.
        text: the traceback.
    """

    when: float
    is_consequence: bool
    text: str

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
        task: the process.
        code: its exit code, or minus the number of the signal that ended it.
        when: on the machine's monotonic clock, in seconds.
        record: the exception that its program recorded, if any.
        last_lines: of its output.

    Example:
        >>> ProcessFailure(ProcessName("worker", 3), -7, 0.0, None, "step 7").headline
        'worker 3 was killed by SIGBUS (/dev/shm or a disk may be full)'
    """

    task: ProcessName
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
            name, hint = signal.Signals(-self.code).name, _HINTS.get(signal.Signals(-self.code))
            return f"{self.task.name} was killed by {name}" + (f" ({hint})" if hint else "")
        meaning = _MEANINGS.get(self.code)
        return f"{self.task.name} ended with exit code {self.code}" + (f" ({meaning})" if meaning else "")

    @property
    def report(self) -> str:
        """The headline, then the traceback or else the last lines of the output, so that the cause is printed last."""
        if self.record is not None:
            return f"{self.headline}. Its traceback:\n\n{self.record.text}"
        if self.last_lines:
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
