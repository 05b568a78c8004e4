"""Roles of the processes of a cluster with parameter servers: chief, workers, servers, evaluator.

A group that trains in step (``worker_group.py``) is another view of the same cluster.
"""

import json
from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.cluster_spec import SINGLE_JOBS, ClusterSpec
from lockstep.distributed.cluster.membership import Membership
from lockstep.distributed.resolvers.base import ClusterResolver

__all__ = ["ProcessRole", "find_role"]

_STRATEGY = "lockstep.ParameterServerStrategy"
_EXAMPLE = {
    "cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]},
    "task": {"type": "worker", "index": 0},
}
_CURE = (
    f"Set TF_CONFIG for each process, such as {json.dumps(_EXAMPLE)}; on one machine, "
    "'lockstep run --workers 2 --servers 1 SCRIPT' does so."
)


@dataclass(frozen=True)
class ProcessRole:
    """Role of one process in a cluster with parameter servers, and the addresses of all.

    Args:
        job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
        index: its number in the job, from 0.
        chief: ``host:port`` of the chief.
        workers: ``host:port`` of the workers, by index.
        servers: ``host:port`` of the parameter servers, by index.
        evaluator: ``host:port`` of the evaluator; None if the cluster has none.
        source: of the description, for messages: ``TF_CONFIG``.

    Example:
        >>> from lockstep.distributed.cluster.process_role import ProcessRole
        >>> role = ProcessRole("ps", 1, "a:1", ("b:1",), ("c:1", "d:1"))
        >>> role.name, role.name_of("chief", 0)
        ('ps 1 of 2 (d:1)', 'chief (a:1)')
    """

    job: str
    index: int
    chief: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    evaluator: str | None = None
    source: str = "arguments"

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return self.name_of(self.job, self.index)

    def name_of(self, job: str, index: int) -> str:
        """Return the name of a process in messages, with its address if that is known."""
        addresses = self._addresses_of(job)
        number = "" if job in SINGLE_JOBS else f" {index} of {len(addresses)}"
        return f"{job}{number}" + (f" ({addresses[index]})" if addresses else "")

    def _addresses_of(self, job: str) -> tuple[str, ...]:
        evaluators = () if self.evaluator is None else (self.evaluator,)
        return {"chief": (self.chief,), "worker": self.workers, "ps": self.servers, "evaluator": evaluators}[job]


def find_role(resolver: ClusterResolver | None) -> ProcessRole:
    """Return the role of this process in a cluster with parameter servers.

    Args:
        resolver: describes the cluster; None: no description was found.

    Raises:
        ClusterError: the cluster lacks a chief, a worker or a ps, or an address of one, or its source knows no jobs.

    Example:
        >>> from lockstep.distributed.cluster.process_role import find_role
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
        >>> role = find_role(SimpleClusterResolver(cluster, task_type="worker", task_id=1, environ={}))
        >>> role.name, role.chief, role.servers
        ('worker 1 of 2 (c:1)', 'a:1', ('d:1',))
    """
    if resolver is None:
        raise ClusterError(f"{_STRATEGY}: nothing says which process is chief, worker or ps. {_CURE}")
    membership = resolver.membership
    if not membership.has_jobs:
        raise ClusterError(
            f"{membership.source} counts processes and knows no jobs, so that nothing says which of them is chief, worker or ps, as "
            f"{_STRATEGY} needs it. {_CURE}"
        )
    _check_complete(membership)
    addresses = {job: _addresses(membership, job) for job in membership.spec.jobs}
    return ProcessRole(
        job=membership.task_type,
        index=membership.task_id,
        chief=addresses["chief"][0],
        workers=addresses["worker"],
        servers=addresses["ps"],
        evaluator=next(iter(addresses.get("evaluator", ())), None),
        source=membership.source,
    )


def _check_complete(membership: Membership) -> None:
    spec = membership.spec
    if not all(_count(spec, job) for job in ("chief", "worker", "ps")):
        found = ", ".join(f"{_count(spec, job) or 'no'} {job}" for job in ("chief", "worker", "ps"))
        raise ClusterError(
            f"{membership.source}: {_STRATEGY} needs a chief, a worker or more, and a ps or more; the cluster has {found}. {_CURE}"
        )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _addresses(membership: Membership, job: str) -> tuple[str, ...]:
    """Return the addresses of a job by index; ClusterError if one of them is not known."""
    tasks = membership.spec.job_tasks(job)
    known = tuple(address for address in tasks if address is not None)
    if len(known) < len(tasks):
        raise ClusterError(
            f"{membership.source}: {job} {tasks.index(None)} has no address; expected those of all, got {membership.spec!r}."
        )
    return known
