"""Files in a directory that others may write to: nothing planted there is written through, or waited for."""

import ast
import errno
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep import cli
from lockstep._atomic_files import open_own, open_to_read, read_file, replace_file
from lockstep.callbacks import BackupAndRestore
from lockstep.checkpoint.serialization import STATUS, Snapshot
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.cache import FileBatchStore
from lockstep.fit.monitoring import tensorboard
from lockstep.fit.monitoring.tensorboard import EventFile, newest_steps
from tests.checkpoint.cases import silent, store_in
from tests.fit.monitoring.runs import built, fit
from tests.launch.launching import program, run

PACKAGE = Path(lockstep.__file__).parent
TREASURE = "of another user\n"
FIX = "Fix: make it readable for this user, or use another checkpoint."


@pytest.fixture
def victim(tmp_path):
    """A file that nothing here may change."""
    path = tmp_path / "victim"
    path.write_text(TREASURE)
    yield path
    assert path.read_text() == TREASURE


@pytest.fixture(params=[os.symlink, os.link])
def plant(request):
    """Makes a link, as somebody may who can write to a directory."""
    return request.param


def test_a_planted_lock_is_refused_before_training(plant, victim, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    plant(victim, folder / ".lock")
    with pytest.raises(
        lockstep.CheckpointError, match=r"run: no lock can be taken: \.lock (is a symb|has 2 hard links)"
    ):
        fit(built(), BackupAndRestore(folder))
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    with pytest.raises(lockstep.CheckpointError, match=r"no lock can be taken: \.lock is no regular file"):
        CheckpointStore(folder).lock()


def test_a_planted_status_is_replaced_and_not_followed(plant, victim, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (STATUS, f".{STATUS}.{os.getpid()}"):
        plant(victim, folder / name)
    fit(built(), BackupAndRestore(folder))
    assert not (folder / STATUS).is_symlink()
    assert '"state": "ended"' in (folder / STATUS).read_text()


def test_a_planted_temporary_directory_is_not_written_to(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for number, target in enumerate(("elsewhere", "nowhere")):
        (folder / f".writing-step-00000000{number}").symlink_to(tmp_path / target)
        (folder / f".removing-step-00000000{number}").symlink_to(tmp_path / target)
    store = store_in(folder, 0, 1, log=silent)
    assert store.steps() == [0, 1]
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_a_planted_log_is_refused_before_the_workers_start(plant, victim, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    plant(victim, logs / "worker-0.log")
    done = run("--log-dir", logs, program(tmp_path, "print('of the worker')"))
    assert done.returncode == 2
    assert re.search(rf"--log-dir {logs}: worker-0\.log (is a symbolic link|has 2 hard links)", done.stderr), (
        done.stderr
    )


def test_a_planted_file_of_events_is_refused(plant, victim, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "_numbers", iter((7, 7)))
    EventFile(tmp_path / "logs", clock=lambda: 1e9).close()
    (made,) = (tmp_path / "logs").iterdir()
    made.unlink()
    plant(victim, made)
    with pytest.raises(OSError, match=r"is a symbolic link|has 2 hard links"):
        EventFile(tmp_path / "logs", clock=lambda: 1e9)


def test_a_cache_that_was_replaced_by_a_link_is_refused(plant, victim, tmp_path):
    store = FileBatchStore(tmp_path / "cache")
    store.append(np.arange(3))
    (tmp_path / "cache").unlink()
    plant(victim, tmp_path / "cache")
    with pytest.raises(OSError, match=r"is a symbolic link|has 2 hard links"):
        store.append(np.arange(3))


def test_an_export_follows_no_planted_link(plant, victim, tmp_path):
    store_in(tmp_path / "run", 1)
    for name in ("out.npz", "out.npz.writing"):
        plant(victim, tmp_path / name)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out.npz")]
    assert cli.main(command) == 2
    assert cli.main([*command, "--overwrite"]) == 0
    assert "metrics/empty" in np.load(tmp_path / "out.npz")


# Reading.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "arrays.npz"])
def test_a_fifo_in_a_checkpoint_is_passed_over(name, tmp_path):
    lines = []
    store = store_in(tmp_path, 7, 8, log=lines.append)
    newest = store.paths()[-1]
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert store.newest().step == 7
    assert lines == [f"checkpoint refused: {newest / name}: cannot be read: {name} is no regular file. {FIX}"]
    assert store.verify(newest) == [f"{newest / name}: cannot be read: {name} is no regular file. {FIX}"]
    assert cli.main(["checkpoint", "show", str(tmp_path)]) == 0


@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_a_status_or_of_events_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / STATUS)
    assert cli.main(["top", str(tmp_path), "--once"]) == 2
    assert f"{STATUS} is no regular file" in capsys.readouterr().err
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    with pytest.raises(OSError, match="is no regular file"):
        newest_steps(tmp_path)


def test_a_manifest_that_is_too_large_takes_no_memory_and_is_never_written(tmp_path, monkeypatch):
    store = store_in(tmp_path, 7, log=silent)
    (path,) = store.paths()
    os.truncate(path / "manifest.json", 1 << 40)  # A file with a hole needs no space.
    assert store.verify(path) == [
        f"{path / 'manifest.json'}: cannot be read: manifest.json has more than 268,435,456 bytes. {FIX}"
    ]
    monkeypatch.setattr("lockstep.checkpoint.serialization.MAX_MANIFEST_BYTES", 2000)
    with pytest.raises(
        lockstep.OptionError, match=r"metadata: its manifest would have \d,\d+ bytes, at most 2,000 are"
    ):
        store.write(8, Snapshot({}, {"history": [0.25] * 1000}))
    assert store.steps() == [7]


def test_damaged_events_end_their_file(tmp_path):
    for number in range(40):
        file = EventFile(tmp_path)
        file.write(number, [tensorboard.scalar("loss", 0.5)])
        file.close()
    content = max(tmp_path.iterdir()).read_bytes()
    rng = np.random.default_rng(0)
    for path in sorted(tmp_path.iterdir())[1:]:
        changed = np.frombuffer(content, np.uint8).copy()
        changed[rng.integers(len(changed), size=5)] = rng.integers(256, size=5)
        path.write_bytes(changed.tobytes())
    assert newest_steps(tmp_path)["loss"] >= 0


# The functions themselves.


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    replace_file(path, lambda file: file.write(b"first"))

    def fail(file):
        file.write(b"second")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, fail)
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_has_the_rights_that_others_have(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "replaced", lambda file: file.write(b""))
        os.close(open_own(tmp_path / "own", os.O_WRONLY))
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("replaced", "own")] == [0o640, 0o640]


def test_reading_needs_a_regular_file_of_at_most_so_many_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="file has more than 4 bytes"):
        read_file(tmp_path / "file", 4)
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="is no regular file"):
            open_to_read(path)


