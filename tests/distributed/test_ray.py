"""``examples/ray_train.py`` on a cluster of Ray's processes on this machine: a node or a worker is lost, and the bits stay those of a whole run.

``./scripts/test-ray`` runs this in an environment with Ray.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.processes import PROGRAMS

pytest.importorskip("ray", reason="Ray is not installed: ./scripts/test-ray runs this")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.xdist_group(__name__)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
LIMIT = 240  # seconds of a run
START = "10"  # seconds that Ray waits for workers on a node that it does not know to be lost; its default is 60


class Cluster:
    """Two nodes of one CPU each. Ray forks, so that it gets a process of its own."""

    def __init__(self, folder):
        with (folder / "cluster.log").open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAMS / "ray_cluster.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines = Lines(self._process.stdout)
        self.address = self._lines.next()

    def lose_node(self):
        self._process.stdin.write("lose\n")
        self._process.stdin.flush()
        assert self._lines.next() == "lost"

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait(30)
            self._process.stdout.close()


class Lines:
    """Lines of a pipe, each of which comes within the limit."""

    def __init__(self, pipe):
        self._queue = queue.Queue()
        threading.Thread(target=lambda: [self._queue.put(line.strip()) for line in pipe], daemon=True).start()

    def next(self):
        return self._queue.get(timeout=LIMIT)


class Run:
    """A run of the example."""

    def __init__(self, cluster, folder):
        self.folder, self._log = folder, folder.with_suffix(".log")
        command = [sys.executable, EXAMPLE, "--folder", folder, "--workers", "1", "2", "--epochs", "8"]
        environ = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": START}
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)

    @property
    def said(self):
        return self._log.read_text()

    def wait_for_checkpoints(self):
        """Wait until the run has written some."""
        deadline = time.monotonic() + LIMIT
        while len(list(self.folder.glob("step-*"))) < 3:
            assert time.monotonic() < deadline, self.said
            assert self._process.poll() is None, self.said
            time.sleep(0.1)

    def kill_worker(self, rank):
        """Kill the process of a worker, whose number Ray has printed."""
        (pid,) = re.findall(rf"pid=(\d+)\) world_rank={rank}\b", self.said)
        os.kill(int(pid), signal.SIGKILL)

    def result(self):
        """What the example prints at its end."""
        assert self._process.wait(LIMIT) == 0, self.said
        return json.loads(re.findall(r"^\{.*\}$", self.said, flags=re.MULTILINE)[-1])

    def close(self):
        self._process.kill()
        self._process.wait(30)


@pytest.fixture
def start(tmp_path):
    """Starts the example on a cluster of its own."""
    made = []

    def make(name):
        made.append(Cluster(tmp_path))
        run = Run(made[-1], tmp_path / name)
        made.append(run)
        return made[-2], run

    yield make
    for each in reversed(made):
        each.close()


def test_a_lost_node_or_worker_leaves_the_bits_of_a_whole_run(start):
    _, run = start("whole")
    whole = run.result()
    assert (whole["workers"], whole["epoch"]) == (2, 7)
    assert "resumes from" not in run.said
    pointers = [json.loads(path.read_text()) for path in Path(f"{run.folder}-ray").rglob("checkpoints.json")]
    assert pointers == 8 * [{"folder": str(run.folder)}]

    _, run = start("worker")
    run.wait_for_checkpoints()
    run.kill_worker(1)
    assert run.result() == whole
    assert "resumes from" in run.said

    cluster, run = start("node")
    run.wait_for_checkpoints()
    cluster.lose_node()
    assert run.result() == whole | {"workers": 1}
    assert "resumes from" in run.said
