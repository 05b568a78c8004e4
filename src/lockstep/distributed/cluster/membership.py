"""Membership of one process in a cluster: its task, and the group of workers that it trains with.

:class:`ClusterSpec`, the tasks of a cluster by job, is the counterpart of ``tf.train.ClusterSpec``.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lockstep._errors import ClusterError, OptionError, instance_of, is_decimal, shown, whole_number
from lockstep.distributed.cluster.addresses import (
    DEFAULT_PORT,
    host_of,
    is_loopback,
    resolve_coordinator,
    split_address,
)

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
            raise ClusterError(
                f"cluster: expected a dict of jobs such as {{'worker': ['a:2222']}}, got {shown(jobs)}. Fix: give each job a list of addresses."
            )
        self._tasks = {job: _parse_tasks(job, tasks) for job, tasks in jobs.items()}
        if not any(self._tasks.values()):
            raise ClusterError(
                f"cluster: expected at least one task, got {shown(dict(jobs))}. Fix: add the address of a worker."
            )
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
            raise ClusterError(
                f"cluster: {job_name} has the indices {list(tasks)}, not {shown(task_index)}. Fix: pass one of these."
            )
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
            raise ClusterError(
                f"cluster: there is no job {shown(job_name)}; there are: {', '.join(self._tasks)}. Fix: pass one of these."
            )
        return self._tasks[job_name]

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == (other.as_dict() if isinstance(other, ClusterSpec) else other)

    __hash__ = None  # type: ignore[assignment]  # It can equal a dict, which has no hash.

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _parse_tasks(job: str, tasks: Any) -> dict[int, str]:
    """Return a dict from index to address, with ascending indices."""
    if job not in JOBS:
        raise ClusterError(
            f"cluster: unknown job {shown(job)}; expected one of {', '.join(JOBS)}. Fix: call it by one of these names."
        )
    if isinstance(tasks, Mapping):
        found = dict(sorted((_parse_index(job, index), address) for index, address in tasks.items()))
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        found = dict(enumerate(tasks))
    else:
        raise ClusterError(
            f"cluster: {job}: expected a list of addresses such as ['a:2222'], got {shown(tasks)}. Fix: put them into a list."
        )
    for index, address in found.items():
        split_address(f"cluster: {job} {index}", address)
    if job in SINGLE_JOBS and len(found) > 1:
        raise ClusterError(
            f"cluster: expected one {job} at most, got {len(found)}: {', '.join(found.values())}. Fix: keep one of them."
        )
    return found


def _parse_index(job: str, index: Any) -> int:
    """Return an index, which may be a text, as keys of JSON are."""
    if isinstance(index, bool) or not (isinstance(index, int) or (isinstance(index, str) and is_decimal(index))):
        raise ClusterError(
            f"cluster: {job}: expected whole numbers as indices, got {shown(index)}. Fix: number the tasks from 0."
        )
    return int(index)


def _check_distinct(jobs: Mapping[str, Mapping[int, str]]) -> None:
    seen: dict[str, str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            if address in seen:
                raise ClusterError(
                    f"cluster: {seen[address]} and {job} {index} have one address, {address}. Fix: give each its own."
                )
            seen[address] = f"{job} {index}"


@dataclass(frozen=True)
class WorkerGroup:
    """The processes that train in step, and which of them this one is.

    Args:
        workers: their number, at least 1. A chief is worker 0.
        index: this process's number, from 0.
        coordinator: ``host:port`` of worker 0.
        addresses: addresses of all workers in order, the coordinator first; None if the scheduler does not provide them.
        local_index: this process's number among those of its machine, from 0.
        local_workers: number of these processes on this machine, which share its devices.
        source: source of the description, for messages: ``TF_CONFIG``, ``Slurm``.
        notes: sentences for the user about settings that were found and not used.

    Raises:
        ClusterError: the numbers contradict each other; the network is not used.
        OptionError: an argument has another type.

    Example:
        >>> from lockstep.distributed.cluster.membership import WorkerGroup
        >>> group = WorkerGroup(workers=2, index=1, coordinator="a:12421", addresses=("a:12421", "b:12421"))
        >>> group.name, group.name_of(0)
        ('worker 1 of 2 (b:12421)', 'worker 0 of 2 (a:12421)')
    """

    workers: int
    index: int
    coordinator: str
    addresses: tuple[str, ...] | None = None
    local_index: int = 0
    local_workers: int = 1
    source: str = "arguments"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        self._check_numbers()
        split_address(f"{self.source}: the coordinator", self.coordinator)
        if self.addresses is not None:
            self._check_addresses(self.addresses)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, the only one that prints and writes."""
        return self.index == 0

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return self.name_of(self.index)

    def name_of(self, index: int) -> str:
        """Return the name of a worker in messages, with its address if that is known.

        Args:
            index: its number, from 0.

        Returns:
            Such as ``worker 1 of 2 (b:12421)``.
        """
        index = whole_number("index", index, minimum=0, maximum=self.workers - 1)
        if self.addresses is not None:
            address = f" ({self.addresses[index]})"
        else:
            address = f" ({self.coordinator})" if index == 0 else ""
        return f"worker {index} of {self.workers}{address}"

    def _check_types(self) -> None:
        instance_of(str, "source", self.source, "a text")
        for name in ("workers", "index", "local_index", "local_workers"):
            whole_number(f"{self.source}: {name}", vars(self)[name], minimum=None, maximum=sys.maxsize)
        for name, texts in {"addresses": () if self.addresses is None else self.addresses, "notes": self.notes}.items():
            if not (isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)):
                raise OptionError(
                    f"{self.source}: {name}: expected a tuple of texts, got {shown(texts)}. Fix: pass a tuple of str."
                )

    def _check_numbers(self) -> None:
        if self.workers < 1:
            raise ClusterError(
                f"{self.source}: expected at least 1 worker, got {self.workers}. Fix: count this process, too."
            )
        if not 0 <= self.index < self.workers:
            raise ClusterError(
                f"{self.source}: index: {self.workers} workers have the indices 0 to {self.workers - 1}; got {self.index}. Fix: number them from 0."
            )
        if not 0 <= self.local_index < self.local_workers <= self.workers:
            raise ClusterError(
                f"{self.source}: local_index, local_workers: this process is number {self.local_index} of {self.local_workers} on its machine, of "
                f"{self.workers} in all; expected numbers that count from 0, and no more here than in all. Fix: number the processes of each "
                "machine from 0."
            )

    def _check_addresses(self, addresses: tuple[str, ...]) -> None:
        if len(addresses) != self.workers or addresses[0] != self.coordinator:
            raise ClusterError(
                f"{self.source}: expected {self.workers} addresses, {self.coordinator} first, got {list(addresses)}. Fix: list those of all "
                "workers in their order."
            )
        for index, address in enumerate(addresses):
            host, _ = split_address(f"{self.source}: worker {index}", address)
            if address in addresses[:index]:
                raise ClusterError(
                    f"{self.source}: worker {addresses.index(address)} and worker {index} have one address, {address}. "
                    "Fix: give each process its own port."
                )
            if not is_loopback(host):
                check_reachable(self)