WRITES = {  # Places that open a file for writing otherwise, and why they may.
    "_atomic_files.py": "the functions that all others use",
    "launch/worker_process.py": "a pipe, by its descriptor, and a nameless temporary file",
    "tools/script_runner.py": "in a TemporaryDirectory, which is its user's alone",
    "tools/scaling/workload.py": "in that TemporaryDirectory",
    "tools/scaling/api.py": "paths that the user names, such as /dev/stdout",
    "tools/migrate/translate.py": "in a TemporaryDirectory",
    "data/cache.py": "a descriptor of open_own",
    "checkpoint/serialization.py": "mode x follows no link; and a member of a zip file that is open",
    "cli.py": "descriptors of the terminal",
    "launch/supervisor.py": "a descriptor of open_own",
    "fit/monitoring/tensorboard.py": "a descriptor of open_own",
}


OTHER_WAYS = r"(^os\.open|\.write_text|\.write_bytes|\.touch|NamedTemporaryFile|mktemp|np\.savez?|FileHandler)$"


def writes_in(path):
    """The calls of a file that open another one for writing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        modes = [
            each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        is_written = any(re.fullmatch(r"[rwxab+]+", mode) and mode.strip("rb") for mode in modes)
        if (is_written and re.search(r"\b(open|FileIO|fdopen)$", name)) or re.search(OTHER_WAYS, name):
            yield name


@pytest.mark.slow
def test_every_place_that_opens_a_file_for_writing_is_known():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if list(writes_in(path))}
    assert found == set(WRITES), "Fix: use lockstep._atomic_files, or say why another way is safe"


@pytest.mark.parametrize("refuses_files", [False, True])
def test_directories_need_no_sync_where_the_file_system_has_none(tmp_path, monkeypatch, refuses_files):
    sync = os.fsync

    def fsync(descriptor):
        if refuses_files or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if refuses_files:
        with pytest.raises(OSError, match="Invalid argument"):
            replace_file(tmp_path / "file", lambda file: file.write(b"x"), is_synced=True)
        assert list(tmp_path.iterdir()) == []
    else:
        replace_file(tmp_path / "file", lambda file: file.write(b"x"), is_synced=True)
        assert (tmp_path / "file").read_bytes() == b"x"
