"""One process of a job, without a supervisor."""

import os
import select
import time

from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import ProcessName
from lockstep.launch.worker_process import WorkerProcess
from tests.launch.launching import environment, program
from tests.support.waiting import DEADLINE


def test_a_process_that_has_ended_keeps_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    job = LaunchConfig((program(tmp_path, "raise ValueError('why')"),))
    worker = WorkerProcess(ProcessName("worker", 0), job, environment(), None, None)
    assert select.select([worker.file], [], [], DEADLINE)[0]
    worker.read_exit()
    worker.wait(time.monotonic() + DEADLINE)
    worker.drain(time.monotonic() + DEADLINE)
    assert "ValueError: why" in worker.failure.record.text
    assert len(os.listdir("/proc/self/fd")) == len(before)
