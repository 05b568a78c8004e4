"""A server, or a worker that pulls and then never comes back: ``program.py ps -`` or ``program.py worker ADDRESS``."""

import signal
import socket
import sys
from pathlib import Path

import keras

from lockstep.parameters.client import VariableClient
from lockstep.parameters.serving import serve
from lockstep.parameters.shards import plan
from tests.parameters.threaded_servers import DEADLINE, SPECS, peer


def main(role, argument):
    if role == "ps":
        listener = socket.create_server(("127.0.0.1", 0))
        serve(0, plan(SPECS, 1), keras.optimizers.SGD(0.5), listener, max_staleness=0, secret=b"known")
        print(listener.getsockname()[1], flush=True)
    else:
        client = VariableClient(plan(SPECS, 1), [argument], peer(1), secret=b"known", timeout_seconds=DEADLINE)
        client.pull()
        print("pulled", flush=True)
    signal.pause()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(*sys.argv[1:])
