"""Why a process failed, and which of several failed first."""

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lockstep.distributed.cluster.exit_codes import INTERRUPTED, NO_PROGRESS, PEER_LOST, USER_ERROR
from lockstep.launch.process_names import ProcessName

__all__ = ["USAGE", "ErrorRecord", "ProcessFailure", "first_of", "job_code"]

_CAUSE_SECONDS = 1.0  # The end of a process that ends because of another may be seen before the other's.
USAGE = 2  # What argparse ends a program with; starting it again with the same arguments would not help.
_MEANINGS = {
    1: "what sys.exit('a message') ends with",
    USAGE: "wrong usage",
    USER_ERROR: "an error in the program",
    PEER_LOST: "another worker was lost: try again",
    NO_PROGRESS: "no progress",
    INTERRUPTED: "interrupted",
}
_HINTS = {
    signal.SIGKILL: "maybe this machine or the job ran out of memory: see 'dmesg', or what the scheduler says",
    signal.SIGABRT: "native code gave up; its reason stands above",
    signal.SIGSEGV: "a crash in native code; where Python was at that time stands above",
    signal.SIGBUS: "maybe /dev/shm or a disk is full",
    signal.SIGILL: "maybe a package was built for another processor",
    signal.SIGTERM: "somebody else asked it to end",
}


@dataclass(frozen=True)
class ErrorRecord:
    """What a worker leaves behind when its program ends with an exception.

    Args:
        when: on the machine's monotonic clock, in seconds.
        is_consequence: whether the exception says that something is wrong with another worker.
        text: the traceback.
    """

    when: float
    is_consequence: bool
    text: str

    def to_bytes(self) -> bytes:
        """This, as it goes to the supervisor."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ErrorRecord | None":
        """What was written, or None where that is nothing, or not all of it."""
        try:
            return cls(**json.loads(data))
        except ValueError:
            return None


@dataclass(frozen=True)
class ProcessFailure:
    """The end of a process that did not go well.

    Args:
        task: the process.
        code: its exit code, or minus the number of the signal that ended it.
        when: on the machine's monotonic clock, in seconds.
        record: what its program left behind.
        last_lines: of its output.

    Example:
        >>> ProcessFailure(ProcessName("worker", 3), -9, 0.0, None, "step 7").headline
        "worker 3 was killed by SIGKILL (maybe this machine or the job ran out of memory: see 'dmesg', or what the scheduler says)"
    """

    task: ProcessName
    code: int
    when: float
    record: ErrorRecord | None
    last_lines: str

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because another worker did, as far as can be seen.

        An exception of the program itself leaves a record; without one, 13 is what the control channel ends with.
        """
        if self.code in (PEER_LOST, NO_PROGRESS):
            return True
        return self.code == USER_ERROR if self.record is None else self.record.is_consequence

    @property
    def certain_at(self) -> float:
        """When a cause of it would have been seen, if there is one; on the machine's monotonic clock."""
        return self.when + _CAUSE_SECONDS if self.is_consequence else self.when

    @property
    def headline(self) -> str:
        """What happened, in one sentence."""
        if self.code < 0:
            name, hint = signal.Signals(-self.code).name, _HINTS.get(signal.Signals(-self.code))
            return f"{self.task.name} was killed by {name}" + (f" ({hint})" if hint else "")
        meaning = _MEANINGS.get(self.code)
        return f"{self.task.name} ended with exit code {self.code}" + (f" ({meaning})" if meaning else "")

    @property
    def report(self) -> str:
        """What happened, then the traceback or else the last lines, so that the cause is what stands last."""
        if self.record is not None:
            return f"{self.headline}. Its traceback:\n\n{self.record.text}"
        if self.last_lines:
            return f"{self.headline}. Its last lines:\n\n{self.last_lines}"
        return f"{self.headline}. It printed nothing.\n"


def first_of(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """The failure that the others follow from: the earliest one that is not itself a consequence."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def job_code(code: int) -> int:
    """The exit code of the job: that of the worker, or 128 and the number of its signal, as shells count.

    Example:
        >>> job_code(13), job_code(-9)
        (13, 137)
    """
    return 128 - code if code < 0 else code
