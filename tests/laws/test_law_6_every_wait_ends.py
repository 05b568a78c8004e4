"""Law 6: if a worker fails in any way, the others end within their limit, name it and the cause, and exit with the right code.

Times are of a machine that other tests may keep busy: a death is noticed within milliseconds, and asserted within seconds.
"""

import os
import re
import signal
import socket
import time

import pytest

pytestmark = pytest.mark.xdist_group(__name__)

HOST = socket.gethostname()
LONG, SHORT = 60, 3  # limits in seconds: what ends sooner than the long one was not ended by it
SOON = 30  # A death is reported at once and the grace takes 1.5 s; a busy machine may need much longer.
GRACE = 1.5


def last_line(process):
    return process.said.splitlines()[-1]


def train(job, workers=2, **config):
    """Return running workers."""
    processes = job(workers).start_all("faults", **config)
    for process in processes:
        process.until("training")
    return processes


def ends(processes, code, within):
    """Assert that all end with ``code`` within ``within`` seconds; return how long the last one took."""
    began = time.monotonic()
    assert [process.end() for process in processes] == [code] * len(processes), "\n\n".join(p.said for p in processes)
    seconds = max(process.ended_at for process in processes) - began
    assert seconds < within, seconds
    return seconds


def assert_no_process_is_left(processes):
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("workers", "victim"),
    [(2, 1), (3, 0), *(pytest.param(*who, marks=pytest.mark.nightly) for who in ((2, 0), (4, 2)))],
)
def test_a_worker_that_is_killed_in_the_middle_is_named_at_once(job, workers, victim):
    processes = train(job, workers, timeout=LONG)
    processes[victim].send(signal.SIGKILL)
    others = [process for process in processes if process is not processes[victim]]
    ends(others, 75, SOON)
    for other in others:
        assert f"worker {victim} of {workers} ({HOST}, process {processes[victim].pid}) died: " in last_line(other)
    assert processes[victim].end() == -signal.SIGKILL
    assert_no_process_is_left(processes)


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_worker_that_is_stopped_is_named_at_the_limit(job, stopped):
    processes = train(job, timeout=SHORT)
    processes[stopped].send(signal.SIGSTOP)
    other = processes[1 - stopped]
    ends([other], 75, SHORT + SOON)
    who = f"worker {stopped} of 2 ({HOST}, process {processes[stopped].pid}) does not answer: no heartbeat for "
    assert re.search(rf"{re.escape(who)}([3-9]|\d\d) s", last_line(other))
    processes[stopped].send(signal.SIGCONT)  # It finds the others gone, and ends, too.
    assert processes[stopped].end() == 75, processes[stopped].said
    assert_no_process_is_left(processes)


@pytest.mark.parametrize("fails", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("raise in a callback", "ValueError: the labels of batch 5 are missing"),
        pytest.param("raise in the data", "ValueError: the picture of row 5 cannot be read", marks=pytest.mark.slow),
    ],
)
def test_an_exception_on_one_worker_ends_all_and_is_told_to_all(job, fails, does, error):
    processes = train(job, timeout=LONG, faulty=fails, does=does)
    ends(processes, 13, SOON)
    assert last_line(processes[fails]) == error
    sentence = f"worker {fails} of 2 ({HOST}, process {processes[fails].pid}) failed: {error}."
    assert last_line(processes[1 - fails]) == f"lockstep: {sentence} This process ends with code 13."
    assert_no_process_is_left(processes)


@pytest.mark.parametrize("does", ["stick in the data", pytest.param("stick in a callback", marks=pytest.mark.nightly)])
def test_a_worker_that_is_stuck_is_named_at_the_limit_and_shows_where(job, does):
    processes = train(job, timeout=SHORT, faulty=1, does=does)
    ends(processes, 124, SHORT + SOON)
    for process in processes:
        assert f"worker 1 of 2 ({HOST}, process {processes[1].pid}) is stuck: in '" in last_line(process)
    assert 'programs/faults.py", line' in processes[1].said
    assert "in batches" in processes[1].said if does == "stick in the data" else "in act" in processes[1].said
    assert_no_process_is_left(processes)


