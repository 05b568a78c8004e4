"""Cluster resolver for JAX's variables, which Kubeflow Trainer or the user sets."""

from collections.abc import Mapping

from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, membership_of_group
from lockstep.distributed.cluster.ports import DEFAULT_PORT, resolve_coordinator
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.resolvers.base import EnvironmentResolver

__all__ = ["JaxClusterResolver"]

_ADDRESS = "JAX_COORDINATOR_ADDRESS"


class JaxClusterResolver(EnvironmentResolver):
    """Processes for which JAX's variables are set: by hand, in a manifest, or by Kubeflow Trainer.

    Reads ``JAX_COORDINATOR_ADDRESS`` (``host:port``), ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID``.

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import JaxClusterResolver
        >>> environ = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
        >>> JaxClusterResolver(environ)
        <JaxClusterResolver: worker 1 of 2, worker 0 at a:1234, from JAX's variables>
    """

    source = "JAX's variables"
    variables = (_ADDRESS, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    cure = "Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True if the number of processes or that of this one is set; JAX reads the address in other cases, too."""
        return "JAX_NUM_PROCESSES" in environ or "JAX_PROCESS_ID" in environ

    def _read(self, variables: EnvReader) -> Membership:
        index, workers = variables.index_and_count("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")

        def find() -> tuple[str, int]:
            if workers == 1 and _ADDRESS not in variables.environ:
                return "127.0.0.1", DEFAULT_PORT
            return split_address(f"{self.source}: {_ADDRESS}", variables.text(_ADDRESS, "the address of worker 0"))

        return membership_of_group(
            WorkerGroup(workers, index, resolve_coordinator(variables.environ, find), source=self.source)
        )
