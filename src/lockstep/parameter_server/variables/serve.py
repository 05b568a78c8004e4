"""How a process becomes a server of variables."""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import keras

from lockstep._logging import log_info
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.variables.optimizer_checks import check_optimizer
from lockstep.parameter_server.variables.sharding import ShardingPlan
from lockstep.parameter_server.variables.tcp_server import ArrayServer
from lockstep.parameter_server.variables.variable_service import VariableService
from lockstep.parameter_server.variables.variable_store import VariableStore

__all__ = ["serve"]


def serve(
    number: int,
    plan: ShardingPlan,
    optimizer: keras.optimizers.Optimizer,
    listener: socket.socket,
    *,
    max_staleness: int | None = None,
    identity: Mapping[str, Any] | None = None,
    secret: bytes | None = None,
    announce: Callable[[str], None] = log_info,
) -> ArrayServer:
    """Serve the variables of one server, from now on.

    Args:
        number: of this server.
        plan: where all variables are.
        optimizer: of the model; the server gets a copy of its own.
        listener: a socket that listens; it belongs to the server from now on.
        max_staleness: see :class:`lockstep.parameter_server.variables.staleness_bound.StalenessBound`.
        identity: what who comes must have in common besides the plan.
        secret: what workers must know; None: nothing.
        announce: takes lines.

    Raises:
        OptionError: the optimizer would mean something else there, or ``max_staleness`` is out of its range.
    """
    check_optimizer(optimizer, plan)
    own = type(optimizer).from_config(optimizer.get_config())
    known = plan.identity_of(number) | dict(identity or {})
    me = Peer(number, plan.servers, socket.gethostname(), os.getpid(), identity=known, information={"job": "ps"})
    service = VariableService(VariableStore(plan.specs_at(number), own), max_staleness)
    server = ArrayServer(me, service, listener, secret=secret, announce=announce)
    server.start()
    return server