def check_reachable(group: WorkerGroup) -> None:
    """Check that the workers on other machines can reach worker 0, for a group that is on several machines.

    Raises:
        ClusterError: the coordinator is ``localhost`` or the like.
    """
    host = host_of(group.coordinator)
    if is_loopback(host):
        raise ClusterError(
            f"{group.source}: {group.name_of(0)} cannot be reached by workers on other machines, where {host!r} is their "
            "own machine. Fix: give worker 0 the name or address that its machine has in the network, or set "
            "LOCKSTEP_COORDINATOR=host:port on every worker."
        )


_TRAINING = ("chief", "worker")  # In the order of their indices in the group.


@dataclass(frozen=True)
class Membership:
    """The task of one process in a cluster.

    Args:
        spec: the tasks whose addresses are known.
        task_type: this process's job.
        task_id: its index in the job.
        source: source of the description, for messages.
        group: the processes that train in step with it; None for a ``ps``, which does not train.
        has_jobs: whether the source names jobs; else it counts processes, and all of them are workers.
    """

    spec: ClusterSpec
    task_type: str
    task_id: int
    source: str
    group: WorkerGroup | None
    has_jobs: bool = True


def membership_of_group(group: WorkerGroup) -> Membership:
    """Return the membership of a worker whose scheduler counts processes and knows no jobs."""
    known = {0: group.coordinator} if group.addresses is None else dict(enumerate(group.addresses))
    return Membership(ClusterSpec({"worker": known}), "worker", group.index, group.source, group, has_jobs=False)


