"""What a store keeps, replaces and removes, in which order it comes to the disk, and what is left where that fails."""

import errno
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep import CheckpointError, OptionError
from lockstep._atomic_files import replace_file
from lockstep.checkpoint import serialization
from lockstep.checkpoint.serialization import STATUS, Snapshot
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, filled, is_filled, names_in, silent, small, store_in


def test_the_newest_stay(tmp_path):
    store = store_in(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert store.steps() == [4, 5]
    assert names_in(tmp_path) == ["step-000000004", "step-000000005"]
    assert_equal(store.newest(), small(5))


@pytest.mark.parametrize("steps", [(9, 10), (999_999_999, 1_000_000_000), (0, 1)])
def test_the_newest_is_that_of_the_highest_step_whatever_the_clock_says(steps, tmp_path):
    clock = iter([2e9, 1e9])
    for step in steps:
        with CheckpointStore(tmp_path, log=silent, clock=lambda: next(clock)) as store:
            os.utime(store.write(step, small(step)), (2e9 - step, 2e9 - step))
    assert CheckpointStore(tmp_path, log=silent).newest().step == steps[1]


def test_a_step_written_again_replaces_the_first(tmp_path):
    store = store_in(tmp_path, 1, 2, 3)
    for again in (7, 8, 9):
        store.write(3, small(again))
        assert store.steps() == [1, 2, 3]
        assert_equal(store.newest(), small(again))
    assert names_in(tmp_path) == ["step-000000001", "step-000000002", "step-000000003-4"]


def test_a_damaged_one_is_replaced_by_the_run_that_was_resumed_before_it(tmp_path):
    lines = []
    store = store_in(tmp_path, 1, 2, 3, keep=2, log=lines.append)
    (store.paths()[-1] / "arrays.npz").unlink()
    assert store.newest().step == 2
    store.write(3, small(3))
    assert len(lines) == 1
    assert_equal(store.newest(), small(3))
    assert store.steps() == [2, 3]
    assert len(lines) == 1


def test_later_steps_stay_and_are_told_of_once(tmp_path):
    lines = []
    store = store_in(tmp_path, 10, 20, 30, keep=2, log=lines.append)
    for step in (5, 6, 7):
        store.write(step, small(step))
    assert store.steps() == [6, 7, 20, 30]
    assert lines == [
        f"{tmp_path}: step 5 was written, but there is step 30, which a resumed run would start from. Fix: if that belongs "
        "to an abandoned run, remove the directories of its steps."
    ]


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    others = ["notes", ".writing-notes", "step-5", "step-000000001-1", ".removing-step-x", "best"]
    for name in others:
        (tmp_path / name).mkdir()
    assert store_in(tmp_path, 1, 2, keep=1).steps() == [2]
    assert names_in(tmp_path) == sorted([*others, "step-000000002"])


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_leftovers_of_killed_writers_go_with_the_next_write(kind, tmp_path):
    for name in (".writing-step-000000007", ".removing-step-000000002-3", ".writing-step-000000009"):
        if kind == "file":
            (tmp_path / name).write_text("half")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "arrays.npz").write_text("half")
    store = CheckpointStore(tmp_path, log=silent)
    assert store.newest() is None
    store.write(9, small(9))
    assert names_in(tmp_path) == ["step-000000009"]


def test_leftovers_of_a_status_go_with_the_lock_of_the_next_job(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: None)
        patch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))  # as if the process had been killed there
        with pytest.raises(KeyboardInterrupt):
            replace_file(tmp_path / STATUS, lambda file: file.write(b"half"))
    assert len(names_in(tmp_path)) == 1
    others = [STATUS, f".{STATUS}.mine", f".my.{STATUS}.0123456789abcdef"]
    for name in others:
        (tmp_path / name).touch()
    with CheckpointStore(tmp_path, log=silent):
        assert names_in(tmp_path) == sorted(others)


