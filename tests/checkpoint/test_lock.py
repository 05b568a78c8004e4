"""Two jobs do not write into one directory; the lock goes with the process that has it, however that ends."""

import errno
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from lockstep import CheckpointError
from lockstep.checkpoint import writer_lock
from lockstep.checkpoint.store import CheckpointStore

from .cases import names_in, silent, small, store_in

HOLDS = """
import os, sys
from lockstep.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], clock=lambda: 1.7e9)
store.lock()
"""
WAITS = "print('holds', flush=True); sys.stdin.read()"
FORKS = """
if os.fork() == 0:
    try:
        store.lock()
    except OSError as error:
        print(error, flush=True)
    print('holds', flush=True)
    sys.stdin.read()
    os._exit(0)
import signal
signal.pause()
"""


def started(directory, code):
    """A process that has taken the lock, and what it has said so far; it ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS + code, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said = []
    for line in process.stdout:
        if line == "holds\n":
            return process, said
        said.append(line)
    raise AssertionError(f"the process ended: {said}")


def ended(process):
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.timeout(120)
def test_a_second_job_is_told_who_writes_and_can_read(tmp_path):
    store_in(tmp_path, 1).close()
    process, _ = started(tmp_path, WAITS)
    try:
        store = CheckpointStore(tmp_path, log=silent)
        (tmp_path / ".writing-step-000000002").mkdir()
        message = rf"process {process.pid} on {re.escape(socket.gethostname())}, since 2023-11-14 22:13:20\+00:00, writes checkpoints"
        for do in (store.lock, lambda: store.write(2, small(2))):
            with pytest.raises(CheckpointError, match=message):
                do()
        assert store.newest().step == 1
        assert names_in(tmp_path) == [".writing-step-000000002", "step-000000001"]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        store.write(2, small(2))
        assert names_in(tmp_path) == ["step-000000001", "step-000000002"]
    finally:
        ended(process)


@pytest.mark.timeout(120)
def test_a_child_of_the_writer_neither_writes_nor_keeps_the_lock_of_the_dead(tmp_path):
    process, said = started(tmp_path, FORKS)
    try:
        assert f"process {process.pid} on" in said[0]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        CheckpointStore(tmp_path, log=silent).write(1, small())
    finally:
        process.communicate(timeout=60)  # Ends with the child, which holds its standard output.


@pytest.mark.slow
def test_a_store_that_nobody_has_any_more_gives_the_lock_back(tmp_path):
    store_in(tmp_path, 1)
    gc.collect()
    store_in(tmp_path, 2)


def test_two_stores_of_one_process_are_two_jobs(tmp_path):
    with CheckpointStore(tmp_path) as store:
        other = CheckpointStore(tmp_path, log=silent)
        with pytest.raises(
            CheckpointError, match=f"process {os.getpid()} on .* writes checkpoints there. Fix: give each job its own"
        ):
            other.write(1, small())
        store.write(1, small())
        store.lock()
    other.write(2, small(2))
    assert store.steps() == [1, 2]
    with pytest.raises(CheckpointError, match="writes checkpoints there"):
        store.write(3, small(3))
    other.close()
    store.write(3, small(3))


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"pid": 3}', b"\xff"])
def test_a_holder_that_has_not_given_its_name_is_one_all_the_same(note, tmp_path):
    with open(tmp_path / ".lock", "wb") as file:
        file.write(note)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process, which has not written its name yet, writes"):
            CheckpointStore(tmp_path).lock()


def test_a_file_system_without_locks_is_told_of_and_nothing_of_another_writer_is_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".writing-step-000000002").mkdir()
    lines = []
    store = store_in(tmp_path, 1, 3, log=lines.append)
    assert lines == [f"{tmp_path}: this file system has no locks: make sure that only one job writes there."]
    assert names_in(tmp_path) == [".writing-step-000000002", "step-000000001", "step-000000003"]
    store.write(2, small(2))
    assert ".writing-step-000000002" not in names_in(tmp_path)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EIO, "choose a directory that this user may write to"),
        (errno.ENOSPC, "free space on that disk, or choose a directory on another one"),
    ],
)
def test_a_lock_that_fails_otherwise_is_an_error(number, fix, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=f"no lock can be taken: {os.strerror(number)}. Fix: {fix}"):
        CheckpointStore(tmp_path).lock()


@pytest.mark.parametrize("name", ["file", "file/run", "dangling"])
def test_what_is_no_directory_is_named(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    there = tmp_path / name.partition("/")[0]
    with pytest.raises(
        CheckpointError,
        match=rf"{name}: no lock can be taken: {there} is no directory\. Fix: choose another directory\.",
    ):
        CheckpointStore(tmp_path / name).lock()


def test_stores_that_are_gone_leave_no_handler_of_forks(tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **handlers: registered.append(handlers))
    for number in range(3):
        store_in(tmp_path / str(number), 1)
    assert len(registered) <= 1  # None, if an earlier test has locked a directory.


@pytest.mark.parametrize(("machine", "waits"), [("another", True), (writer_lock._machine(), False), (None, False)])
def test_a_lock_of_another_machine_is_waited_for_as_that_may_be_lost(machine, waits, tmp_path, monkeypatch):
    note = {"host": "node-7", "pid": 7, "since": "yesterday", "machine": machine}
    (tmp_path / ".lock").write_text(json.dumps(note))
    holder = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            fcntl.flock(holder, fcntl.LOCK_UN)

    monkeypatch.setattr(writer_lock.time, "sleep", sleep)
    store = CheckpointStore(tmp_path, log=silent)
    try:
        if waits:
            store.write(1, small())
            assert len(slept) == 3
        else:
            with pytest.raises(CheckpointError, match="process 7 on node-7, since yesterday, writes checkpoints there"):
                store.write(1, small())
            assert slept == []
    finally:
        os.close(holder)


def test_a_lock_that_another_machine_keeps_is_an_error_in_the_end(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text(
        json.dumps({"host": "node-7", "pid": 7, "since": "yesterday", "machine": "another"})
    )
    monkeypatch.setattr(writer_lock, "_LEASE_SECONDS", 0.05)
    monkeypatch.setattr(writer_lock, "_LOCK_POLL_SECONDS", 0.01)
    with open(tmp_path / ".lock", "rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="process 7 on node-7"):
            CheckpointStore(tmp_path, log=silent).lock()


def test_a_directory_that_was_replaced_belongs_to_the_job_that_has_made_it(tmp_path):
    directory = tmp_path / "run"
    first, second = CheckpointStore(directory, log=silent), CheckpointStore(directory, log=silent)
    first.write(1, small())
    shutil.rmtree(directory)
    second.write(2, small(2))
    with pytest.raises(CheckpointError, match="writes checkpoints there"):
        first.write(3, small(3))
    assert second.steps() == [2]
    second.close()
    shutil.rmtree(directory)
    first.write(3, small(3))
    with pytest.raises(CheckpointError, match="writes checkpoints there"):
        second.write(4, small(4))
