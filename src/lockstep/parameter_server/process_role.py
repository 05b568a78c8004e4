"""Roles of the processes of a cluster with parameter servers, and the context that a process has in its role.

Synchronous training describes the same cluster by ``WorkerGroup`` (``membership.py``).
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras

from lockstep._errors import ClusterError, OptionError
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.cluster.membership import JOBS, SINGLE_JOBS, Membership, addresses_of, count_tasks
from lockstep.distributed.control.handshake import Peer, check_closed, open_listener
from lockstep.distributed.resolvers.base import ClusterResolver
from lockstep.parameter_server.gradient_step import rules_of, specs_of
from lockstep.parameter_server.optimizer_sharding import check_optimizer
from lockstep.parameter_server.rpc import ArrayServer, connect_rpc
from lockstep.parameter_server.sharding import PartitionFunction, ShardingPlan, plan_shards
from lockstep.parameter_server.task_client import TaskClient
from lockstep.parameter_server.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.variable_server import serve

_STRATEGY = "lockstep.ParameterServerStrategy"
_EXAMPLE = {
    "cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]},
    "task": {"type": "worker", "index": 0},
}
_FIX = (
    f"Fix: set TF_CONFIG for each process, such as {json.dumps(_EXAMPLE)}; on one machine, "
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
        source: source of the description, for messages: ``TF_CONFIG``.

    Example:
        >>> from lockstep.parameter_server.process_role import ProcessRole
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

    @property
    def others(self) -> list[tuple[str, int]]:
        """Job and index of each process but the chief."""
        return [(job, index) for job in ("worker", "ps", "evaluator") for index in range(len(self._addresses_of(job)))]

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
        >>> from lockstep.parameter_server.process_role import find_role
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
        >>> role = find_role(SimpleClusterResolver(cluster, task_type="worker", task_id=1, environ={}))
        >>> role.name, role.chief, role.servers
        ('worker 1 of 2 (c:1)', 'a:1', ('d:1',))
    """
    if resolver is None:
        raise ClusterError(f"{_STRATEGY}: nothing says which process is chief, worker or ps. {_FIX}")
    membership = resolver.membership
    if not membership.has_jobs:
        raise ClusterError(
            f"{membership.source} counts processes and knows no jobs, so that nothing says which of them is chief, worker or ps, as "
            f"{_STRATEGY} needs it. {_FIX}"
        )
    _check_complete(membership)
    addresses = {job: addresses_of(membership.source, membership.spec, job) for job in JOBS}
    return ProcessRole(
        job=membership.task_type,
        index=membership.task_id,
        chief=addresses["chief"][0],
        workers=addresses["worker"],
        servers=addresses["ps"],
        evaluator=next(iter(addresses["evaluator"]), None),
        source=membership.source,
    )


def _check_complete(membership: Membership) -> None:
    counts = {job: count_tasks(membership.spec, job) for job in ("chief", "worker", "ps")}
    if not all(counts.values()):
        found = ", ".join(f"{count or 'no'} {job}" for job, count in counts.items())
        raise ClusterError(
            f"{membership.source}: {_STRATEGY} needs a chief, a worker or more, and a ps or more; the cluster has {found}. {_FIX}"
        )


@dataclass(frozen=True)
class ProcessContext:
    """Settings of one process of a job.

    Args:
        role: role of the process, with the addresses of all processes.
        identity: what must be equal on all processes.
        partitioner: gives the number of shards of a variable; None: each variable is one shard.
        max_staleness: see :class:`lockstep.ParameterServerStrategy`.
        refuse_nonfinite: whether servers refuse a gradient that is not finite.
        network: the secret of the job, and where this process listens.
        timeout_seconds: limit of each wait for another process.
        log: takes lines about waits.
    """

    role: ProcessRole
    identity: Mapping[str, Any]
    partitioner: PartitionFunction | None
    max_staleness: int | None
    refuse_nonfinite: bool
    network: NetworkOptions
    timeout_seconds: float
    log: Callable[[str], None]

    @property
    def peer(self) -> Peer:
        """Description of this process for the other processes."""
        count = {"worker": len(self.role.workers), "ps": len(self.role.servers)}.get(self.role.job, 1)
        host, information = socket.gethostname(), {"job": self.role.job}
        return Peer(self.role.index, count, host, os.getpid(), identity=self.identity, information=information)

    def serve_dispatcher(self, dispatcher: TaskDispatcher) -> ArrayServer:
        """Start the server of the chief's task dispatcher."""
        listener = open_listener(self.role.chief, self.network, self.log)
        server = ArrayServer(self.peer, dispatcher, listener, secret=self.network.secret, log=self.log)
        server.start()
        return server

    def connect_to_dispatcher(self) -> TaskClient:
        """Connect to the chief's task dispatcher."""
        check_closed(self.role.chief, self.network, self.role.name)
        name = self.role.name_of("chief", 0).partition(" ")[0]
        return TaskClient(
            connect_rpc(name, self.role.chief, self.peer, self.network.secret, self.timeout_seconds, self.log)
        )

    def plan_for(self, model: keras.Model) -> ShardingPlan:
        """Return the sharding plan of a model, which is built and compiled.

        Raises:
            OptionError: the update of its optimizer would be another one on servers.
        """
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise OptionError(
                f"Model {model.name!r}: LossScaleOptimizer changes its scale with each update, which would be on servers, where the "
                "workers that scale their losses do not see it. Fix: use mixed_bfloat16, which needs no loss scale, in place of mixed_float16."
            )
        plan = plan_shards(specs_of(model), len(self.role.servers), self.partitioner)
        check_optimizer(model.optimizer, plan, rules_of(model))
        return plan

    def connect_to_servers(
        self, plan: ShardingPlan, call: int, raise_failure: Callable[[], object] = lambda: None
    ) -> VariableClient:
        """Connect to the variable servers of a call; ``raise_failure`` raises why one will not start, if that is known."""
        return VariableClient(
            plan,
            self.role.servers,
            replace(self.peer, identity={"call": call}),
            secret=self.network.secret,
            timeout_seconds=self.timeout_seconds,
            log=self.log,
            raise_failure=raise_failure,
        )

    def serve_variables(self, model: keras.Model, call: int) -> ArrayServer:
        """Start this process's variable server for a model, which is built and compiled."""
        listener = open_listener(self.role.servers[self.role.index], self.network, self.log, self.role.name)
        plan = self.plan_for(model)
        return serve(
            replace(self.peer, identity=plan.identity_of(self.role.index) | {"call": call}),
            plan,
            model.optimizer,
            listener,
            rules=rules_of(model),
            max_staleness=self.max_staleness,
            refuse_nonfinite=self.refuse_nonfinite,
            secret=self.network.secret,
            log=self.log,
        )
