"""Who is who where variables are kept on servers: one process coordinates, some compute, some keep.

A group that trains in step (``group.py``) is another view of the same cluster.
"""

import json
from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.cluster_spec import ALONE, ClusterSpec
from lockstep.distributed.cluster.membership import Membership
from lockstep.distributed.resolvers.base import ClusterResolver

__all__ = ["ProcessRole", "part_of"]

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
    """What one process is in a cluster whose variables are on servers, and where the others are.

    Args:
        job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``.
        index: its number in the job, from 0.
        chief: ``host:port`` of the process that coordinates.
        workers: ``host:port`` of all that compute, by index.
        servers: ``host:port`` of all that keep variables, by index.
        evaluator: ``host:port`` of the evaluator; None where the cluster names none.
        source: what said so, for messages: ``TF_CONFIG``.

    Example:
        >>> from lockstep.distributed.cluster.process_role import ProcessRole
        >>> part = ProcessRole("ps", 1, "a:1", ("b:1",), ("c:1", "d:1"))
        >>> part.name, part.name_of("chief", 0)
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
        """This process as messages name it."""
        return self.name_of(self.job, self.index)

    def name_of(self, job: str, index: int) -> str:
        """A process as messages name it, with its address where that is known."""
        addresses = self._addresses_of(job)
        number = "" if job in ALONE else f" {index} of {len(addresses)}"
        return f"{job}{number}" + (f" ({addresses[index]})" if addresses else "")

    def _addresses_of(self, job: str) -> tuple[str, ...]:
        evaluators = () if self.evaluator is None else (self.evaluator,)
        return {"chief": (self.chief,), "worker": self.workers, "ps": self.servers, "evaluator": evaluators}[job]


def part_of(resolver: ClusterResolver | None) -> ProcessRole:
    """What this process is where variables are kept on servers.

    Args:
        resolver: says who takes part; None: nothing does.

    Raises:
        ClusterError: the cluster lacks a chief, a worker or a ps, or an address of one, or its source knows no jobs.

    Example:
        >>> from lockstep.distributed.cluster.process_role import part_of
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
        >>> part = part_of(SimpleClusterResolver(cluster, task_type="worker", task_id=1, environ={}))
        >>> part.name, part.chief, part.servers
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
    _check_that_all_are_there(membership)
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


def _check_that_all_are_there(membership: Membership) -> None:
    spec = membership.spec
    if not all(_number(spec, job) for job in ("chief", "worker", "ps")):
        found = ", ".join(f"{_number(spec, job) or 'no'} {job}" for job in ("chief", "worker", "ps"))
        raise ClusterError(
            f"{membership.source}: {_STRATEGY} needs a chief, a worker or more, and a ps or more; the cluster has {found}. {_CURE}"
        )


def _number(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _addresses(membership: Membership, job: str) -> tuple[str, ...]:
    """By index, without a gap, as nobody knows how many are missing after the last."""
    tasks = membership.spec.job_tasks(job)
    known = tuple(address for address in tasks if address is not None)
    if len(known) < len(tasks):
        raise ClusterError(
            f"{membership.source}: {job} {tasks.index(None)} has no address; expected those of all, got {membership.spec!r}."
        )
    return known
