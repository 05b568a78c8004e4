"""A long run takes no more memory, threads and descriptors at its end than at its beginning."""

import gc
import threading
import time
from pathlib import Path

import jax
import pytest

from lockstep import ClusterError
from lockstep.callbacks import BackupAndRestore, NanGuard, TensorBoard, ThroughputMonitor
from lockstep.fit.checkpointing.backup_and_restore import SaveFrequency
from tests.distributed.threaded_job import ThreadedJob
from tests.fit.monitoring.runs import built, fit

HOURS, STEP = 24, 1.5  # A step takes so many seconds; a longer one would look like a process that was suspended.
CALLS, STEPS = 300, 7  # 2,100 steps
FIRST = 60  # calls after which nothing is made for the first time


def callbacks(folder):
    return (
        BackupAndRestore(folder / "run", save_freq=5, extend=True, keep=1),
        TensorBoard(folder / "logs"),
        NanGuard("skip"),
        ThroughputMonitor(),
    )


def taken():
    """Arrays, threads, descriptors and bytes of this process."""
    gc.collect()
    counts = len(jax.live_arrays()), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    return counts, int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(
    "given", [lambda folder: (), pytest.param(callbacks, marks=pytest.mark.nightly)], ids=["plain", "callbacks"]
)
def test_two_thousand_steps_in_three_hundred_calls_take_nothing(given, devices, tmp_path):
    earlier = jax.live_arrays()  # Of other tests of this process: none is freed meanwhile.
    model = built(devices=devices)
    before = None
    for number in range(CALLS):
        if number == FIRST:
            before = taken()
        fit(model, *given(tmp_path), rows=8 * STEPS, epochs=1, shuffle=True)
    now = taken()
    (arrays, *others), (arrays_before, *others_before) = now[0], before[0]
    assert arrays == arrays_before
    # A thread or a file of an earlier test of this process may have gone meanwhile.
    assert all(one <= one_before for one, one_before in zip(others, others_before, strict=True)), (now, before)
    del earlier
    assert now[1] - before[1] < 20e6
    assert int(model.optimizer.iterations) == CALLS * STEPS


class Day:
    """A clock that one step after the other sets forward."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_day_of_steps_of_two_workers_ends_no_job_and_takes_nothing(monkeypatch):
    """The clock of heartbeats, limits and checkpoints is simulated; at noon the wall clock is set back by a day."""
    day, saves, before, wall = Day(), 0, None, time.time
    schedule = SaveFrequency("10min", day)
    with ThreadedJob(2, clock=day, timeout_seconds=60) as job:
        step = 0

        def an_hour(session):
            nonlocal saves
            for number in range(step, step + int(3600 / STEP)):
                if session.group.is_chief:
                    day.now += STEP
                    saves += schedule.is_due_by_time()
                    if schedule.is_due_by_time():
                        schedule.saved()
                session.report(number, "step")
                assert session.gather("loss", number) == [number, number]

        for hour in range(HOURS):
            if hour == HOURS // 2:
                monkeypatch.setattr(time, "time", lambda: wall() - 24 * 3600)
            assert job.everyone(an_hour) == [None, None]
            step += int(3600 / STEP)
            before = before or taken()
        assert job.failures == [[], []]
        assert all(step - status.step < 100 for status in job.sessions[0].heartbeats())
        now = taken()
        assert now[0] == before[0]
        assert now[1] - before[1] < 20e6
        assert saves == HOURS * 6
        end_of_a_wait(job, day)


def end_of_a_wait(job, day):
    """The limits follow that clock: a worker that does not come is named after 60 s of it."""
    found = []

    def wait():
        with pytest.raises(ClusterError, match=r"worker 1 of 2 .*within 60 s"):
            job.sessions[0].gather("more")
        found.append(day.now)

    waiting, began = threading.Thread(target=wait, daemon=True), day.now
    waiting.start()
    while waiting.is_alive() and day.now - began < 3600:
        day.now += STEP / 2
        waiting.join(0.1)
    assert found
    assert 60 <= found[0] - began < 120
