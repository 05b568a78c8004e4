"""Cluster resolvers for a given specification, and for JAX's own variables."""

import os
from collections.abc import Mapping

from lockstep._errors import instance_of, named_arguments, whole_number
from lockstep.distributed.cluster.addresses import DEFAULT_PORT, resolve_coordinator, split_address
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import (
    ClusterSpec,
    Jobs,
    Membership,
    WorkerGroup,
    find_membership,
    membership_of_group,
)
from lockstep.distributed.resolvers.base import ClusterResolver, EnvironmentResolver, check_environ, check_texts


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
        OptionError: another argument has another type.

    Example:
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> SimpleClusterResolver({"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=1, environ={})
        <SimpleClusterResolver: worker 1 of 2 (b:2222), worker 0 at a:2222, from arguments>
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Jobs,
        master: str | None = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        check_environ(environ)
        check_texts(master=master, task_type=task_type, rpc_layer=rpc_layer)
        instance_of(str, "environment", environment, "a text")
        membership = find_membership("arguments", ClusterSpec(cluster_spec), task_type, task_id, environ)
        super().__init__(
            membership,
            master=master,
            environment=environment,
            num_accelerators=None if num_accelerators is None else _checked_counts(num_accelerators),
            rpc_layer=rpc_layer,
        )


def _checked_counts(given: object) -> dict[str, int]:
    counts = named_arguments("num_accelerators", given)
    return {kind: whole_number(f"num_accelerators: {kind}", count, minimum=0) for kind, count in counts.items()}


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
    hint_variables = ((_ADDRESS, None),)
    number_variables = ("JAX_PROCESS_ID",)
    fix = "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process."

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
