"""Membership of one process in a cluster: its task, and the group that it trains with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import host_of, split_address
from lockstep.distributed.cluster.cluster_spec import JOBS, ClusterSpec
from lockstep.distributed.cluster.ports import DEFAULT_PORT, resolve_coordinator
from lockstep.distributed.cluster.worker_group import WorkerGroup

__all__ = ["Membership", "find_membership", "membership_of_group"]

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
        raise ClusterError(f"{source}: unknown task type {job!r}; expected one of {', '.join(JOBS)}.")
    listed = spec.task_indices(job) if job in spec.jobs else []
    if index not in listed and (job != "evaluator" or listed):
        has = f"{job} {', '.join(map(str, listed))}" if listed else f"no {job}, only {', '.join(spec.jobs)}"
        raise ClusterError(f"{source}: this process is {job} {index}, but the cluster has {has}.")
    if not training:
        raise ClusterError(f"{source}: no process trains: expected a chief or a worker in the cluster, got {spec!r}.")
    return job, index


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
