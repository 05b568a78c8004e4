"""Servers and clients of variables that are threads of this process and talk over real sockets."""

import contextlib
import json
import socket
import struct
from dataclasses import replace

import keras
import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep.distributed.control.handshake import Peer
from lockstep.parameter_server.sharding import plan_shards
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.variable_server import serve

DEADLINE = 30.0  # seconds, of each wait of a test

SPECS = (
    ArraySpec("dense/kernel", (3, 2), "float32"),
    ArraySpec("table", (7, 2), "float32"),
    ArraySpec("scale", (), "float32"),
)


def values_of(specs=SPECS, seed=0):
    random = np.random.default_rng(seed)
    return {spec.name: random.normal(size=spec.shape).astype(spec.dtype) for spec in specs}


def framed(message):
    text = json.dumps(message).encode()
    return struct.pack(">I", len(text)) + text


def peer(index, workers=4, job=None):
    """Number 0 is the chief, the others are workers, where nothing else is said."""
    return Peer(index, workers, "here", 1000 + index, information={"job": job or ("worker" if index else "chief")})


class Servers(contextlib.ExitStack):
    """So many servers, with what their workers need to reach them."""

    def __init__(
        self,
        count=1,
        *,
        specs=SPECS,
        partitioner=None,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        secret=None,
        max_staleness=None,
        refuse_nonfinite=True,
        identity=None,
    ):
        super().__init__()
        self.plan = plan_shards(specs, count, partitioner)
        self.secret, self.said = secret, []
        self.servers, self.addresses = [], []
        for number in range(count):
            listener = socket.create_server(("127.0.0.1", 0))
            self.addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
            server = serve(
                self.server_peer(number, identity),
                self.plan,
                optimizer(),
                listener,
                max_staleness=max_staleness,
                refuse_nonfinite=refuse_nonfinite,
                secret=secret,
                log=self.said.append,
            )
            self.callback(server.stop)
            self.servers.append(server)

    def server_peer(self, number, identity=None):
        """A server for its clients, which must have its identity."""
        known = self.plan.identity_of(number) | (identity or {})
        return Peer(number, self.plan.servers, "here", 2000 + number, identity=known, information={"job": "ps"})

    def client(
        self, index=0, *, job=None, plan=None, addresses=None, timeout_seconds=DEADLINE, identity=None, **options
    ):
        options = {"secret": self.secret, "log": self.said.append, "timeout_seconds": timeout_seconds} | options
        own = replace(peer(index, job=job), identity=identity or {})
        client = VariableClient(plan or self.plan, addresses or self.addresses, own, **options)
        self.callback(client.close)
        return client
