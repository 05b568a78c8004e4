"""Law 3 by real processes: whatever happened to an attempt, the next one goes on to the bits of a run that nothing happened to."""

import hashlib
import os
import shutil
import signal
import socket
import time

import pytest

from lockstep.checkpoint.serialization import describe
from lockstep.checkpoint.store import CheckpointStore
from tests.fit.checkpointing.attempts import KILLED, LOST, until_stopped

pytestmark = pytest.mark.xdist_group(__name__)

HOST = socket.gethostname()
USER_ERROR = 13  # of a worker; 1 is Python's own
SHORT, SOON = 5, 30  # seconds: the limit of a wait, and what ends need on a busy machine
PAUSE = 1.5
DAY = 24 * 3600
AT_ONCE = {"save_freq": 1, "async_": False}


def newest(run):
    return CheckpointStore(run.directory).paths()[-1]


# Processes that stop.


@pytest.mark.nightly  # Who stops is named in tests/distributed/test_processes.py, and the loss of a worker is in test_kills.py.
@pytest.mark.parametrize("stopped", [1, 0])
def test_a_worker_that_is_stopped_ends_the_others_within_the_limit_and_nothing_is_lost(stopped, training, whole):
    run = training(2)
    processes = run.begin({"at": "a step has ended", "nth": 4, "does": "stop"}, on=(stopped,), timeout=SHORT)
    until_stopped(processes[stopped])
    began = time.monotonic()
    assert processes[1 - stopped].end() == LOST
    assert time.monotonic() - began < SHORT + SOON
    processes[stopped].send(signal.SIGKILL)
    assert processes[stopped].end() == KILLED
    assert run.finished_as_a_whole() == whole(workers=2)
    assert run.done_again <= 2


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_pause_shorter_than_the_limit_changes_nothing(stopped, training, whole):
    run = training(2)
    processes = run.begin({"at": "a step has ended", "nth": 4, "does": "stop"}, on=(stopped,))
    until_stopped(processes[stopped])
    time.sleep(PAUSE)  # So long is the pause.
    processes[stopped].send(signal.SIGCONT)
    assert [process.end() for process in processes] == [0, 0]
    assert run.done_again == 0
    assert processes[0].told["digest"] == whole(workers=2)


@pytest.mark.slow
def test_a_worker_that_reads_slowly_finds_the_checkpoint_until_it_has_read_all_of_it(training, whole):
    run = training(2)
    expected = run.finished_as_a_whole()
    processes = run.begin({"at": "an array is read", "nth": 2, "does": "stop"}, on=(1,))
    until_stopped(processes[1])
    time.sleep(PAUSE)  # Nothing is left to train, and the chief replaces the last checkpoint.
    processes[1].send(signal.SIGCONT)
    assert [process.end() for process in processes] == [0, 0], processes[1].said
    assert processes[1].told["digest"] == expected == whole(workers=2)


# Errors of the user's program.


@pytest.mark.parametrize(
    ("at", "nth", "workers"),
    [
        ("data are read", 5, 1),
        pytest.param("validation", 2, 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("a step has ended", 4, 1), ("an epoch ends", 2, 1), ("data are read", 5, 2))
        ),
    ],
)
def test_an_exception_loses_nothing_that_was_trained_before(at, nth, workers, training, whole):
    run = training(workers, input="PyDataset")
    processes = run.begin({"at": at, "nth": nth, "does": "fail"}, on=(workers - 1,))
    assert [process.end() for process in processes] == [1 if workers == 1 else USER_ERROR] * workers
    assert "ValueError: the labels of this batch are missing" in processes[-1].said
    assert run.finished_as_a_whole() == whole(workers=workers, input="PyDataset")
    assert run.done_again <= 2


# Disks.


def test_a_full_disk_costs_checkpoints_and_no_training(disk, training, whole):
    run = training(directory=str(disk.path / "checkpoints"))
    (process,) = run.begin({"at": "an epoch ends", "nth": 2, "does": "stop"})
    until_stopped(process)
    disk.fill()
    process.send(signal.SIGCONT)
    assert process.end() == 0
    assert process.told["digest"] == whole()
    assert "was not written, and training continues: " in process.said
    assert "No space left on device; it needs " in process.said
    assert CheckpointStore(run.directory).newest().step <= 6
    assert run.finished_as_a_whole() == whole()  # It is still full.
    disk.clear()
    assert run.finished_as_a_whole() == whole()


@pytest.mark.slow
def test_a_directory_that_may_be_read_only_is_refused_at_the_start_and_goes_on_when_it_may_be_written(
    disk, training, whole
):
    run = training(directory=str(disk.path / "checkpoints"))
    run.killed("a step has ended", 5)
    disk.make_read_only()
    (process,) = run.begin()
    assert process.end() == 1
    assert f"{run.directory}: no lock can be taken: Read-only file system." in process.said
    disk.take_away()
    assert run.finished_as_a_whole() == whole()
    assert run.done_again <= 2


