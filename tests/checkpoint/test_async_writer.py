"""Checkpoints are written in the background: in order, none left out, and failures are logged."""

import errno
import gc
import os
import re
import subprocess
import sys
import threading
import weakref

import pytest

from lockstep import CheckpointError
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, silent, small

PATIENCE = 60.0  # seconds; what is waited for in these tests comes at once.


class Gate:
    """Snapshots that are made when the test says so."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, step):
        def make():
            self.begun.set()
            assert self.go.wait(PATIENCE)
            return small(step)

        return make


def writing_to(directory, log=silent, timeout_seconds=PATIENCE):
    store = CheckpointStore(directory, keep=20, log=log)
    return AsyncWriter(store, log=log, timeout_seconds=timeout_seconds)


def threads(but=()):
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-checkpoint" and thread not in but]


def test_training_goes_on_while_one_is_written_and_another_waits(tmp_path):
    gate, before = Gate(), threads()
    with writing_to(tmp_path) as writer:
        writer.submit(1, gate(1))
        writer.submit(2, gate(2))
        assert gate.begun.wait(PATIENCE)
        assert writer.store.steps() == []
        assert [thread.daemon for thread in threads(before)] == [True]
        gate.go.set()
        assert writer.wait()
    assert writer.store.steps() == [1, 2]
    assert_equal(writer.store.newest(), small(2))
    assert threads(before) == []


def test_nothing_that_is_submitted_is_left_out(tmp_path):
    with writing_to(tmp_path) as writer:
        for step in range(1, 16):
            writer.submit(step, lambda step=step: small(step))
    assert writer.store.steps() == list(range(1, 16))


def test_a_third_waits_until_the_second_is_begun_and_not_without_end(tmp_path):
    gate, lines = Gate(), []
    writer = writing_to(tmp_path, log=lines.append, timeout_seconds=0.05)
    for step in (1, 2):
        writer.submit(step, gate(step))
    assert gate.begun.wait(PATIENCE)
    message = (
        "the checkpoint of step 3 is not taken: after 0 s that of step 1 is still being written, and another waits"
    )
    with pytest.raises(CheckpointError, match=message):
        writer.submit(3, gate(3))
    assert not writer.wait(0.01)
    assert not writer.close(0)
    assert lines == ["the checkpoint of step 1 is not written yet, and lost if the process ends."]
    gate.go.set()
    assert writer.wait(PATIENCE)
    assert writer.store.steps() == [1, 2]


@pytest.mark.slow
def test_a_long_wait_is_told(tmp_path):
    gate, told = Gate(), threading.Event()
    lines = []

    def log(line):
        lines.append(line)
        gate.go.set()
        told.set()

    writer = writing_to(tmp_path, log=log)
    for step in (1, 2, 3):
        writer.submit(step, gate(step))
    assert told.is_set()
    assert writer.close()
    (line,) = lines
    assert re.fullmatch(r"waiting for the checkpoint of step 1 to be written, \d+ s", line)
    assert writer.store.steps() == [1, 2, 3]


def test_what_fails_is_told_and_the_next_one_is_written(tmp_path, monkeypatch):
    lines = []
    writer = writing_to(tmp_path, log=lines.append)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.submit(1, lambda: small(1))
        assert writer.wait()
    assert lines[-1].startswith(
        f"the checkpoint of step 1 was not written, and training continues: {tmp_path}: the checkpoint of step 1 cannot be"
    )
    writer.submit(2, lambda: 1 / 0)
    assert writer.wait()
    assert lines[-1].endswith("of step 2 was not written, and training continues: ZeroDivisionError: division by zero")
    writer.submit(3, lambda: sys.exit(3))
    assert writer.wait()
    assert lines[-1].endswith("of step 3 was not written, and training continues: SystemExit: 3")
    writer.submit(4, lambda: small(4))
    assert writer.close()
    assert writer.store.steps() == [4]
    assert len(lines) == 3


def test_after_the_end_nothing_is_taken(tmp_path):
    writer = writing_to(tmp_path)
    assert writer.close()
    assert writer.close()
    with pytest.raises(CheckpointError, match="The checkpoint of step 5 comes too late: the writer is closed"):
        writer.submit(5, small)


PROGRAM = """
import os, sys, time
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore
writer = AsyncWriter(CheckpointStore(sys.argv[1]))
def make(step):
    time.sleep(0.2)  # So that the program has ended before.
    return Snapshot({}, {"step": step})
writer.submit(1, lambda: make(1))
writer.submit(2, lambda: make(2))
if os.fork() == 0:
    sys.exit(0)  # Waits for nothing: the thread is its parent's.
os.wait()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_end_of_a_program_waits_for_what_was_submitted(tmp_path):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == ""
    assert CheckpointStore(tmp_path, log=silent).steps() == [1, 2]


def test_a_writer_that_was_dropped_before_its_first_checkpoint_is_freed(tmp_path):
    store = CheckpointStore(tmp_path)
    found = weakref.ref(AsyncWriter(store))
    gc.collect()
    assert found() is None


def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_checkpoint_is_written(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with writing_to(tmp_path) as writer:
        with monkeypatch.context() as patches:
            patches.setattr(threading.Thread, "start", fail)
            with pytest.raises(CheckpointError, match="can't start new thread"):
                writer.submit(1, lambda: small(1))
        writer.submit(2, lambda: small(2))
        assert writer.wait()
        assert writer.store.steps() == [2]
