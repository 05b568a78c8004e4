"""Names of the processes of a job in messages, output prefixes and log files, and which of them the job can lose."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.distributed.cluster.cluster_spec import SINGLE_JOBS
from lockstep.distributed.control.wait_logger import listed

__all__ = ["ProcessName", "ProcessNames", "format_counts", "format_names"]

_PLURALS = {"worker": "workers"}
_FIRST_COLOURS = {"worker": 0, "ps": 2, "chief": 3, "evaluator": 5}


@dataclass(frozen=True)
class ProcessName:
    """One process of a job.

    Args:
        job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``, as in ``TF_CONFIG``.
        index: its number in the job, from 0.

    Example:
        >>> ProcessName("ps", 1).name, ProcessName("ps", 1).file_name, ProcessName("chief", 0).name
        ('ps 1', 'ps-1.log', 'chief')
    """

    job: str
    index: int

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.job if self.job in SINGLE_JOBS else f"{self.job} {self.index}"

    @property
    def file_name(self) -> str:
        """Name of its log file."""
        return f"{self.name.replace(' ', '-')}.log"

    @property
    def colour(self) -> int:
        """Index of the colour of its prefix, modulo the number of colours; neighbours differ."""
        return _FIRST_COLOURS[self.job] + self.index


@dataclass(frozen=True)
class ProcessNames:
    """The processes of this node in one generation.

    Args:
        all: in the order in which they start.
        can_lose: processes that the job continues without.
        leader: the job is done when this process is done; None: when all are.
    """

    all: Sequence[ProcessName]
    can_lose: frozenset[ProcessName] = frozenset()
    leader: ProcessName | None = None

    @property
    def workers(self) -> list[ProcessName]:
        """The processes that compute and share the GPUs."""
        return [task for task in self.all if task.job == "worker"]


def format_counts(counts: Mapping[str, int]) -> str:
    """Format the number of processes of each kind for a sentence.

    Example:
        >>> format_counts({"worker": 1}), format_counts({"chief": 1, "worker": 2, "ps": 3})
        ('1 worker', '1 chief, 2 workers and 3 ps')
    """
    return listed(f"{count} {job if count == 1 else _PLURALS.get(job, job)}" for job, count in counts.items())


def format_names(tasks: Iterable[ProcessName]) -> str:
    """Format several processes for a sentence.

    Example:
        >>> format_names([ProcessName("chief", 0), ProcessName("worker", 0), ProcessName("worker", 2)])
        'chief and workers 0, 2'
    """
    jobs: dict[str, list[ProcessName]] = {}
    for task in tasks:
        jobs.setdefault(task.job, []).append(task)
    return listed(_format_job(job, members) for job, members in jobs.items())


def _format_job(job: str, tasks: Sequence[ProcessName]) -> str:
    if len(tasks) == 1:
        return tasks[0].name
    return f"{_PLURALS.get(job, job)} {', '.join(str(task.index) for task in tasks)}"
