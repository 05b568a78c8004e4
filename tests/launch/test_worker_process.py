"""One process of a job, without a supervisor."""

import os
import select
import time

import pytest

from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import ProcessName
from lockstep.launch.worker_process import WorkerProcess
from tests.launch.launching import environment, program
from tests.support.waiting import DEADLINE

COLLECTIVE = """
from types import SimpleNamespace
from lockstep.distributed.control.failure_detector import Failure, FailureKind
from lockstep.distributed.control.termination import ExitGuard
failure = Failure(FailureKind.FAILED, {failed}, "worker {failed} of 2 failed: ValueError: mine")
ExitGuard(SimpleNamespace(group=SimpleNamespace(index=0), failure=failure, fail=lambda summary, **_: None)).install()
raise RuntimeError("connection closed by peer")
"""


def ended(folder, code):
    """Return a worker whose program has ended."""
    worker = WorkerProcess(ProcessName("worker", 0), LaunchConfig((program(folder, code),)), environment(), None, None)
    assert select.select([worker.file], [], [], DEADLINE)[0]
    worker.read_exit()
    worker.wait(time.monotonic() + DEADLINE)
    worker.drain(time.monotonic() + DEADLINE)
    return worker


def test_a_process_that_has_ended_keeps_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    worker = ended(tmp_path, "raise ValueError('why')")
    assert "ValueError: why" in worker.failure.record.text
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("failed", [0, 1])
def test_an_exception_that_follows_from_the_failure_of_another_worker_is_no_cause(tmp_path, failed):
    """A collective raises no error of Lockstep where the connection to another worker is closed."""
    failure = ended(tmp_path, COLLECTIVE.format(failed=failed)).failure
    assert (failure.code, failure.is_consequence) == (13, failed == 1)
    assert failure.record.text.endswith("RuntimeError: connection closed by peer\n")


@pytest.mark.slow
@pytest.mark.parametrize("code", [75, 124])
def test_a_process_that_is_killed_while_it_reports_has_the_code_of_its_error(tmp_path, code):
    """The chief of servers waits in its hook until the others have received the failure."""
    raised = f"from lockstep import ClusterError; raise ClusterError('worker 1 is stuck', {code})"
    failure = ended(tmp_path, f"sys.excepthook = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n{raised}").failure
    assert (failure.code, failure.is_consequence) == (code, True)
