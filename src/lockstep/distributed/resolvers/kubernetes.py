"""Cluster resolvers for Kubernetes: the pods of an Indexed Job, of one replicated job of a JobSet, or of one group of a LeaderWorkerSet."""

from collections.abc import Mapping
from itertools import product

from lockstep.distributed.cluster.addresses import DEFAULT_PORT, join_address, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver


class KubernetesClusterResolver(EnvironmentResolver):
    """The pods of an Indexed Job or of a JobSet, one process each.

    Kubernetes sets ``JOB_COMPLETION_INDEX``; the manifest must set the rest (``docs/clusters.md`` has it in full).
    ``JOB_COMPLETIONS`` is the number in ``completions``. For a Job, ``JOB_NAME`` is its name and ``SERVICE_NAME`` its headless
    service, the ``subdomain`` of the pods. For a JobSet, ``JOBSET_NAME``, ``REPLICATED_JOB_NAME``, ``REPLICATED_JOB_REPLICAS``
    and ``JOB_INDEX`` are labels of the pod, and ``SERVICE_NAME`` is needed if its ``network`` names a subdomain.

    Counterpart of ``tf.distribute.cluster_resolver.KubernetesClusterResolver``, which asks the API server instead.

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import KubernetesClusterResolver
        >>> environ = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2", "JOB_NAME": "train", "SERVICE_NAME": "pods"}
        >>> KubernetesClusterResolver(environ)
        <KubernetesClusterResolver: worker 1 of 2 (train-1.pods:12421), worker 0 at train-0.pods:12421, from Kubernetes>
    """

    source = "Kubernetes"
    variables = (
        *("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_NAME", "SERVICE_NAME"),
        *("JOBSET_NAME", "REPLICATED_JOB_NAME", "REPLICATED_JOB_REPLICAS", "JOB_INDEX"),
    )
    hint_variables = (
        *(("JOB_COMPLETIONS", "1"), ("REPLICATED_JOB_REPLICAS", "1")),
        *(("JOBSET_NAME", None), ("REPLICATED_JOB_NAME", None)),
    )
    fix = "set it under env: in the manifest of the Job or JobSet; docs/clusters.md shows how."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True in a pod of an Indexed Job."""
        return "JOB_COMPLETION_INDEX" in environ

    def _read(self, variables: EnvReader) -> Membership:
        pod, pods = variables.index_and_count("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "pods")
        job, jobs = (0, 1)
        if "JOBSET_NAME" in variables.environ:
            job, jobs = variables.index_and_count("JOB_INDEX", "REPLICATED_JOB_REPLICAS", "jobs")
        names = _job_names(variables, jobs)
        service = _service(variables)
        others = [
            join_address(f"{name}-{number}.{service}", DEFAULT_PORT) for name, number in product(names, range(pods))
        ]
        coordinator = resolve_coordinator(variables.environ, lambda: (f"{names[0]}-0.{service}", DEFAULT_PORT))
        index = job * pods + pod
        addresses = (coordinator, *others[1:])
        return membership_of_group(WorkerGroup(pods * jobs, index, coordinator, addresses, source=self.source))


def _job_names(variables: EnvReader, jobs: int) -> list[str]:
    """Return the names of all jobs whose pods train; names of pods begin with them."""
    if "JOBSET_NAME" not in variables.environ:
        return [variables.text("JOB_NAME", "the name of the Job")]
    jobset = variables.text("JOBSET_NAME", "the name of the JobSet")
    name = variables.text("REPLICATED_JOB_NAME", "the name of the replicated job")
    return [f"{jobset}-{name}-{number}" for number in range(jobs)]


def _service(variables: EnvReader) -> str:
    """Return the headless service that names the pods; a JobSet makes one with its own name."""
    if "SERVICE_NAME" in variables.environ or "JOBSET_NAME" not in variables.environ:
        return variables.text("SERVICE_NAME", "the headless service")
    return variables.text("JOBSET_NAME", "the name of the JobSet")


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
    fix = "pass it on to this process from its pod, in which LeaderWorkerSet sets it, or update LeaderWorkerSet."

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
