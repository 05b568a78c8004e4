"""Cluster resolver for LeaderWorkerSet: the pods of one group, a leader and its workers."""

from collections.abc import Mapping

from lockstep.distributed.cluster.addresses import DEFAULT_PORT, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver


class LeaderWorkerSetClusterResolver(EnvironmentResolver):
    """The pods of one group of a LeaderWorkerSet (LWS) of Kubernetes, one process each; the leader is worker 0.

    LWS sets ``LWS_LEADER_ADDRESS``, ``LWS_GROUP_SIZE`` and ``LWS_WORKER_INDEX`` in every container. The groups (``replicas``) of a
    LeaderWorkerSet train independently of each other.

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import LeaderWorkerSetClusterResolver
        >>> environ = {"LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
        >>> LeaderWorkerSetClusterResolver(environ)
        <LeaderWorkerSetClusterResolver: worker 1 of 2, worker 0 at train-0.train.default:12421, from LeaderWorkerSet>
    """

    source = "LeaderWorkerSet"
    variables = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    cure = "LeaderWorkerSet sets it in its pods: pass it on to this process, or update LeaderWorkerSet."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True in a pod of a LeaderWorkerSet."""
        return any(name in environ for name in cls.variables)

    def _read(self, variables: EnvReader) -> Membership:
        index, workers = variables.index_and_count("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "pods")
        leader = variables.text("LWS_LEADER_ADDRESS", "the host of worker 0")
        coordinator = resolve_coordinator(variables.environ, lambda: (leader, DEFAULT_PORT))
        group = WorkerGroup(workers, index, coordinator, source=self.source)
        if workers > 1:
            check_reachable(group)
        return membership_of_group(group)
