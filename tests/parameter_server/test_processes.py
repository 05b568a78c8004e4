"""Processes that are killed: a worker is waited for no more, a server is named."""

import contextlib
import signal
from pathlib import Path

import pytest

from lockstep import ClusterError
from lockstep._errors import PEER_LOST
from lockstep.parameter_server.sharding import plan_shards
from lockstep.parameter_server.variable_client import VariableClient
from tests.parameter_server.threaded_servers import DEADLINE, SPECS, peer, values_of

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture
def start(forks, tmp_path):
    """Starts a process of ``program.py``; ends what is left of them."""
    with contextlib.ExitStack() as stack:

        def begin(role, **config):
            process = forks[0].start(tmp_path, role, PROGRAM, {"role": role, **config}, {})
            stack.callback(process.clean)
            return process

        yield begin


def test_killed_worker_blocks_no_worker_and_killed_server_is_named(start):
    server = start("ps")
    address = f"127.0.0.1:{server.until('port')}"
    client = VariableClient(plan_shards(SPECS, 1), [address], peer(0), secret=b"known", timeout_seconds=DEADLINE)
    with contextlib.closing(client):
        client.fill(values_of())
        worker = start("worker", address=address)
        worker.until("pulled")
        client.pull()
        client.push(values_of(seed=1))
        worker.send(signal.SIGKILL)
        client.pull()  # Waits for the worker until that is dead: the bound is 0.
        server.send(signal.SIGKILL)
        server.end(DEADLINE)
        with pytest.raises(ClusterError, match=f"ps 0 at {address} was lost") as caught:
            client.pull()
        assert caught.value.exit_code == PEER_LOST
