"""Cluster resolvers, and the order in which :func:`resolve` looks for schedulers and launchers.

A new one is a file here and a line in ``RESOLVERS``.
"""

import os
from collections.abc import Mapping, Sequence

from lockstep._errors import ClusterError, OptionError, sequence_of, shown
from lockstep._logging import listed
from lockstep.distributed.cluster.addresses import COORDINATOR
from lockstep.distributed.cluster.env_reader import GENERATION
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.resolvers.base import ClusterResolver, EnvironmentResolver, check_environ, check_resolver
from lockstep.distributed.resolvers.kubernetes import KubernetesClusterResolver, LeaderWorkerSetClusterResolver
from lockstep.distributed.resolvers.open_mpi import OpenMpiClusterResolver
from lockstep.distributed.resolvers.ray_train import RayClusterResolver
from lockstep.distributed.resolvers.simple import JaxClusterResolver, SimpleClusterResolver
from lockstep.distributed.resolvers.slurm import SlurmClusterResolver
from lockstep.distributed.resolvers.tf_config import TFConfigClusterResolver
from lockstep.distributed.resolvers.torchrun import TorchrunClusterResolver
from lockstep.distributed.resolvers.tpu_pod import TpuPodClusterResolver

__all__ = [
    "RESOLVERS",
    "ClusterResolver",
    "EnvironmentResolver",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "LeaderWorkerSetClusterResolver",
    "OpenMpiClusterResolver",
    "RayClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "TpuPodClusterResolver",
    "check_resolver",
    "notes_if_alone",
    "resolve",
]

# Variables are inherited, so a process sees those of all its parents. The most specific source is first: variables that were set
# for this process, then those of the launcher that started it, then those of the scheduler that only provided its machines.
RESOLVERS: tuple[type[EnvironmentResolver], ...] = (
    TFConfigClusterResolver,  # Written by the user, maybe in this very script; lockstep run sets it, too.
    TorchrunClusterResolver,  # Set for each process by its parent, which srun, mpirun or a pod may have started.
    JaxClusterResolver,  # Set for each process by hand or in a manifest, also in an Indexed Job.
    OpenMpiClusterResolver,  # mpirun starts its daemons with srun, and its processes inherit the daemons' SLURM_*.
    RayClusterResolver,  # Ray's workers inherit what `ray start` was started with, srun or a pod.
    SlurmClusterResolver,
    TpuPodClusterResolver,  # The hosts that libtpu connects; a group of LeaderWorkerSet may have further pods without TPUs.
    LeaderWorkerSetClusterResolver,
    KubernetesClusterResolver,  # Last, as pods may run any of the others.
)


_KINDS = "classes of resolvers such as lockstep.cluster_resolver.RESOLVERS"


def resolve(
    environ: Mapping[str, str] = os.environ, resolvers: Sequence[type[EnvironmentResolver]] = RESOLVERS
) -> ClusterResolver | None:
    """Return the resolver of the first scheduler or launcher whose variables are set, and if possible number this process.

    If variables of another one are set, too, and contradict it, a note of the group says what was not used. If the process trains
    alone, a note says which variables of jobs of several processes are set and do not suffice (see :func:`notes_if_alone` if there is no resolver).

    Args:
        environ: names and values.
        resolvers: in the order in which they are tried.

    Returns:
        The resolver; None if no variables are set, that is for a process that trains alone.

    Raises:
        ClusterError: the variables of the first one are incomplete or contradict each other.
        OptionError: an argument has another type.

    Example:
        >>> from lockstep.cluster_resolver import resolve
        >>> environ = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
        >>> resolve(environ)
        <JaxClusterResolver: worker 1 of 2, worker 0 at a:1234, from JAX's variables>
        >>> resolve({}) is None
        True
    """
    check_environ(environ)
    for kind in sequence_of("resolvers", resolvers, _KINDS):
        if not (isinstance(kind, type) and issubclass(kind, EnvironmentResolver)):
            raise OptionError(f"resolvers: expected {_KINDS}, got {shown(kind)}. Fix: pass classes.")
    present = [resolver for resolver in resolvers if resolver.is_present(environ)]
    present.sort(key=lambda resolver: not resolver._is_numbered(environ))
    if not present:
        return None
    first = present[0](environ=environ)
    group = first.membership.group
    if group is None:  # A parameter server has no group to compare.
        return first
    known = {**environ, COORDINATOR: group.coordinator}  # The other resolvers need not look for worker 0.
    notes = [note for other in present[1:] for note in _contradiction(other, known, group)]
    return first.noting(*notes, *(notes_if_alone(environ, resolvers) if group.workers == 1 else ()))


def notes_if_alone(
    environ: Mapping[str, str], resolvers: Sequence[type[EnvironmentResolver]] = RESOLVERS
) -> tuple[str, ...]:
    """Return a note for a process that trains alone though variables of jobs of several processes are set; else nothing."""
    unused = [(kind.source, names, kind.fix) for kind in resolvers if (names := kind.unused_variables(environ))]
    if environ.get("PMI_SIZE", "").strip() not in ("", "1"):
        unused.append(("MPICH or Intel MPI", ["PMI_SIZE"], JaxClusterResolver.fix))
    if not unused:
        return ()
    found = "; ".join(f"{listed(names)} of {source}" for source, names, _ in unused)
    return (
        f"trains alone, though variables of jobs of several processes are set: {found}. They do not say which processes "
        f"train together. Fix, if there are others: {unused[0][2]}",
    )


def _contradiction(other: type[EnvironmentResolver], environ: Mapping[str, str], group: WorkerGroup) -> list[str]:
    """Return a sentence if ``other`` contradicts the group that is used."""
    try:
        ignored = other(environ=environ).group()
    except ClusterError as error:  # Its variables are incomplete, and not used.
        is_told = group.workers == 1 and GENERATION not in environ
        return [f"{error} That is not used, as {group.source} says that one process trains."] if is_told else []
    if (ignored.workers, ignored.index) == (group.workers, group.index):
        return []
    if str(ignored.workers) in ("1", environ.get("GROUP_WORLD_SIZE")):  # It has started a launcher, on each node.
        return []
    return [
        f"{ignored.source} says that this process is worker {ignored.index} of {ignored.workers}. That is not used, as "
        f"{group.source}, which is nearer to the process, says worker {group.index} of {group.workers}; pass a resolver to "
        "the strategy to choose."
    ]
