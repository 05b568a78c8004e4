"""Cluster resolver for a cluster that the program describes."""

import os
from collections.abc import Mapping

from lockstep.distributed.cluster.cluster_spec import ClusterSpec, Jobs
from lockstep.distributed.cluster.membership import find_membership
from lockstep.distributed.resolvers.base import ClusterResolver

__all__ = ["SimpleClusterResolver"]


class SimpleClusterResolver(ClusterResolver):
    """A cluster that is given as an argument.

    Counterpart of ``tf.distribute.cluster_resolver.SimpleClusterResolver``.

    Args:
        cluster_spec: the addresses of all tasks, as a ``ClusterSpec`` or a dict.
        master: what :meth:`master` returns without a task.
        task_type: the job of this process; may be left out if a single process trains.
        task_id: its index in the job; likewise.
        environment: a text of the user's.
        num_accelerators: accelerators of each process by their kind, such as ``{"GPU": 4}``; by default those that JAX finds.
        rpc_layer: a protocol that :meth:`master` writes before addresses.
        environ: may have ``LOCKSTEP_COORDINATOR`` or ``LOCKSTEP_PORT``.

    Raises:
        ClusterError: the cluster or the task is invalid.

    Example:
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> SimpleClusterResolver({"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=1, environ={})
        <SimpleClusterResolver: worker 1 of 2 (b:2222), worker 0 at a:2222, from arguments>
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Jobs,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        membership = find_membership("arguments", ClusterSpec(cluster_spec), task_type, task_id, environ)
        super().__init__(
            membership,
            master=master,
            environment=environment,
            num_accelerators=num_accelerators,
            rpc_layer=rpc_layer,
        )
