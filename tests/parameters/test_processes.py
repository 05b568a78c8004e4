"""Processes that are killed: a worker is waited for no more, a server is named."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep import ClusterError
from lockstep.cluster import exit_codes
from lockstep.parameters.client import VariableClient
from lockstep.parameters.shards import plan
from tests.parameters.threaded_servers import DEADLINE, SPECS, peer, values_of

PROGRAM = Path(__file__).with_name("program.py")
START_SECONDS = 120.0


@contextlib.contextmanager
def process(*arguments):
    """A process of ``program.py``, and the line that it says when it is ready."""
    environ = os.environ | {"PYTHONPATH": f"{PROGRAM.parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    started = subprocess.Popen([sys.executable, PROGRAM, *arguments], env=environ, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_SECONDS, started.kill)
    timer.start()
    try:
        with started.stdout:
            yield started, started.stdout.readline().strip()
    finally:
        timer.cancel()
        started.kill()
        started.wait(DEADLINE)


def test_a_killed_worker_holds_up_nobody_and_a_killed_server_is_named():
    with process("ps", "-") as (server, port):
        address = f"127.0.0.1:{port}"
        client = VariableClient(plan(SPECS, 1), [address], peer(0), secret=b"known", timeout_seconds=DEADLINE)
        with contextlib.closing(client):
            client.fill(values_of())
            with process("worker", address) as (worker, said):
                assert said == "pulled"
                client.pull()
                client.push(values_of(seed=1)).wait()
                worker.send_signal(signal.SIGKILL)
                client.pull()  # Waits for the worker until that is dead: the bound is 0.
            server.send_signal(signal.SIGKILL)
            server.wait(DEADLINE)
            with pytest.raises(ClusterError, match=f"ps 0 at {address} was lost") as caught:
                client.pull()
            assert caught.value.exit_code == exit_codes.PEER_LOST
