"""Failures of a job, as the chief reports them to every worker."""

import enum
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.distributed.cluster import exit_codes

__all__ = ["Failure", "FailureKind", "summary_of"]


class FailureKind(enum.StrEnum):
    """The ways in which a worker fails."""

    DIED = "died"  # Its connection closed without a goodbye.
    SILENT = "silent"  # No sign of life: stopped, or cut off.
    STUCK = "stuck"  # Its heartbeats come, its program goes no further, and others wait for it.
    LEFT = "left"  # It left in order, and others wait for it.
    FAILED = "failed"  # It said that its program raised an exception.


_CODES = {
    FailureKind.DIED: exit_codes.PEER_LOST,
    FailureKind.SILENT: exit_codes.PEER_LOST,
    FailureKind.STUCK: exit_codes.NO_PROGRESS,
    FailureKind.LEFT: exit_codes.USER_ERROR,
    FailureKind.FAILED: exit_codes.USER_ERROR,
}
_AGAIN = "Start the job again: with lockstep.callbacks.BackupAndRestore it resumes from its last checkpoint."
_CURES = {
    FailureKind.DIED: f"What it printed last says why; one that was killed for lack of memory says nothing. {_AGAIN}",
    FailureKind.SILENT: f"See whether that process, its machine and the network are well. {_AGAIN}",
    FailureKind.STUCK: "The stacks in its output say where; if it was only slow, raise CommunicationOptions(timeout_seconds=…).",
    FailureKind.LEFT: "Give all workers the same number of epochs and of batches.",
    FailureKind.FAILED: "",  # What it raised says it.
}


@dataclass(frozen=True)
class Failure:
    """Why a job cannot continue.

    Args:
        kind: how the worker has failed.
        worker: its number.
        host: its machine.
        pid: its process there.
        sentence: all of this for the user.

    Example:
        >>> Failure(FailureKind.DIED, 1, "node1", 77, "worker 1 of 2 (node1, process 77) died.").exit_code
        75
    """

    kind: FailureKind
    worker: int
    host: str
    pid: int
    sentence: str

    @property
    def exit_code(self) -> int:
        """The exit code of every process of the job."""
        return _CODES[self.kind]

    @property
    def cure(self) -> str:
        """What to do, in a sentence; empty if the failure is an error of the program."""
        return _CURES[self.kind]

    def as_message(self) -> dict[str, Any]:
        """Return this as JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Failure":
        """Return the failure that :meth:`as_message` was called on."""
        return cls(**{**message, "kind": FailureKind(message["kind"])})


def summary_of(error: BaseException) -> str:
    """Return an exception as in the last line of its traceback.

    Example:
        >>> summary_of(ValueError("no labels"))
        'ValueError: no labels'
    """
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name
