"""What goes wrong with real processes: each end names the worker, has its code, and comes within its limit."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.processes import Job

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).with_name("worker.py")
HOST = socket.gethostname()
LONG = 40  # A limit of the workers that is far away: what ends before was not noticed by it.
SHORT = 3
SOON = 20  # What a busy machine may need for what is noticed at once.


@pytest.fixture
def start(forks, tmp_path):
    """Starts workers of one job, by index; ends what is left of them."""
    job = Job(forks, tmp_path, 4, program=PROGRAM)

    def begin(index, does="wait", workers=3, **config):
        return job.start("worker", index, workers=workers, does=does, coordinator=job.coordinator, **config)

    yield begin
    job.clean()


def when_it_noticed(process):
    return process.told["noticed"]


def ended(process):
    """Exit code and what it said, but for lines about a wait, which others that are slow to start make."""
    code, lines = process.end(), process.err.read_text().splitlines(keepends=True)
    about_waits = ("waiting for", "are here after")
    return code, "".join(line for line in lines if not any(words in line for words in about_waits))


def test_a_job_comes_to_its_end(start):
    workers = [start(index, timeout=LONG) for index in range(3)]
    assert [ended(worker) for worker in workers] == [(0, "")] * 3


def test_the_code_of_sys_exit_is_kept(start):
    workers = [start(index, "exit_in_order", workers=2, code=index * 4, timeout=LONG) for index in range(2)]
    assert [ended(worker) for worker in workers] == [(0, ""), (4, "")]


@pytest.mark.parametrize("does", ["wait", "hang_in_a_step"])
def test_the_death_of_a_worker_is_noticed_by_all(start, does):
    workers = [start(index, ["hang_in_a_step", does][index != 1], timeout=LONG) for index in range(3)]
    workers[1].until("at_work")
    began = time.monotonic()
    workers[1].send(signal.SIGKILL)
    for survivor in (workers[0], workers[2]):
        code, said = survivor.end(), survivor.said
        assert code == 75
        # The system resets a connection, and says so, if what was sent to the dead was not yet read.
        died = rf"process {workers[1].pid}\) died: its connection closed( \(Connection reset by peer\))? unexpectedly"
        assert re.search(died, said), said
        assert "worker 1 of 3" in said
        assert "This process ends with code 75. Fix: see the end of its output;" in said
        assert when_it_noticed(survivor) - began < SOON


def test_the_death_of_the_chief_is_noticed_by_all(start):
    workers = [start(index, "hang_in_a_step", timeout=LONG) for index in range(3)]
    for worker in workers:
        worker.until("at_work")
    began = time.monotonic()
    workers[0].send(signal.SIGKILL)
    for survivor in workers[1:]:
        code, said = survivor.end(), survivor.said
        assert code == 75
        assert f"worker 0 of 3 ({HOST}, process {workers[0].pid}) died" in said
        assert "It was the chief." in said
        assert when_it_noticed(survivor) - began < SOON


def test_a_worker_that_ends_itself_without_a_word_has_died(start):
    workers = [start(0, "wait", 2, timeout=LONG), start(1, "exit_without_a_word", 2, timeout=LONG)]
    assert (workers[1].end(), workers[1].err.read_text()) == (7, "")
    code, said = workers[0].end(), workers[0].said
    assert code == 75
    assert "worker 1 of 2" in said


def test_a_child_that_was_forked_does_not_hide_the_death_of_its_parent(start):
    workers = [start(0, "hang_in_a_step", 2, timeout=LONG), start(1, "wait_with_a_child", 2, timeout=LONG)]
    child = workers[1].until("child")
    began = time.monotonic()
    workers[1].send(signal.SIGKILL)
    try:
        code, said = workers[0].end(), workers[0].said
    finally:
        os.kill(child, signal.SIGKILL)
    assert code == 75
    assert "worker 1 of 2" in said
    assert when_it_noticed(workers[0]) - began < SOON


def test_a_child_that_was_forked_fails_by_itself(start):
    workers = [start(0, "wait", 2, timeout=LONG), start(1, "raise_in_a_child", 2, timeout=LONG)]
    code, said = workers[1].end(), workers[1].said
    assert (code, said.splitlines()[-1]) == (0, "ValueError: in the child")
    assert workers[1].until("child") == 1
    assert ended(workers[0]) == (0, "")


def aborting(start, number, seconds=5):
    """Exit code and words of a worker whose native code aborts after the chief has been sent a signal; None: none."""
    workers = [start(0, "hang_in_a_step", 2, timeout=LONG), start(1, "abort", 2, seconds=seconds, timeout=LONG)]
    for worker in workers:
        worker.until("at_work")
    if number is not None:
        workers[0].send(number)
    workers[1].send(signal.SIGUSR1)
    return workers[1].end(), workers[1].said


def test_an_abort_of_native_code_has_its_own_end(start):
    code, said = aborting(start, None, seconds=0.5)
    assert code == -signal.SIGABRT
    assert "lockstep: native code has aborted this process; no other worker was seen to be lost." in said
    assert re.search(r'Fatal Python error: Aborted\n(.*\n)*  File ".*worker.py", line \d+ in abort\n', said)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "does not answer")])
def test_an_abort_after_the_loss_of_the_chief_names_the_chief(start, number, cause):
    """JAX aborts the others when its service, which is in the chief, is gone."""
    code, said = aborting(start, number)
    assert code == 75
    assert re.search(rf"lockstep: worker 0 of 2 \(.*\) {cause}", said), said
    assert "Fatal Python error" not in said


def test_the_cause_is_told_where_its_consequence_is_told_first(start):
    victim = start(1, "hang_in_a_step", timeout=LONG)
    chief = start(0, "hang_in_a_step", timeout=LONG)
    other = start(2, "fail_as_a_collective_whose_peer_dies", peer=victim.pid, timeout=LONG)
    for worker in (victim, chief, other):
        worker.until("at_work")
    victim.send(signal.SIGKILL)
    for survivor in (chief, other):
        code, said = survivor.end(), survivor.said
        assert code == 75
        assert f"worker 1 of 3 ({HOST}, process {victim.pid}) died" in said


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_of_the_program_is_told_to_all(start, failing):
    does = ["hang_in_a_step"] * 3
    does[failing] = "raise_an_exception"
    workers = [start(index, does[index], timeout=LONG) for index in range(3)]
    code, said = workers[failing].end(), workers[failing].said
    assert code == 13
    assert said.splitlines()[0].startswith("Traceback")
    assert said.splitlines()[-1] == "ValueError: the labels of batch 7 are missing"
    for survivor in (worker for worker in workers if worker is not workers[failing]):
        code, said = survivor.end(), survivor.said
        assert code == 13
        assert (
            f"process {workers[failing].pid}) failed: ValueError: the labels of batch 7 are missing. This process ends"
            in said
        )
        assert f"worker {failing} of 3" in said


def test_an_interruption_has_the_code_that_shells_know(start):
    workers = [start(0, "hang_in_a_step", 2, timeout=LONG), start(1, "be_interrupted", 2, timeout=LONG)]
    code, said = workers[1].end(), workers[1].said
    assert code == 130
    assert said.rstrip().endswith("KeyboardInterrupt")
    code, said = workers[0].end(), workers[0].said
    assert code == 13
    assert "worker 1 of 2" in said
    assert "failed: KeyboardInterrupt" in said


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_worker_that_was_stopped_is_named(start, stopped):
    workers = [start(index, "hang_in_a_step", timeout=SHORT) for index in range(3)]
    for worker in workers:
        worker.until("at_work")
    began = time.monotonic()
    workers[stopped].send(signal.SIGSTOP)
    for survivor in (worker for worker in workers if worker is not workers[stopped]):
        code, said = survivor.end(), survivor.said
        assert code == 75
        assert f"process {workers[stopped].pid}) does not answer: no heartbeat for " in said
        assert f"worker {stopped} of 3" in said
        assert SHORT - 1 < when_it_noticed(survivor) - began < SHORT + SOON
    workers[stopped].send(signal.SIGCONT)
    code, said = workers[stopped].end(), workers[stopped].said
    assert code == 75


@pytest.mark.slow
def test_a_job_that_was_stopped_as_a_whole_goes_on(start):
    workers = [start(index, "wait_for_a_signal", 2, timeout=2.5) for index in range(2)]
    for worker in workers:
        worker.until("at_work")
    for worker in workers:
        worker.send(signal.SIGSTOP)
    time.sleep(4)  # What is tested is that this is longer than the limit.
    for worker in workers:
        worker.send(signal.SIGCONT)
    for worker in workers:
        worker.send(signal.SIGUSR1)
    assert [ended(worker) for worker in workers] == [(0, "")] * 2


def test_a_worker_whose_main_thread_is_stuck_is_named_and_shows_where(start):
    does = ["hang_in_a_step", "hang_in_the_data", "hang_in_a_step"]
    workers = [start(index, does[index], timeout=SHORT) for index in range(3)]
    workers[1].until("at_work")
    began = time.monotonic()
    for worker in workers:
        code, said = worker.end(), worker.said
        assert code == 124
        assert f"worker 1 of 3 ({HOST}, process {workers[1].pid}) is stuck: in 'data' at step 7 for " in said
        assert "waits for it in step 8." in said
        assert when_it_noticed(worker) - began < SHORT + SOON
    assert "in hang_in_the_data\n" in workers[1].err.read_text()


@pytest.mark.slow
def test_a_worker_that_keeps_a_call_waiting_is_named(start):
    workers = [start(0, "wait", 2, timeout=SHORT), start(1, "hang_in_the_data", 2, timeout=SHORT)]
    for worker in workers:
        code, said = worker.end(), worker.said
        assert code == 124
        assert f"worker 1 of 2 ({HOST}, process {workers[1].pid}) is stuck: in 'data' at step 7 for " in said
        assert "worker 0 waits for it at barrier 'the end' for 3 s." in said


@pytest.mark.slow
def test_a_worker_that_ends_before_the_others_is_named_when_they_need_it(start):
    workers = [start(0, "hang_in_a_step", 2, timeout=SHORT), start(1, "exit_in_order", 2, code=0, timeout=SHORT)]
    assert ended(workers[1]) == (0, "")
    code, said = workers[0].end(), workers[0].said
    assert code == 13
    assert f"process {workers[1].pid}) finished after step 7; worker 0 waits for it in step 8." in said


def test_a_worker_that_never_starts_is_named_by_all(start):
    workers = [start(index, timeout=SHORT) for index in (0, 2)]
    for worker in workers:
        code, said = worker.end(), worker.said
        assert code == 75
        assert "worker 1 of 3 did not join within 3 s. Fix: check that it is started, and can reach 127." in said
        assert re.search(r"waiting for worker 1 of 3, \d+ s", said)


@pytest.mark.slow
def test_a_chief_that_never_starts_is_named(start):
    worker = start(1, timeout=SHORT)
    code, said = worker.end(), worker.said
    assert code == 75
    assert "worker 1 of 3: worker 0 of 3, the chief at 127." in said
    assert "was not met within 3 s" in said


@pytest.mark.slow
def test_a_worker_that_dies_at_the_start_is_named_by_all(start):
    workers = [start(index, workers=4, timeout=LONG) for index in range(3)]
    workers[0].until_said("lockstep: waiting for worker 3 of 4,")
    began = time.monotonic()
    workers[1].send(signal.SIGKILL)
    for survivor in (workers[0], workers[2]):
        code, said = survivor.end(), survivor.said
        assert code == 75
        assert f"worker 1 of 4 ({HOST}, process {workers[1].pid}) went away before all workers had joined" in said
    assert time.monotonic() - began < SOON  # The chief stays for a while to tell worker 3.