def find_membership(
    source: str, spec: ClusterSpec, task_type: str | None, task_id: int | None, environ: Mapping[str, str]
) -> Membership:
    """Return the membership of a process in a cluster whose description names jobs; its task may be None if only a single process trains.

    Raises:
        ClusterError: the task is missing or not in the cluster; or no process trains.
    """
    job, index = _check_task(source, spec, task_type, task_id)
    if job == "ps":
        return Membership(spec, job, index, source, None)
    if job == "evaluator":
        return Membership(spec, job, index, source, _evaluator_group(source, spec, index))
    chief, workers = (addresses_of(source, spec, name) for name in _TRAINING)
    listed = [*chief, *workers]
    coordinator = resolve_coordinator(environ, lambda: split_address("worker 0", listed[0]))
    hosts = [host_of(address).lower() for address in listed]
    own = index if job == "chief" else len(chief) + index
    group = WorkerGroup(
        workers=len(listed),
        index=own,
        coordinator=coordinator,
        addresses=(coordinator, *listed[1:]),
        local_index=hosts[:own].count(hosts[own]),
        local_workers=hosts.count(hosts[own]),
        source=source,
        notes=_notes(source, spec, len(listed)),
    )
    return Membership(spec, job, index, source, group)


def _check_task(source: str, spec: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    training = [name for name in _TRAINING if count_tasks(spec, name)]
    if job is None and index is None and len(training) == 1 and spec.num_tasks(training[0]) == 1:
        return training[0], spec.task_indices(training[0])[0]
    if job is None or index is None:
        raise ClusterError(
            f"{source}: the task is missing; expected the type and index of this process, as the cluster has "
            f"{', '.join(f'{spec.num_tasks(name)} {name}' for name in spec.jobs)}. Fix: give both, such as 'worker' and 0."
        )
    if job not in JOBS:
        raise ClusterError(
            f"{source}: unknown task type {shown(job)}; expected one of {', '.join(JOBS)}. Fix: give one of these names."
        )
    listed = spec.task_indices(job) if job in spec.jobs else []
    if (
        not isinstance(index, Integral)
        or isinstance(index, bool)
        or (index not in listed and (job != "evaluator" or listed))
    ):
        has = f"{job} {', '.join(map(str, listed))}" if listed else f"no {job}, only {', '.join(spec.jobs)}"
        raise ClusterError(
            f"{source}: this process is {job} {shown(index)}, but the cluster has {has}. Fix: add its address to the cluster, or correct its "
            "type and index."
        )
    if not training:
        raise ClusterError(
            f"{source}: no process trains: expected a chief or a worker in the cluster, got {spec!r}. Fix: add the address of a worker."
        )
    return job, int(index)


def count_tasks(spec: ClusterSpec, job: str) -> int:
    """Return the number of tasks of a job whose address is known, 0 if the cluster has no such job."""
    return spec.num_tasks(job) if job in spec.jobs else 0


def addresses_of(source: str, spec: ClusterSpec, job: str) -> tuple[str, ...]:
    """Return the addresses of a job by index, none if the cluster has no such job; ClusterError if one of them is not known."""
    tasks = spec.job_tasks(job) if job in spec.jobs else []
    known = tuple(address for address in tasks if address is not None)
    if len(known) < len(tasks):
        raise ClusterError(
            f"{source}: {job} {tasks.index(None)} has no address; expected those of all, got {spec!r}. Fix: add it."
        )
    return known


def _evaluator_group(source: str, spec: ClusterSpec, index: int) -> WorkerGroup:
    own = spec.task_address("evaluator", index) if count_tasks(spec, "evaluator") else f"127.0.0.1:{DEFAULT_PORT}"
    note = f"{source}: this process is the evaluator: it runs alone and is none of the workers that train."
    return WorkerGroup(1, 0, own, (own,), source=source, notes=(note,))


def _notes(source: str, spec: ClusterSpec, workers: int) -> tuple[str, ...]:
    servers = count_tasks(spec, "ps")
    if not servers:
        return ()
    are = "worker trains" if workers == 1 else "workers train"
    return (
        f"{source}: {workers} {are} in step. The {servers} ps in the cluster {'is' if servers == 1 else 'are'} ignored, as "
        "there is nothing for parameter servers to do; remove them, and compute batch sizes from num_replicas_in_sync, "
        f"not from the number of tasks ({workers + servers}).",
    )
