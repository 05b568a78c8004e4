"""Which schedulers and launchers are known, and in which order they are looked for."""

import os
from collections.abc import Mapping, Sequence

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.ports import COORDINATOR
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.resolvers.base import ClusterResolver, EnvironmentResolver
from lockstep.distributed.resolvers.jax_env import JaxClusterResolver
from lockstep.distributed.resolvers.kubernetes import KubernetesClusterResolver
from lockstep.distributed.resolvers.open_mpi import OpenMpiClusterResolver
from lockstep.distributed.resolvers.ray_train import RayClusterResolver
from lockstep.distributed.resolvers.simple import SimpleClusterResolver
from lockstep.distributed.resolvers.slurm import SlurmClusterResolver
from lockstep.distributed.resolvers.tf_config import TFConfigClusterResolver
from lockstep.distributed.resolvers.torchrun import TorchrunClusterResolver

__all__ = [
    "RESOLVERS",
    "ClusterResolver",
    "EnvironmentResolver",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "OpenMpiClusterResolver",
    "RayClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "resolve",
]

# Variables are inherited, so that a process sees those of everything above it. The one that knows it best stands first:
# from what was set for this one process on purpose, over what started it, to what only gave it its machines.
RESOLVERS: tuple[type[EnvironmentResolver], ...] = (
    TFConfigClusterResolver,  # The user's own words, maybe in this very script; lockstep run sets it, too.
    TorchrunClusterResolver,  # Set for each process by its parent, which srun, mpirun or a pod may have started.
    JaxClusterResolver,  # Set for each process by hand or in a manifest, also in an Indexed Job.
    OpenMpiClusterResolver,  # mpirun starts its daemons with srun, and its processes inherit the daemons' SLURM_*.
    RayClusterResolver,  # Ray's workers inherit what `ray start` was started with, srun or a pod.
    SlurmClusterResolver,
    KubernetesClusterResolver,  # Last, as pods may run any of those above.
)


def resolve(
    environ: Mapping[str, str] = os.environ, resolvers: Sequence[type[EnvironmentResolver]] = RESOLVERS
) -> ClusterResolver | None:
    """Find out who trains together, from the first scheduler or launcher whose variables are set.

    Where others are set as well and say something else, a note of the group says what was not used.

    Args:
        environ: names and values.
        resolvers: in the order in which they are tried.

    Returns:
        The resolver; None where no variables are set, that is for a process that trains alone.

    Raises:
        ClusterError: the variables of the first one are incomplete or contradict each other.

    Example:
        >>> from lockstep.cluster_resolver import resolve
        >>> environ = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
        >>> resolve(environ)
        <JaxClusterResolver: worker 1 of 2, worker 0 at a:1234, from JAX's variables>
        >>> resolve({}) is None
        True
    """
    present = [resolver for resolver in resolvers if resolver.is_present(environ)]
    if not present:
        return None
    first = present[0](environ=environ)
    group = first.membership.group
    if group is None:  # It trains in step with nobody, whatever the others say.
        return first
    known = {**environ, COORDINATOR: group.coordinator}  # Those that are not used need not look for worker 0.
    return first.noting(*(note for other in present[1:] for note in _not_used(other, known, group)))


def _not_used(other: type[EnvironmentResolver], environ: Mapping[str, str], group: WorkerGroup) -> list[str]:
    """A sentence if ``other`` says something else than the group that counts."""
    try:
        ignored = other(environ=environ).group()
    except ClusterError:  # It need not be complete to be ignored.
        return []
    if ignored.workers == 1 or (ignored.workers, ignored.index) == (group.workers, group.index):
        return []
    return [
        f"{ignored.source} says that this process is worker {ignored.index} of {ignored.workers}. That is not used, as "
        f"{group.source}, which is nearer to the process, says worker {group.index} of {group.workers}; pass a resolver to "
        "the strategy to choose."
    ]
