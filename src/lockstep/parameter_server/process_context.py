"""Process context: the role of one process in a job with servers, and its connections to the other processes."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras

from lockstep._errors import OptionError
from lockstep.distributed.cluster.process_role import ProcessRole
from lockstep.distributed.control.listener import open_listener
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.gradient_step import specs_of
from lockstep.parameter_server.tasks.task_client import TaskClient
from lockstep.parameter_server.tasks.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variables.optimizer_sharding import check_optimizer
from lockstep.parameter_server.variables.rpc_client import connect
from lockstep.parameter_server.variables.sharding import PartitionFunction, ShardingPlan, plan_shards
from lockstep.parameter_server.variables.tcp_server import ArrayServer
from lockstep.parameter_server.variables.variable_client import VariableClient
from lockstep.parameter_server.variables.variable_service import serve

__all__ = ["ProcessContext"]


@dataclass(frozen=True)
class ProcessContext:
    """Settings of one process of a job.

    Args:
        role: of the process, with the addresses of all processes.
        identity: what must be equal on all processes.
        partitioner: gives the number of shards of a variable; None: each variable is one shard.
        max_staleness: see :class:`lockstep.ParameterServerStrategy`.
        secret: of the job; None: there is none.
        timeout_seconds: limit of each wait for another process.
        log: takes lines about waits.
    """

    role: ProcessRole
    identity: Mapping[str, Any]
    partitioner: PartitionFunction | None
    max_staleness: int | None
    secret: bytes | None
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
        listener = open_listener(self.role.chief, None, self.log)
        server = ArrayServer(self.peer, dispatcher, listener, secret=self.secret, log=self.log)
        server.start()
        return server

    def connect_to_dispatcher(self) -> TaskClient:
        """Connect to the chief's task dispatcher."""
        name = self.role.name_of("chief", 0).partition(" ")[0]
        return TaskClient(connect(name, self.role.chief, self.peer, self.secret, self.timeout_seconds, self.log))

    def plan_for(self, model: keras.Model) -> ShardingPlan:
        """Return the sharding plan of a model, which is built and compiled.

        Raises:
            OptionError: the update of its optimizer would be another one on servers.
        """
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise OptionError(
                f"Model {model.name!r}: LossScaleOptimizer changes its scale with each update, of which workers that do not wait would "
                "not know. Use mixed_bfloat16, which needs no loss scale, in place of mixed_float16."
            )
        plan = plan_shards(specs_of(model), len(self.role.servers), self.partitioner)
        check_optimizer(model.optimizer, plan)
        return plan

    def connect_to_servers(self, plan: ShardingPlan, call: int) -> VariableClient:
        """Connect to the variable servers.

        Args:
            plan: assignment of the variables to servers.
            call: for which they serve.
        """
        return VariableClient(
            plan,
            self.role.servers,
            replace(self.peer, identity={"call": call}),
            secret=self.secret,
            timeout_seconds=self.timeout_seconds,
            log=self.log,
        )

    def serve_variables(self, model: keras.Model, call: int) -> ArrayServer:
        """Start this process's variable server for a model, which is built and compiled."""
        listener = open_listener(self.role.servers[self.role.index], None, self.log, self.role.name)
        return serve(
            self.role.index,
            self.plan_for(model),
            model.optimizer,
            listener,
            max_staleness=self.max_staleness,
            identity={"call": call},
            secret=self.secret,
            log=self.log,
        )