@pytest.mark.nightly  # Training beside a disk that cannot be written is above, and disks that are read-only in test_store.py.
def test_a_disk_that_goes_away_in_the_middle_costs_checkpoints_and_no_training(disk, training, whole):
    run = training(directory=str(disk.path / "checkpoints"))
    (process,) = run.begin({"at": "an epoch ends", "nth": 2, "does": "stop"})
    until_stopped(process)
    disk.replace()
    process.send(signal.SIGCONT)
    assert process.end() == 0
    assert process.told["digest"] == whole()
    assert "was not written, and training continues: " in process.said
    assert "Read-only file system" in process.said
    disk.take_away()
    assert run.finished_as_a_whole() == whole()


# Checkpoints that are not what was written.


def truncate(path):
    os.truncate(path / "arrays.npz", 1000)


def flip(path):
    """One bit of the largest array."""
    content = bytearray((path / "arrays.npz").read_bytes())
    content[max(describe(path).arrays.values(), key=lambda entry: entry.nbytes).offset] ^= 4
    (path / "arrays.npz").write_bytes(content)


def write_as_a_newer_version(path):
    head = (path / "manifest.json").read_bytes().replace(b'"version": 1', b'"version": 3', 1).rpartition(b'"sha256"')[0]
    digest = hashlib.sha256(head).hexdigest()
    (path / "manifest.json").write_bytes(head + f'"sha256": "{digest}"\n}}\n'.encode())


def write_something_else(path):
    (path / "manifest.json").write_text('{"model": "of somebody else"}')


def lose_the_manifest(path):
    (path / "manifest.json").unlink()


def put_a_file_there(path):
    shutil.rmtree(path)
    path.write_text("not a checkpoint")


DAMAGES = {
    flip: "is damaged: its",
    truncate: "is truncated: it has 1,000 bytes",
    write_as_a_newer_version: "is of format version 3; this Lockstep reads versions up to 2.",
    write_something_else: "is foreign: no manifest of Lockstep begins with",
    lose_the_manifest: "manifest.json: is missing.",
    put_a_file_there: "manifest.json: cannot be read: Not a directory.",
}


@pytest.mark.parametrize(
    "damages", [[flip], pytest.param(list(DAMAGES), marks=pytest.mark.nightly)], ids=["one", "each in turn"]
)
def test_a_newest_one_that_is_damaged_is_told_of_and_the_one_before_goes_on(damages, training, whole):
    run = training(backup=AT_ONCE)
    for damage in damages:
        run.killed("a step begins", 3)
        path = newest(run)
        damage(path)
        (process,) = run.begin({"at": "training begins"})
        assert process.end() == KILLED
        assert f"checkpoint refused: {path}" in process.said
        assert DAMAGES[damage] in process.said
    assert run.finished_as_a_whole() == whole()


def test_where_none_is_good_it_does_not_begin_anew_in_silence(training):
    run = training(backup=AT_ONCE)
    run.killed("a step begins", 4)
    for path in CheckpointStore(run.directory).paths():
        truncate(path)
    (process,) = run.begin()
    assert process.end() == 1
    assert "no checkpoint there is good" in process.said


@pytest.mark.nightly  # The store is in tests/checkpoint/test_store.py, test_what_is_not_a_checkpoint_is_left_alone.
def test_what_others_keep_in_the_directory_stays_there_and_changes_nothing(training, whole):
    run = training()
    run.directory.mkdir(parents=True)
    for name in ("step-1", "notes.txt", "step-000000999.keras", ".writing-mine"):
        (run.directory / name).write_text("mine")
    run.killed("a step begins", 6)
    assert run.finished_as_a_whole() == whole()
    assert (run.directory / "notes.txt").read_text() == "mine"
    assert (run.directory / ".writing-mine").read_text() == "mine"


# Two jobs, and clocks.


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_second_job_is_refused_with_the_name_of_the_first_which_goes_on_unharmed(workers, training, whole):
    run = training(workers)
    first = run.begin({"at": "a step has ended", "nth": 4, "does": "stop"})
    until_stopped(first[0])
    second = run.begin()
    assert [process.end() for process in second] == [1 if workers == 1 else USER_ERROR] * workers
    assert f"{run.directory}: process {first[0].pid} on {HOST}, since " in second[0].said
    first[0].send(signal.SIGCONT)
    assert [process.end() for process in first] == [0] * workers
    assert first[0].told["digest"] == whole(workers=workers)
    assert run.done_again == 0


@pytest.mark.nightly  # tests/checkpoint/test_store.py: the newest is that of the highest step, whatever the clock says.
def test_a_clock_that_is_set_back_plays_no_part(training, whole):
    run = training()
    run.killed("a step has ended", 4)
    oldest, *_ = CheckpointStore(run.directory).paths()
    os.utime(oldest, (time.time() + DAY, time.time() + DAY))
    before = run.started
    run.killed("a step has ended", 4, **{"clock is back": True})
    (process,) = run.begin({"at": "a step has ended", "nth": 2, "does": "set the clock back"})
    assert process.end() == 0
    assert process.told["digest"] == whole()
    assert before == 4
    assert run.done_again <= 4
