"""Cluster resolver for Ray Train, which has functions instead of variables."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from lockstep._errors import ClusterError, instance_of
from lockstep.distributed.cluster.addresses import COORDINATOR, DEFAULT_PORT, port_of_job, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver

_JOB = "RAY_JOB_ID"


class RayTrain:
    """Calls Ray if the program has imported it."""

    def __init__(self, modules: Mapping[str, Any] = sys.modules, load: Callable[[str], Any] = import_module) -> None:
        self._modules = modules
        self._load = load

    def context(self) -> Any:
        """Return ``ray.train.get_context()``, which numbers this worker; None outside of a training function."""
        train = self._modules.get("ray.train")
        try:
            context = train.get_context() if train is not None else None
        except (RuntimeError, DeprecationWarning):  # In the driver and in Ray Tune, respectively.
            return None
        return context if context is not None and context.get_world_size() else None

    def host_of_chief(self) -> str:
        """Return the address of worker 0's node, which it broadcasts: all workers must call this.

        Raises:
            ClusterError: this version of Ray has no broadcast.
        """
        try:
            own = self._modules["ray"].util.get_node_ip_address()
            return self._load("ray.train.collective").broadcast_from_rank_zero(own)
        except (ImportError, RuntimeError) as error:
            raise ClusterError(
                f"Ray Train: worker 0 cannot tell the others its address: {error}. Fix: use Ray Train V2; with another, set "
                f"{COORDINATOR}=HOST:PORT in the environment of all workers."
            ) from error


class RayClusterResolver(EnvironmentResolver):
    """The workers of a Ray Train ``DataParallelTrainer``.

    Numbers come from ``ray.train.get_context()``, as Ray has no variables for them. The address of worker 0 comes from
    ``ray.train.collective``, where each worker waits for the others; Ray logs every minute which ones it waits for, and
    ``RAY_TRAIN_COLLECTIVE_TIMEOUT_S`` limits the wait. The port is computed from ``RAY_JOB_ID`` (``lockstep.distributed.cluster.addresses``).

    Args:
        environ: has ``RAY_JOB_ID``.
        ray: calls Ray.

    Raises:
        ClusterError: this is no worker of Ray Train, or Ray does not provide the address of worker 0.

    Example:
        >>> from lockstep.cluster_resolver import RayClusterResolver
        >>> RayClusterResolver.is_present({"RAY_JOB_ID": "01000000"})  # No training function of Ray Train runs here.
        False
    """

    source = "Ray Train"
    variables = (_JOB,)
    fix = "make the strategy in the function that the trainer runs."

    def __init__(self, environ: Mapping[str, str] = os.environ, *, ray: RayTrain | None = None) -> None:
        self._ray = RayTrain() if ray is None else instance_of(RayTrain, "ray", ray, "a RayTrain")
        super().__init__(environ)

    @classmethod
    def is_present(cls, environ: Mapping[str, str], ray: RayTrain | None = None) -> bool:
        """True in a training function of Ray Train."""
        return _JOB in environ and (ray or RayTrain()).context() is not None

    def _read(self, variables: EnvReader) -> Membership:
        job, context = variables.text(_JOB, "the job of Ray"), self._ray.context()
        if context is None:
            raise ClusterError(f"{self.source}: this is no worker of Ray Train. Fix: {self.fix}")
        workers, here = context.get_world_size(), context.get_local_world_size()

        def find() -> tuple[str, int]:
            return ("127.0.0.1", DEFAULT_PORT) if workers == 1 else (self._ray.host_of_chief(), port_of_job(job))

        index, coordinator = context.get_world_rank(), resolve_coordinator(variables.environ, find)
        group = WorkerGroup(workers, index, coordinator, None, context.get_local_rank(), here, self.source)
        if here < workers:
            check_reachable(group)
        return membership_of_group(group)