def test_a_leftover_that_cannot_be_removed_is_told_and_nothing_else(tmp_path, monkeypatch):
    lines = []
    store = store_in(tmp_path, 1, keep=1, log=lines.append)

    def refuse(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        store.write(2, small(2))
    assert store.steps() == [2]
    assert (
        [line for line in lines if "cannot be removed yet: [Errno 16] Device or resource busy" in line] == lines != []
    )
    store.write(3, small(3))
    assert names_in(tmp_path) == ["step-000000003"]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_a_step_is_a_whole_number(step, tmp_path):
    with pytest.raises(OptionError, match="step: expected a whole number of at least 0, got"):
        CheckpointStore(tmp_path).write(step, small())


def test_options_are_checked(tmp_path):
    with pytest.raises(OptionError, match="CheckpointStore: keep: expected a whole number of at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(OptionError, match="directory: expected a path of this machine, got 'gs://bucket/run'"):
        CheckpointStore("gs://bucket/run")


def test_a_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("deep/er/runs")
    monkeypatch.chdir("/")
    store.write(1, small())
    assert names_in(tmp_path / "deep" / "er" / "runs") == ["step-000000001"]


def test_everything_is_on_the_disk_before_it_bears_its_name_and_its_name_before_older_ones_go(tmp_path, monkeypatch):
    store = store_in(tmp_path, 1, keep=1)
    done = []

    def recording(function, say):
        return lambda *args, **options: (done.append(say(*args)), function(*args, **options))[1]

    monkeypatch.setattr(
        os, "fsync", recording(os.fsync, lambda file: f"sync {relative(os.readlink(f'/proc/self/fd/{file}'))}")
    )
    monkeypatch.setattr(os, "rename", recording(os.rename, lambda old, new: f"{relative(old)} becomes {relative(new)}"))
    monkeypatch.setattr(shutil, "rmtree", recording(shutil.rmtree, lambda path: f"delete {relative(path)}"))

    def relative(path):
        return Path(path).relative_to(tmp_path).as_posix()

    store.write(2, small(2))
    assert done == [
        "sync .writing-step-000000002/arrays.npz",
        "sync .writing-step-000000002/manifest.json",
        "sync .writing-step-000000002",
        ".writing-step-000000002 becomes step-000000002",
        "sync .",
        "step-000000001 becomes .removing-step-000000001",
        "sync .",
        "delete .removing-step-000000001",
    ]


@pytest.mark.parametrize(
    ("name", "call", "number"),
    [
        ("fsync", 0, errno.ENOSPC),
        ("fsync", 1, errno.EDQUOT),
        ("fsync", 2, errno.EIO),
        ("rename", 0, errno.EACCES),
        ("open", 0, errno.EMFILE),
        ("mkdir", 0, errno.EROFS),
    ],
)
def test_whatever_fails_before_the_name_is_there_leaves_nothing(name, call, number, tmp_path, monkeypatch):
    store = store_in(tmp_path, 1, 2, keep=2)
    calls, function = iter(range(100)), getattr(os, name)

    def failing(*args, **options):
        if next(calls) == call:
            raise OSError(number, os.strerror(number))
        return function(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 cannot be written: ") as raised:
            store.write(3, small(3))
    assert raised.value.errno == number
    assert isinstance(raised.value, OSError)
    assert os.strerror(number) in str(raised.value)
    assert ("; it needs about " in str(raised.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert names_in(tmp_path) == ["step-000000001", "step-000000002"]
    assert_equal(store.newest(), small(2))
    store.write(3, small(3))
    assert store.steps() == [2, 3]


def test_a_name_that_does_not_reach_the_disk_is_an_error_that_costs_no_checkpoint(tmp_path, monkeypatch):
    store = store_in(tmp_path, 1, keep=1)
    calls, function = iter(range(100)), os.fsync

    def failing(file):
        if next(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        function(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.write(2, small(2))
    assert store.steps() == [1, 2]
    assert store.newest().step == 2


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    store = store_in(tmp_path, 1)

    def interrupt(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.write(2, small(2))
    assert names_in(tmp_path) == ["step-000000001"]


@pytest.fixture
def megabyte(tmp_path):
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        pytest.skip(f"no small disk: {error}")
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)


@pytest.mark.parametrize("snapshot", [small(), filled(1, 10_000)])
def test_a_full_disk_is_told_with_the_size_of_the_files(snapshot, tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, log=silent)

    def refuse(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(CheckpointError) as raised:
            store.write(1, snapshot)
    needed = re.search(r"it needs about ([0-9,]+) bytes, and [0-9,]+ are free\. Fix: free", str(raised.value))
    written = sum(path.stat().st_size for path in store.write(1, snapshot).iterdir())
    assert int(needed[1].replace(",", "")) == pytest.approx(written, rel=0.01)


def test_a_full_disk_is_told_with_figures_and_the_older_ones_stay(megabyte):
    store = CheckpointStore(megabyte / "runs", keep=3, log=silent)
    for step in (1, 2, 3):
        store.write(step, filled(step, 10_000))
    with pytest.raises(
        CheckpointError, match=r"No space left on device; it needs about 32[0-9],[0-9]+ bytes, and [0-9,]+ are free"
    ) as raised:
        store.write(4, filled(4, 10_000))
    assert raised.value.errno == errno.ENOSPC
    assert names_in(megabyte / "runs") == [f"step-{step:09}" for step in (1, 2, 3)]
    assert all(store.verify(path) == [] for path in store.paths())
    store.write(4, filled(4, 100))
    assert is_filled(store.newest())


def test_a_disk_that_is_full_to_the_last_byte_is_told_too(megabyte):
    CheckpointStore(megabyte / "locked").lock()
    with open(megabyte / "ballast", "wb", buffering=0) as file:
        assert file.write(bytes(1 << 21)) < 1 << 21
    for write in (CheckpointStore.lock, lambda store: store.write(1, small())):
        with pytest.raises(CheckpointError, match=r"No space left on device.*\. Fix: free space on that disk, or"):
            write(CheckpointStore(megabyte / "runs"))
    with CheckpointStore(megabyte / "locked"):
        pass  # A run that goes on may take the lock again.
    (megabyte / "ballast").unlink()
    store = store_in(megabyte / "runs", 1)
    assert_equal(store.newest(), small(1))


def test_a_read_only_disk_can_be_read_and_says_that_it_cannot_be_written(megabyte):
    store_in(megabyte / "runs", 1).close()
    subprocess.run(["mount", "-o", "remount,ro", str(megabyte)], check=True, timeout=30)
    store = CheckpointStore(megabyte / "runs", log=silent)
    assert_equal(store.newest(), small(1))
    for do in (store.lock, lambda: store.write(2, small(2))):
        with pytest.raises(CheckpointError, match=r"/runs: .* can.*: Read-only file system") as raised:
            do()
        assert raised.value.errno == errno.EROFS
    assert store.steps() == [1]


def test_a_signature_is_on_the_disk_before_it_replaces_the_manifest(tmp_path, monkeypatch):
    store_in(tmp_path, 1).close()
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("sync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    serialization.sign(tmp_path / "step-000000001", b"k" * 16)
    assert done == ["sync", "replace", "sync"]


def test_a_link_to_nowhere_is_no_checkpoint_and_not_waited_for(tmp_path):
    store_in(tmp_path, 1).close()
    (tmp_path / "step-000000009").symlink_to(tmp_path / "nowhere")
    said = []
    assert CheckpointStore(tmp_path, log=said.append).newest().step == 1
    assert len(said) == 1


def test_a_directory_below_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "runs")
    sentence = f"file/runs: the checkpoint of step 1 cannot be written: {tmp_path}/file is no directory. Fix: choose another directory."
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        store.write(1, small())
    for directory in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
            CheckpointStore(directory).newest()


def test_a_checkpoint_is_no_directory_of_checkpoints(tmp_path):
    """The names of a run's checkpoints are in its log lines; a run that was given one of them would start anew in it."""
    path = store_in(tmp_path, 1).paths()[0]
    before = names_in(path)
    sentence = f"{path}: no lock can be taken: it is itself a checkpoint. Fix: give the directory that contains it."
    with pytest.raises(CheckpointError, match=f"^{re.escape(sentence)}$"):
        CheckpointStore(path).lock()
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 cannot be written: it is itself a checkpoint"):
        CheckpointStore(path).write(2, small(2))
    assert names_in(path) == before


@pytest.mark.parametrize("keep", [1, 3])
def test_a_reader_beside_a_writer_finds_only_whole_ones(keep, tmp_path):
    ended = threading.Event()
    store = CheckpointStore(tmp_path, keep, log=silent)
    store.write(0, filled(0))

    def write():
        try:
            for step in range(1, 150):
                store.write(step // 2, filled(step // 2))
        finally:
            ended.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = []
    try:
        while not ended.is_set():
            loaded = CheckpointStore(tmp_path, log=silent).newest()
            assert is_filled(loaded)
            found.append(loaded.step)
    finally:
        writer.join(60)
    assert found == sorted(found)
    assert len(set(found)) > 2


def test_one_that_goes_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    store, parts_of = store_in(tmp_path, 1, keep=1), serialization.parts_of

    def overtaken(path, manifest):
        if store.steps() == [1]:
            store.write(2, small(2))
        return parts_of(path, manifest)

    monkeypatch.setattr(serialization, "parts_of", overtaken)
    assert CheckpointStore(tmp_path, log=silent).newest().step == 2


def test_several_threads_write_one_after_the_other(tmp_path):
    store = CheckpointStore(tmp_path, keep=20, log=[].append)
    threads = [threading.Thread(target=lambda n=n: store.write(n, filled(n))) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.steps() == list(range(10))
    assert all(is_filled(store.read(path)) for path in store.paths())


def test_a_write_of_another_thread_is_not_waited_for_without_end(tmp_path, monkeypatch):
    lines = []
    store = CheckpointStore(tmp_path, timeout_seconds=0.01, log=lines.append)
    begun, go = threading.Event(), threading.Event()
    sync = os.fsync

    def slow(file):
        begun.set()
        go.wait(60)
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        thread = threading.Thread(target=store.write, args=(1, Snapshot({})))
        thread.start()
        assert begun.wait(60)
        with pytest.raises(CheckpointError, match="step 2 cannot be written: another thread still writes after 0 s"):
            store.write(2, Snapshot({}))
        store.close()  # Training is complete: no error.
        assert "the lock is kept: another thread still writes after 0 s" in lines[-1]
        go.set()
        thread.join(60)
    assert store.steps() == [1]
