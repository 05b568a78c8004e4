"""One process of a job with servers of variables: what it is, and its ways to the others."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from lockstep._errors import OptionError
from lockstep.distributed.cluster.process_role import ProcessRole
from lockstep.distributed.control.listener import open_listener
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.gradient_step import specs_of
from lockstep.parameter_server.tasks.task_client import TaskClient
from lockstep.parameter_server.tasks.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variables.optimizer_checks import check_optimizer
from lockstep.parameter_server.variables.rpc_client import connect
from lockstep.parameter_server.variables.serve import serve
from lockstep.parameter_server.variables.sharding import PartitionFunction, ShardingPlan, plan
from lockstep.parameter_server.variables.tcp_server import ArrayServer
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["ProcessContext"]


@dataclass(frozen=True)
class ProcessContext:
    """What a process knows of its job.

    Args:
        part: what it is.
        identity: what must be equal on all processes.
        partitioner: into how many shards a variable is cut; None: none is.
        max_staleness: see :class:`lockstep.ParameterServerStrategy`.
        secret: of the job; None: there is none.
        timeout_seconds: limit of each wait for another process.
        announce: takes lines about waits.
    """

    part: ProcessRole
    identity: Mapping[str, Any]
    partitioner: PartitionFunction | None
    max_staleness: int | None
    secret: bytes | None
    timeout_seconds: float
    announce: Callable[[str], None]

    @property
    def peer(self) -> Peer:
        """This process as others know it."""
        count = {"worker": len(self.part.workers), "ps": len(self.part.servers)}.get(self.part.job, 1)
        host, information = socket.gethostname(), {"job": self.part.job}
        return Peer(self.part.index, count, host, os.getpid(), identity=self.identity, information=information)

    def serve_desk(self, desk: TaskDispatcher) -> ArrayServer:
        """Let the others come to the chief's desk."""
        listener = open_listener(self.part.chief, None, self.announce)
        server = ArrayServer(self.peer, desk, listener, secret=self.secret, announce=self.announce)
        server.start()
        return server

    def go_to_desk(self) -> TaskClient:
        """The way to the chief's desk."""
        name = self.part.name_of("chief", 0).partition(" ")[0]
        return TaskClient(connect(name, self.part.chief, self.peer, self.secret, self.timeout_seconds, self.announce))

    def plan_for(self, model: keras.Model) -> ShardingPlan:
        """Where the variables of a model are, which is built and compiled.

        Raises:
            OptionError: its optimizer would mean something else on servers.
        """
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise OptionError(
                f"Model {model.name!r}: LossScaleOptimizer changes its scale with each update, of which workers that do not wait would "
                "not know. Use mixed_bfloat16, which needs no loss scale, in place of mixed_float16."
            )
        found = plan(specs_of(model), len(self.part.servers), self.partitioner)
        check_optimizer(model.optimizer, found)
        return found

    def go_to_servers(self, where: ShardingPlan, call: int) -> VariableClient:
        """The way to the servers.

        Args:
            where: the variables are.
            call: for which they serve.
        """
        me = Peer(**{**vars(self.peer), "identity": {"call": call}})
        options: Any = {"secret": self.secret, "timeout_seconds": self.timeout_seconds, "announce": self.announce}
        return VariableClient(where, self.part.servers, me, **options)

    def serve_variables(self, model: keras.Model, call: int) -> ArrayServer:
        """Keep this server's share of a model's variables, which is built and compiled."""
        listener = open_listener(self.part.servers[self.part.index], None, self.announce, self.part.name)
        return serve(
            self.part.index,
            self.plan_for(model),
            model.optimizer,
            listener,
            max_staleness=self.max_staleness,
            identity={"call": call},
            secret=self.secret,
            announce=self.announce,
        )
