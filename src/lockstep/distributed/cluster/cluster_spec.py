"""The tasks of a cluster, by job: the counterpart of ``tf.train.ClusterSpec``."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from lockstep._errors import ClusterError, shown
from lockstep.distributed.cluster.addresses import split_address

Jobs = Mapping[str, Sequence[str] | Mapping[int, str]]
JOBS = ("chief", "worker", "ps", "evaluator")
SINGLE_JOBS = ("chief", "evaluator")  # They have at most one task.


class ClusterSpec:
    """The addresses of the tasks of each job.

    Args:
        cluster: for each job, of ``chief``, ``worker``, ``ps`` and ``evaluator``, the addresses ``host:port`` of its tasks: a
            list, or a mapping from index to address if not all are known. Or another ``ClusterSpec``.

    Raises:
        ClusterError: there are no tasks, a job is unknown, an address is invalid or given twice, an index is invalid, or
            there are two chiefs or evaluators.

    Example:
        >>> from lockstep.cluster_resolver import ClusterSpec
        >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
        >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
        (2, 'c:2222')
        >>> spec.as_dict()
        {'chief': ['a:2222'], 'worker': ['b:2222', 'c:2222']}
        >>> partly = ClusterSpec({"worker": {1: "c:2222"}})
        >>> partly.task_indices("worker"), partly.job_tasks("worker")
        ([1], [None, 'c:2222'])
    """

    def __init__(self, cluster: "Jobs | ClusterSpec") -> None:
        jobs = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(jobs, Mapping):
            raise ClusterError(f"cluster: expected a dict of jobs such as {{'worker': ['a:2222']}}, got {shown(jobs)}.")
        self._tasks = {job: _parse_tasks(job, tasks) for job, tasks in jobs.items()}
        if not any(self._tasks.values()):
            raise ClusterError(f"cluster: expected at least one task, got {shown(dict(jobs))}.")
        _check_distinct(self._tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the addresses of all tasks.

        Returns:
            For each job the list of its addresses, or a dict from index to address if some are not known.
        """
        dense = {job: list(tasks) == list(range(len(tasks))) for job, tasks in self._tasks.items()}
        return {job: list(tasks.values()) if dense[job] else dict(tasks) for job, tasks in self._tasks.items()}

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job whose address is known.

        Args:
            job_name: ``chief``, ``worker``, ``ps`` or ``evaluator``.

        Returns:
            The number.

        Raises:
            ClusterError: there is no such job.
        """
        return len(self._of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the tasks of a job whose address is known, ascending.

        Args:
            job_name: ``chief``, ``worker``, ``ps`` or ``evaluator``.

        Returns:
            Whole numbers, from 0 if all are known.

        Raises:
            ClusterError: there is no such job.
        """
        return list(self._of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task.

        Args:
            job_name: ``chief``, ``worker``, ``ps`` or ``evaluator``.
            task_index: number of the task in its job.

        Returns:
            ``host:port``.

        Raises:
            ClusterError: there is no such job, or the address of this task is not known.
        """
        tasks = self._of(job_name)
        if not isinstance(task_index, Integral) or isinstance(task_index, bool) or task_index not in tasks:
            raise ClusterError(f"cluster: {job_name} has the indices {list(tasks)}, not {shown(task_index)}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by index, None for one that is not known.

        Args:
            job_name: ``chief``, ``worker``, ``ps`` or ``evaluator``.

        Returns:
            One entry for each index up to the last one that is known.

        Raises:
            ClusterError: there is no such job.
        """
        tasks = self._of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _of(self, job_name: str) -> dict[int, str]:
        if not isinstance(job_name, str) or job_name not in self._tasks:
            raise ClusterError(f"cluster: there is no job {shown(job_name)}; there are: {', '.join(self._tasks)}.")
        return self._tasks[job_name]

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == (other.as_dict() if isinstance(other, ClusterSpec) else other)

    __hash__ = None  # type: ignore[assignment]  # It can equal a dict, which has no hash.

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _parse_tasks(job: str, tasks: Any) -> dict[int, str]:
    """Return a dict from index to address, with ascending indices."""
    if job not in JOBS:
        raise ClusterError(f"cluster: unknown job {shown(job)}; expected one of {', '.join(JOBS)}.")
    if isinstance(tasks, Mapping):
        found = dict(sorted((_parse_index(job, index), address) for index, address in tasks.items()))
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        found = dict(enumerate(tasks))
    else:
        raise ClusterError(f"cluster: {job}: expected a list of addresses such as ['a:2222'], got {shown(tasks)}.")
    for index, address in found.items():
        split_address(f"cluster: {job} {index}", address)
    if job in SINGLE_JOBS and len(found) > 1:
        raise ClusterError(f"cluster: expected one {job} at most, got {len(found)}: {', '.join(found.values())}.")
    return found


def _parse_index(job: str, index: Any) -> int:
    """Return an index, which may be a text, as keys of JSON are."""
    if isinstance(index, bool) or not (isinstance(index, int) or (isinstance(index, str) and index.isdecimal())):
        raise ClusterError(f"cluster: {job}: expected whole numbers as indices, got {shown(index)}.")
    return int(index)


def _check_distinct(jobs: Mapping[str, Mapping[int, str]]) -> None:
    seen: dict[str, str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            if address in seen:
                raise ClusterError(
                    f"cluster: {seen[address]} and {job} {index} have one address, {address}. Give each its own."
                )
            seen[address] = f"{job} {index}"
