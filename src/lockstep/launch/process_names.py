"""The processes of a job as messages, prefixes and log files name them, and what their ends mean for the others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.distributed.cluster.cluster_spec import ALONE
from lockstep.distributed.control.wait_logger import listed

__all__ = ["ProcessName", "ProcessNames", "counted", "names_of"]

_PLURALS = {"worker": "workers"}
_FIRST_COLOURS = {"worker": 0, "ps": 2, "chief": 3, "evaluator": 5}


@dataclass(frozen=True)
class ProcessName:
    """One process of a job.

    Args:
        job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
        index: its number in the job, from 0.

    Example:
        >>> ProcessName("ps", 1).name, ProcessName("ps", 1).file_name, ProcessName("chief", 0).name
        ('ps 1', 'ps-1.log', 'chief')
    """

    job: str
    index: int

    @property
    def name(self) -> str:
        """As messages name it."""
        return self.job if self.job in ALONE else f"{self.job} {self.index}"

    @property
    def file_name(self) -> str:
        """Of what it prints."""
        return f"{self.name.replace(' ', '-')}.log"

    @property
    def colour(self) -> int:
        """Number of the colour of its name, of as many as there are; neighbours differ."""
        return _FIRST_COLOURS[self.job] + self.index


@dataclass(frozen=True)
class ProcessNames:
    """The processes of this node in one generation.

    Args:
        all: in the order in which they start.
        can_lose: the job goes on without these.
        leader: the job is done when this one is; None: when all are.
    """

    all: Sequence[ProcessName]
    can_lose: frozenset[ProcessName] = frozenset()
    leader: ProcessName | None = None

    @property
    def workers(self) -> list[ProcessName]:
        """Those that compute, and share the GPUs."""
        return [task for task in self.all if task.job == "worker"]


def counted(numbers: Mapping[str, int]) -> str:
    """How many there are of each kind, as a sentence lists them.

    Example:
        >>> counted({"worker": 1}), counted({"chief": 1, "worker": 2, "ps": 3})
        ('1 worker', '1 chief, 2 workers and 3 ps')
    """
    return listed(f"{number} {job if number == 1 else _PLURALS.get(job, job)}" for job, number in numbers.items())


def names_of(tasks: Iterable[ProcessName]) -> str:
    """Several as a sentence lists them.

    Example:
        >>> names_of([ProcessName("chief", 0), ProcessName("worker", 0), ProcessName("worker", 2)])
        'chief and workers 0, 2'
    """
    jobs: dict[str, list[ProcessName]] = {}
    for task in tasks:
        jobs.setdefault(task.job, []).append(task)
    return listed(_names(job, own) for job, own in jobs.items())


def _names(job: str, tasks: Sequence[ProcessName]) -> str:
    if len(tasks) == 1:
        return tasks[0].name
    return f"{_PLURALS.get(job, job)} {', '.join(str(task.index) for task in tasks)}"
