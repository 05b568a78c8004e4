"""Preemption: a signal has training stop after a step, with a checkpoint, and the next run goes on from there with the same bits."""

import os
import signal
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import keras
import pytest

import lockstep
from lockstep import CheckpointError
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing.preemption import exit_after_checkpoint

from .runs import INPUTS, Run, Shuffled, whole

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")
RARELY = {"save_freq": 1000}
ENDS_WITH = 75


class Signalled(keras.callbacks.Callback):
    """Sends its own process a signal in the ``number``-th call of a method."""

    def __init__(self, method, number, signals=(signal.SIGTERM,)):
        super().__init__()
        self.number, self.heard = number, 0
        setattr(self, method, self.hear)
        self.tell = lambda: [os.kill(os.getpid(), one) for one in signals]

    def hear(self, *args, **kwargs):
        self.heard += 1
        if self.heard == self.number:
            self.tell()


def preempted(run, *where):
    """What the process ends with."""
    with pytest.raises(SystemExit) as ended:
        run.fit(callbacks=[Signalled(*where)])
    return ended.value.code


MOMENTS = {
    "in the first step": ("on_train_batch_end", 1, 1),
    "in the middle of the second epoch": ("on_train_batch_end", 8, 8),
    "in the first step of validation": ("on_test_batch_end", 1, 5),
    "in the second validation": ("on_test_batch_end", 4, 10),
    "where the last validation ends": ("on_test_end", 3, 15),
    "where an epoch ends": ("on_epoch_end", 1, 6),
    "where the last epoch ends": ("on_epoch_end", 3, 15),
}


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *(("arrays", moment) for moment in MOMENTS),
        *(
            pytest.param("PyDataset", m, marks=pytest.mark.slow if "middle" in m else pytest.mark.nightly)
            for m in MOMENTS
        ),
    ],
)
def test_it_stops_with_a_checkpoint_and_goes_on_with_the_same_bits(kind, moment, tmp_path, caplog):
    method, number, step = MOMENTS[moment]
    first = Run(tmp_path, kind, options=RARELY)
    assert preempted(first, method, number) == ENDS_WITH
    assert max(CheckpointStore(tmp_path).steps()) == step
    second = Run(tmp_path, kind, options=RARELY)
    assert second.fit() == whole(kind)
    assert len(first.heard) + len(second.heard) == 15


@pytest.mark.slow
def test_hooks_of_validation_data_run_once_for_a_validation_that_is_run_again(tmp_path):
    run = {"validation": lambda: {"validation_data": Shuffled()}, "options": RARELY}
    assert preempted(Run(tmp_path, **run), "on_test_batch_end", 2) == ENDS_WITH
    assert Run(tmp_path, **run).fit() == Run(None, **run).fit(backup=False)


class CountsValidation(keras.callbacks.Callback):
    """Its state changes during a validation."""

    def __init__(self, left, seen):
        super().__init__()
        self.batches, self.seen, self.tell = 0, seen, left.append

    def on_test_batch_end(self, batch, logs=None):
        self.batches += 1
        self.seen.append(batch)

    def on_train_end(self, logs=None):
        self.tell((self.batches, len(self.seen)))


class Holds(keras.callbacks.Callback):
    """Hears no validation, but has an object of a callback that does."""

    def __init__(self, value):
        super().__init__()
        self.value = value


@pytest.mark.slow
def test_callbacks_have_not_seen_a_validation_that_is_run_again(tmp_path):
    def callbacks():
        return [CountsValidation(left, seen := []), Holds(seen)]

    left, run = [], {"epochs": 2, "options": RARELY}
    first = Run(tmp_path, **run)
    with pytest.raises(SystemExit):
        first.fit(callbacks=[*callbacks(), Signalled("on_test_batch_end", 2)])
    Run(tmp_path, **run).fit(callbacks=callbacks())
    assert left == [(2 * 3, 2 * 3)]


