"""A server, or a worker that pulls and then never comes back."""

import json
import signal
import socket
import sys
from dataclasses import replace

import keras

from lockstep.parameter_server.sharding import plan_shards
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.variable_server import serve
from tests.parameter_server.threaded_servers import DEADLINE, SPECS, peer
from tests.support.telling import tell


def main(role, address=None):
    if role == "ps":
        listener = socket.create_server(("127.0.0.1", 0))
        plan = plan_shards(SPECS, 1)
        me = replace(peer(0, 1, "ps"), identity=plan.identity_of(0))
        serve(me, plan, keras.optimizers.SGD(0.5), listener, max_staleness=0, secret=b"known")
        tell(port=listener.getsockname()[1])
    else:
        client = VariableClient(plan_shards(SPECS, 1), [address], peer(1), secret=b"known", timeout_seconds=DEADLINE)
        client.pull()
        tell(pulled=True)
    signal.pause()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
