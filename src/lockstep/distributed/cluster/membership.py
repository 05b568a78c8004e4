"""Membership of one process in a cluster: its task, and the group of workers that it trains with."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral

from lockstep._errors import ClusterError, OptionError, instance_of, shown, whole_number
from lockstep.distributed.cluster.addresses import (
    DEFAULT_PORT,
    host_of,
    is_loopback,
    resolve_coordinator,
    split_address,
)
from lockstep.distributed.cluster.cluster_spec import JOBS, ClusterSpec


@dataclass(frozen=True)
class WorkerGroup:
    """The processes that train in step, and which of them this one is.

    Args:
        workers: their number, at least 1. A chief is worker 0.
        index: this process's number, from 0.
        coordinator: ``host:port`` of worker 0.
        addresses: of all workers in order, the coordinator first; None if the scheduler does not provide them.
        local_index: this process's number among those of its machine, from 0.
        local_workers: number of these processes on this machine, which share its devices.
        source: of the description, for messages: ``TF_CONFIG``, ``Slurm``.
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
        index = whole_number("index", index, least=0, most=self.workers - 1)
        if self.addresses is not None:
            address = f" ({self.addresses[index]})"
        else:
            address = f" ({self.coordinator})" if index == 0 else ""
        return f"worker {index} of {self.workers}{address}"

    def _check_types(self) -> None:
        instance_of(str, "source", self.source, "a text")
        whole_number(f"{self.source}: workers", self.workers, least=None, most=sys.maxsize)
        for name in ("index", "local_index", "local_workers"):
            whole_number(f"{self.source}: {name}", vars(self)[name], least=None, most=sys.maxsize)
        for name in ("addresses", "notes"):
            texts = vars(self)[name]
            if not (texts is None and name == "addresses") and not (
                isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
            ):
                raise OptionError(f"{self.source}: {name}: expected a tuple of texts, got {shown(texts)}.")

    def _check_numbers(self) -> None:
        if self.workers < 1:
            raise ClusterError(f"{self.source}: expected at least 1 worker, got {self.workers}.")
        if not 0 <= self.index < self.workers:
            raise ClusterError(
                f"{self.source}: index: {self.workers} workers have the indices 0 to {self.workers - 1}; got {self.index}."
            )
        if not 0 <= self.local_index < self.local_workers <= self.workers:
            raise ClusterError(
                f"{self.source}: local_index, local_workers: this process is number {self.local_index} of {self.local_workers} on its machine, of "
                f"{self.workers} in all; expected numbers that count from 0, and no more here than in all."
            )

    def _check_addresses(self, addresses: tuple[str, ...]) -> None:
        if len(addresses) != self.workers or addresses[0] != self.coordinator:
            raise ClusterError(
                f"{self.source}: expected {self.workers} addresses, {self.coordinator} first, got {list(addresses)}."
            )
        for index, address in enumerate(addresses):
            host, _ = split_address(f"{self.source}: worker {index}", address)
            if address in addresses[:index]:
                raise ClusterError(
                    f"{self.source}: worker {addresses.index(address)} and worker {index} have one address, {address}; "
                    "give each process its own port."
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
            "own machine. Give worker 0 the name or address that its machine has in the network, or set "
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
        source: of the description, for messages.
        group: the processes that train in step with it; None for a ``ps``, which does not train.
        has_jobs: whether the source names jobs; else it counts processes, and all of them are workers.
    """

    spec: ClusterSpec
    task_type: str
    task_id: int
    source: str
    group: WorkerGroup | None
    has_jobs: bool = True

    def training_group(self) -> WorkerGroup:
        """Return the group of a process that trains.

        Raises:
            ClusterError: this process is a ``ps``.
        """
        if self.group is None:
            raise ClusterError(
                f"{self.source}: this process is {self.task_type} {self.task_id}, and MultiWorkerMirroredStrategy has no work for "
                "it, as its workers keep no parameters on servers. Do not start it and remove 'ps' from the cluster, or train "
                "with lockstep.ParameterServerStrategy."
            )
        return self.group

    def with_notes(self, *notes: str) -> "Membership":
        """Return the same with further sentences for the user, if the process trains."""
        if self.group is None:
            return self
        return replace(self, group=replace(self.group, notes=(*self.group.notes, *notes)))


def membership_of_group(group: WorkerGroup) -> Membership:
    """Return the membership of a worker whose scheduler counts processes and knows no jobs."""
    known = {0: group.coordinator} if group.addresses is None else dict(enumerate(group.addresses))
    return Membership(ClusterSpec({"worker": known}), "worker", group.index, group.source, group, has_jobs=False)


def find_membership(
    source: str, spec: ClusterSpec, task_type: str | None, task_id: int | None, environ: Mapping[str, str]
) -> Membership:
    """Return the membership of a process in a cluster whose description names jobs.

    Args:
        source: of the description, for messages.
        spec: the cluster.
        task_type: this process's job; may be None only if a single process trains.
        task_id: its index in the job; likewise.
        environ: may set the address of worker 0.

    Raises:
        ClusterError: the task is missing or not in the cluster; or no process trains.
    """
    job, index = _check_task(source, spec, task_type, task_id)
    if job == "ps":
        return Membership(spec, job, index, source, None)
    if job == "evaluator":
        return Membership(spec, job, index, source, _evaluator_group(source, spec, index))
    tasks = [
        (name, number) for name in _TRAINING if name in spec.jobs for number in range(_count_tasks(source, spec, name))
    ]
    addresses = _training_addresses([spec.task_address(*task) for task in tasks], environ)
    hosts = [host_of(spec.task_address(*task)).lower() for task in tasks]
    own = tasks.index((job, index))
    group = WorkerGroup(
        workers=len(tasks),
        index=own,
        coordinator=addresses[0],
        addresses=addresses,
        local_index=hosts[:own].count(hosts[own]),
        local_workers=hosts.count(hosts[own]),
        source=source,
        notes=_notes(source, spec, len(tasks)),
    )
    return Membership(spec, job, index, source, group)


def _check_task(source: str, spec: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    training = [name for name in _TRAINING if name in spec.jobs and spec.num_tasks(name)]
    if job is None and index is None and len(training) == 1 and spec.num_tasks(training[0]) == 1:
        return training[0], spec.task_indices(training[0])[0]
    if job is None or index is None:
        raise ClusterError(
            f"{source}: the task is missing; expected the type and index of this process, such as 'worker' and 0, as the "
            f"cluster has {', '.join(f'{spec.num_tasks(name)} {name}' for name in spec.jobs)}."
        )
    if job not in JOBS:
        raise ClusterError(f"{source}: unknown task type {shown(job)}; expected one of {', '.join(JOBS)}.")
    listed = spec.task_indices(job) if job in spec.jobs else []
    if (
        not isinstance(index, Integral)
        or isinstance(index, bool)
        or (index not in listed and (job != "evaluator" or listed))
    ):
        has = f"{job} {', '.join(map(str, listed))}" if listed else f"no {job}, only {', '.join(spec.jobs)}"
        raise ClusterError(f"{source}: this process is {job} {shown(index)}, but the cluster has {has}.")
    if not training:
        raise ClusterError(f"{source}: no process trains: expected a chief or a worker in the cluster, got {spec!r}.")
    return job, int(index)


def _count_tasks(source: str, spec: ClusterSpec, job: str) -> int:
    """Return the number of tasks of a job; ClusterError if one of them has no address."""
    if None in spec.job_tasks(job):
        missing = spec.job_tasks(job).index(None)
        raise ClusterError(f"{source}: {job} {missing} has no address; expected those of all that train, got {spec!r}.")
    return spec.num_tasks(job)


def _training_addresses(addresses: list[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    return resolve_coordinator(environ, lambda: split_address("worker 0", addresses[0])), *addresses[1:]


def _evaluator_group(source: str, spec: ClusterSpec, index: int) -> WorkerGroup:
    is_listed = "evaluator" in spec.jobs and spec.num_tasks("evaluator")
    own = spec.task_address("evaluator", index) if is_listed else f"127.0.0.1:{DEFAULT_PORT}"
    note = f"{source}: this process is the evaluator: it runs alone and is none of the workers that train."
    return WorkerGroup(1, 0, own, (own,), source=source, notes=(note,))


def _notes(source: str, spec: ClusterSpec, workers: int) -> tuple[str, ...]:
    servers = spec.num_tasks("ps") if "ps" in spec.jobs else 0
    if not servers:
        return ()
    are = "worker trains" if workers == 1 else "workers train"
    return (
        f"{source}: {workers} {are} in step. The {servers} ps in the cluster {'is' if servers == 1 else 'are'} ignored, as "
        "there is nothing for parameter servers to do; remove them, and compute batch sizes from num_replicas_in_sync, "
        f"not from the number of tasks ({workers + servers}).",
    )