@pytest.mark.parametrize("kind", [kind for kind in INPUTS if kind not in ("arrays", "PyDataset")])
@pytest.mark.parametrize(
    "number", [pytest.param(4, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_every_input_goes_on_from_a_validation(kind, number, tmp_path):
    assert preempted(Run(tmp_path, kind, options=RARELY), "on_test_batch_end", number) == ENDS_WITH
    assert Run(tmp_path, kind, options=RARELY).fit() == whole(kind)


CATCHES = """
import os, signal, sys
from lockstep import ClusterError
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing.preemption import Preemption
try:
    with Preemption(ProcessGroup()) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        if {stops}:
            preemption.end_step()
        raise {error}
except Exception as error:
    print("caught", error)
except KeyboardInterrupt:
    print("caught Ctrl-C")
print("goes on")
"""


@pytest.mark.parametrize(
    ("error", "stops", "code"),
    [
        ("ValueError('of a callback')", False, -signal.SIGTERM),
        ("ValueError('of a callback')", True, -signal.SIGTERM),
        ("KeyboardInterrupt", False, -signal.SIGTERM),
        ("ClusterError('worker 1 died.', 13)", False, -signal.SIGTERM),
        ("ClusterError('worker 1 died.', 75)", False, ENDS_WITH),
        ("SystemExit(3)", False, -signal.SIGTERM),
        ("SystemExit(75)", True, ENDS_WITH),
    ],
)
def test_a_signal_takes_effect_although_the_program_catches_an_exception_that_follows(error, stops, code, python):
    done = python(code=CATCHES.format(error=error, stops=stops))
    assert done.returncode == code, done.stderr
    assert "goes on" not in done.stdout
    if "of a callback" in error:
        assert "SIGTERM came before ValueError: of a callback: this process ends." in done.stderr


REPEATS = """
import atexit, os, signal, time
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing.preemption import Preemption
now = 0.0
with Preemption(ProcessGroup(), clock=lambda: now) as preemption:
    for now in {times}:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    print("stops", preemption.end_step())
    try:
        raise SystemExit(75)
    finally:
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("times", "code"), [((0, 0, 4.9), ENDS_WITH), ((0, 5.1), -signal.SIGTERM)])
def test_a_signal_that_is_repeated_at_once_or_at_the_end_is_the_same_request(times, code, python):
    done = python(code=REPEATS.format(times=times))
    assert done.returncode == code, done.stderr
    assert ("stops True" in done.stdout) == (code == ENDS_WITH)


ALONE = """
import os, signal
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing.preemption import Preemption
now = 1.0
with Preemption(ProcessGroup(), clock=lambda: now) as preemption:
    assert preemption.seconds_signalled == 0
    for now in (3.0, 4.0):
        os.kill(os.getpid(), signal.SIGTERM)
    now = 7.5
    print("for", preemption.seconds_signalled)
    preemption.exit_alone()
"""


def test_a_process_whose_others_continue_exits_with_the_code_of_a_preemption(python):
    done = python(code=ALONE)
    assert (done.returncode, done.stdout) == (ENDS_WITH, "for 4.5\n")
    assert done.stderr.endswith("SIGTERM: the other processes continue, and this one ends with code 75.\n")


def test_checkpoint_restores_the_handlers_if_closing_fails(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = lockstep.MirroredStrategy(["cpu:0"]).checkpoint(tmp_path)
    monkeypatch.setattr(checkpoint, "close", Mock(side_effect=OSError("disk")))
    with pytest.raises(OSError, match="disk"), checkpoint:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


AGAIN = """
import os, signal
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing.preemption import Preemption
for _ in range(2):
    try:
        with Preemption(ProcessGroup()) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.end_step()
            raise SystemExit(75)
    except SystemExit:
        print("stopped")
"""


def test_a_program_that_catches_the_end_is_stopped_again(python):
    assert python(code=AGAIN).stdout == 2 * "stopped\n"


def test_the_exit_code_is_kept_if_the_directory_cannot_be_read(tmp_path, monkeypatch):
    def fail(store):
        raise CheckpointError("Stale file handle")

    said, stopped = [], SimpleNamespace(reason="SIGTERM", process_group=ProcessGroup())
    monkeypatch.setattr(CheckpointStore, "steps", fail)
    with CheckpointStore(tmp_path) as store, AsyncWriter(store) as writer, pytest.raises(SystemExit) as ended:
        exit_after_checkpoint(stopped, 8, tmp_path, writer, said.append)
    assert ended.value.code == ENDS_WITH
    assert f"the checkpoints are in {tmp_path}" in said[-1]


def test_the_end_says_if_the_last_checkpoint_is_not_written_in_time(tmp_path):
    said, go_on = [], threading.Event()
    stopped = SimpleNamespace(reason="SIGTERM", process_group=ProcessGroup())

    def snapshot():
        go_on.wait(30)
        return Snapshot({}, {"epoch": 0})

    with CheckpointStore(tmp_path) as store, AsyncWriter(store, timeout_seconds=0.1, log=said.append) as writer:
        writer.submit(8, snapshot)
        with pytest.raises(SystemExit) as ended:
            exit_after_checkpoint(stopped, 8, tmp_path, writer, said.append)
        go_on.set()
        assert writer.wait(30)
    assert ended.value.code == ENDS_WITH
    assert (
        f"SIGTERM: stopped after step 8; the last checkpoint was not written in time; no checkpoint is in {tmp_path}"
        in said[-1]
    )