@pytest.mark.slow
def test_a_worker_that_a_scheduler_ends_has_died(job):
    processes = train(job, timeout=LONG)
    processes[1].send(signal.SIGTERM)
    ends(processes[:1], 75, SOON)
    assert processes[1].end() == -signal.SIGTERM
    assert f"process {processes[1].pid}) died: " in last_line(processes[0])


@pytest.mark.parametrize("leaves", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_worker_that_exits_in_the_middle_keeps_its_code_and_is_named(job, leaves):
    processes = train(job, timeout=LONG, faulty=leaves, does="exit")
    ends([processes[1 - leaves]], 13, SOON)
    assert processes[leaves].end() == 3
    sentence = f"worker {leaves} of 2 ({HOST}, process {processes[leaves].pid}) finished after step 5; "
    assert f"{sentence}worker {1 - leaves} waits for it in step 6." in last_line(processes[1 - leaves])
    assert_no_process_is_left(processes)


@pytest.mark.parametrize("stops", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_worker_whose_callback_stops_the_training_is_named_soon(job, stops):
    processes = train(job, timeout=LONG, faulty=stops, does="stop the training")
    ends(processes, 13, SOON)
    sentence = (
        f"worker {stops} of 2 ({HOST}, process {processes[stops].pid}) ended fit after step 5; worker {1 - stops} waits"
    )
    for process in processes:
        assert sentence in last_line(process)


@pytest.mark.parametrize(
    "leaves", [pytest.param(1, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.nightly)]
)
def test_a_worker_that_finishes_early_is_named_when_the_others_call_for_it(job, leaves):
    processes = train(job, timeout=LONG, faulty=leaves, does="come to the end early", steps=8, evaluates=True)
    ends([processes[1 - leaves]], 13, SOON)
    assert processes[leaves].end() == 0
    who = f"worker {leaves} of 2 ({HOST}, process {processes[leaves].pid}) finished before gather 'the call'"
    assert who in last_line(processes[1 - leaves])


@pytest.mark.parametrize("late", [pytest.param(1, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.nightly)])
def test_a_worker_may_come_to_its_end_later_than_the_others(job, late):
    processes = train(job, timeout=SHORT, faulty=late, does="come to the end late", steps=8)
    assert [process.end() for process in processes] == [0, 0]
    assert all(process.told["done"] for process in processes)
    assert "died" not in processes[1 - late].said
    assert "aborted" not in processes[1 - late].said


@pytest.mark.slow
def test_a_worker_that_dies_without_a_word_or_at_the_start(job):
    processes = train(job, timeout=LONG, faulty=1, does="exit without a word")
    ends(processes[:1], 75, SOON)
    assert processes[1].end() == 7
    assert f"process {processes[1].pid}) died: " in last_line(processes[0])
    processes = job(2).start_all("faults", timeout=SHORT, faulty=1, does="die at the start")
    assert [process.end() for process in processes] == [75, 7]
    assert "worker 1 of 2 (" in last_line(processes[0])
    assert "did not join within 3 s" in last_line(processes[0])


@pytest.mark.parametrize(
    "missing", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
def test_a_worker_that_never_starts_is_named(job, missing):
    run = job(3)
    processes = [run.start("worker", index, "faults", timeout=SHORT) for index in range(3) if index != missing]
    ends(processes, 75, SHORT + SOON)
    for process in processes:
        assert f"worker {missing} of 3" in last_line(process)


@pytest.mark.parametrize(
    ("options", "when"), [({"check_every": 10}, "after step 10"), ({"steps": 8}, "at the end of fit")]
)
def test_a_weight_that_drifts_is_found_by_the_next_check_and_named(job, options, when):
    processes = train(job, timeout=LONG, faulty=1, does="change a weight", **options)
    ends(processes, 13, SOON)
    for process in processes:
        assert (
            f"The workers do not agree on 'the checksums of the variables {when}': worker 1 of 2 ({HOST}, "
            f"process {processes[1].pid}) differs in '3 sequential/out/bias': it has "
        ) in last_line(process)
