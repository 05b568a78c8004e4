"""Checkpoints of which each process writes its shards are read as if one process had written them, or not at all."""

import errno
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep import CheckpointError, cli
from lockstep.checkpoint.manifest import encode
from lockstep.checkpoint.serialization import Snapshot, describe, open_stored, parts_of, specs_of
from lockstep.checkpoint.shards import ArrayShard
from lockstep.checkpoint.store import CheckpointStore, ShardedSnapshot, ShardedStore, shared_token
from lockstep.fit.checkpointing.fit_checkpoint import on_all_processes

from .cases import names_in, silent, small, store_in

PROCESSES = 3
KERNEL, SCALES = "model/dense/kernel", "optimizer/dense/kernel/momentum"


class Group:
    """Gathers the values of threads that stand for processes."""

    def __init__(self):
        self.values, self.barrier = {}, threading.Barrier(PROCESSES, timeout=30)

    def gather_of(self, process):
        def gather(topic, value):
            self.values[topic, process] = json.dumps(value)
            self.barrier.wait()
            return [json.loads(self.values[topic, number]) for number in range(PROCESSES)]

        return gather

    def run(self, do):
        """The results of ``do(process, gather)`` in each thread; errors are results, too."""

        def one(process):
            try:
                return do(process, self.gather_of(process))
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(PROCESSES) as pool:
            return list(pool.map(one, range(PROCESSES)))


def split(snapshot, process):
    """The snapshot of a process: of a matrix a column, of a vector an element, and on the first process all else."""
    arrays = dict(snapshot.arrays)
    kernel, scales = arrays.pop(KERNEL), arrays.pop(SCALES)
    shards = {
        KERNEL: [ArrayShard(kernel.shape, (0, process), kernel[:, process : process + 1])],
        SCALES: [ArrayShard(scales.shape, (process,), scales[process : process + 1])],
    }
    return ShardedSnapshot(shards, Snapshot(arrays, snapshot.metadata) if process == 0 else None)


def write(directory, *steps, keep=3):
    """Write small checkpoints of these steps in shards; the result of each process."""

    def all_steps(process, gather):
        store = CheckpointStore(directory, keep, log=silent)
        if process == 0:
            store.lock()
        token = shared_token(directory, is_chief=process == 0, gather=gather)
        try:
            for step in steps:
                ShardedStore(store, process, token, gather).write_from(step, partial(split, small(step), process))
        finally:
            store.close()

    return Group().run(all_steps)


def assert_same(one, other):
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert (array.dtype, array.shape) == (other.arrays[name].dtype, other.arrays[name].shape), name
        assert array.tobytes() == other.arrays[name].tobytes(), name
    assert repr(one.metadata) == repr(other.metadata)


def test_shards_of_several_processes_are_read_as_whole_arrays(tmp_path):
    assert write(tmp_path, 1, 2, 3, keep=2) == [None] * PROCESSES
    assert names_in(tmp_path) == ["step-000000002", "step-000000003"]
    store = CheckpointStore(tmp_path, log=silent)
    for path in store.paths():
        assert names_in(path) == ["arrays.npz", "manifest.json", "part-0", "part-1", "part-2"]
        assert store.verify(path) == []
    assert_same(store.newest(), small(3))
    assert KERNEL not in np.load(path / "arrays.npz").files
    assert np.load(path / "part-2" / "arrays.npz")[f"{KERNEL} from 0, 2"].shape == (2, 1)


def test_a_signature_holds_the_parts_too(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("a key of 16 bytes, at least")
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_KEY_FILE", str(tmp_path / "key"))
    write(tmp_path / "run", 1)
    store = CheckpointStore(tmp_path / "run", log=silent)
    assert_same(store.newest(), small(1))
    (path,) = store.paths()
    shutil.rmtree(path / "part-1")
    shutil.copytree(path / "part-0", path / "part-1")
    assert "is damaged, or of another checkpoint" in store.verify(path)[0]


def test_the_command_knows_parts(tmp_path, capsys, monkeypatch):
    write(tmp_path / "run", 7)
    store_in(tmp_path / "whole", 7)

    def said(*arguments):
        assert cli.main(["checkpoint", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    assert f"{KERNEL} from 0, 2: float32 (2, 1), sha256 " in said("show", "-v", tmp_path / "run")
    assert said("verify", tmp_path / "run") == "step-000000007: good\n"
    for name in ("run", "whole"):
        said("export", tmp_path / name, tmp_path / f"{name}.npz")
    with np.load(tmp_path / "run.npz") as ours, np.load(tmp_path / "whole.npz") as theirs:
        assert set(ours.files) == set(theirs.files)
        assert ours[KERNEL].tobytes() == theirs[KERNEL].tobytes()
    (tmp_path / "key").write_text("a key of 16 bytes, at least")
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_KEY_FILE", str(tmp_path / "key"))
    said("sign", tmp_path / "run")
    assert_same(CheckpointStore(tmp_path / "run", log=silent).newest(), small(7))


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(np.asarray(small(2).arrays[KERNEL][0, 1]).tobytes())] ^= 1
    path.write_bytes(content)


def swap(path):
    shutil.rmtree(path / "part-1")
    shutil.copytree(path.parent / "step-000000001" / "part-1", path / "part-1")


DAMAGES = {
    "a part is missing": (lambda path: shutil.rmtree(path / "part-1"), "is missing"),
    "arrays of a part are missing": (lambda path: (path / "part-1" / "arrays.npz").unlink(), "is missing"),
    "a bit": (lambda path: flip(path / "part-1" / "arrays.npz"), "is damaged: its 8 bytes have sha256"),
    "a manifest": (lambda path: (path / "part-1" / "manifest.json").write_text("{}"), "is damaged, or of another"),
    "a part of another step": (swap, "is damaged, or of another checkpoint"),
    "a part is cut off": (lambda path: os.truncate(path / "part-1" / "arrays.npz", 100), "is truncated"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_makes_the_checkpoint_one_that_is_skipped(damage, tmp_path):
    do, found = DAMAGES[damage]
    write(tmp_path, 1, 2)
    lines = []
    store = CheckpointStore(tmp_path, log=lines.append)
    newest = store.paths()[-1]
    do(newest)
    assert_same(store.newest(), small(1))
    assert len(lines) == 1
    assert found in lines[0]
    (sentence,) = store.verify(newest)
    assert found in sentence


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([[0, 0], [0, 1]], "has shards of 4 numbers in all"),
        ([[0, 0], [0, 1], [0, 2], [0, 2]], "has shards of 8 numbers in all"),
        ([[0, 0], [0, 1], [0, 1]], r"has several shards at \(0, 1\)"),
        ([[0, 0], [0, 1], [0, 3]], "is outside of array"),
        ([[0, 0], [0, 1], [0, -1]], "expected a whole number of at least 0"),
        ([[0, 0], [0, 1], [2]], "a shard at "),
    ],
)
def test_shards_that_are_no_whole_array_are_refused(starts, found, tmp_path):
    """Their digests are right: a program with an error has written them."""
    store = CheckpointStore(tmp_path, log=silent)
    block = np.zeros((2, 1))
    shards = {f"kernel {n}": {"array": "kernel", "shape": [2, 3], "start": start} for n, start in enumerate(starts)}
    digest = store.write_part("part", 1, Snapshot(dict.fromkeys(shards, block), {"shards": shards}))
    path = store.write(1, Snapshot({}), [(tmp_path / "part", digest)])
    with pytest.raises(CheckpointError, match=f"its parts are no whole arrays.*{found}"):
        store.read(path)
    store.close()


def test_an_error_of_one_process_is_that_of_all_and_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    write(tmp_path, 1)
    write_part = CheckpointStore.write_part

    def full(store, name, step, snapshot):
        if name.startswith(".part-2"):
            raise CheckpointError("the disk is full", errno.ENOSPC)
        return write_part(store, name, step, snapshot)

    monkeypatch.setattr(CheckpointStore, "write_part", full)
    assert {str(error) for error in write(tmp_path, 2)} == {"worker 2: the disk is full"}
    assert names_in(tmp_path) == ["step-000000001"]


def test_a_process_that_cannot_make_its_content_takes_part_in_the_next_checkpoint(tmp_path):
    def both_steps(process, gather):
        def make():
            if process == 1:
                raise MemoryError("no room for a copy")
            return split(small(1), process)

        store = CheckpointStore(tmp_path, log=silent)
        sharded = ShardedStore(store, process, shared_token(tmp_path, is_chief=process == 0, gather=gather), gather)
        with pytest.raises(CheckpointError, match="worker 1: MemoryError: no room for a copy"):
            sharded.write_from(1, make)
        sharded.write_from(2, partial(split, small(2), process))
        store.close()

    assert Group().run(both_steps) == [None] * PROCESSES
    assert names_in(tmp_path) == ["step-000000002"]


def test_an_error_of_the_chief_is_that_of_all(tmp_path, monkeypatch):
    def locked(*_):
        raise CheckpointError("another job writes there")

    monkeypatch.setattr(CheckpointStore, "write", locked)
    assert {str(error) for error in write(tmp_path, 2)} == {"another job writes there"}
    assert names_in(tmp_path) == []


def test_parts_that_a_killed_process_has_left_are_removed_by_the_next_job(tmp_path):
    write(tmp_path, 1)
    for name in (".part-1-of-000000002-abc", ".writing-.part-0-of-000000002-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arrays.npz").write_bytes(b"half")
    with CheckpointStore(tmp_path, log=silent):
        assert names_in(tmp_path) == ["step-000000001"]


def test_directories_that_are_not_the_same_are_found_out(tmp_path):
    def token(process, gather):
        directory = tmp_path if process != 2 else tmp_path / "of its own"
        return shared_token(directory, is_chief=process == 0, gather=gather)

    assert Group().run(token) == [None] * PROCESSES
    assert names_in(tmp_path) == []


def test_the_manifest_of_a_part_is_known_by_its_digest(tmp_path):
    write(tmp_path, 1)
    store = CheckpointStore(tmp_path, log=silent)
    (path,) = store.paths()
    manifest = describe(path)
    parts = parts_of(path, manifest)
    assert [hashlib.sha256(encode(part)).hexdigest() for part in parts.values()] == list(manifest.parts)


def test_the_damage_of_each_file_is_told(tmp_path):
    write(tmp_path, 1)
    store = CheckpointStore(tmp_path, log=silent)
    (path,) = store.paths()
    for file in (path / "arrays.npz", path / "part-1" / "arrays.npz"):
        file.write_bytes(file.read_bytes()[:-1])
    (path / "part-2" / "arrays.npz").unlink()
    assert [problem.split(": ")[1].split(".")[0] for problem in store.verify(path)] == [
        "is truncated",
        "is truncated",
        "is missing",
    ]


def test_arrays_that_stay_in_files_are_those_that_are_read_and_are_checked_each_time(tmp_path):
    write(tmp_path, 1)
    (path,) = CheckpointStore(tmp_path, log=silent).paths()
    stored = open_stored(path).arrays
    assert_same(Snapshot(dict(stored), small(1).metadata), small(1))
    assert specs_of(stored) == specs_of(small(1).arrays)
    file = path / "part-1" / "arrays.npz"
    content = bytearray(file.read_bytes())
    entry = describe(path / "part-1").arrays[f"{SCALES} from 1"]
    content[entry.offset] ^= 1
    file.write_bytes(content)
    assert stored[KERNEL].tobytes() == small(1).arrays[KERNEL].tobytes()
    with pytest.raises(CheckpointError, match=f"array '{SCALES} from 1' is damaged"):
        stored[SCALES]


@pytest.mark.parametrize("others_have", ["the same", "none", "another of this name"])
def test_processes_that_all_have_the_checkpoint_read_it_themselves(others_have, tmp_path):
    directories = [tmp_path / ("chief" if others_have == "the same" else str(process)) for process in range(PROCESSES)]
    write(directories[0], 1)
    if others_have == "another of this name":
        with CheckpointStore(directories[2], log=silent) as store:
            store.write(1, small(2))
    sent = []

    def resume(process, gather):
        def send(found):
            sent.append(found)
            return gather("arrays", sorted(found[1]) if found else None)[0]

        group = SimpleNamespace(all_gather=gather, broadcast_from_chief=send)
        store = CheckpointStore(directories[process], log=silent)
        loaded = store.newest(keep_stored=True) if process == 0 else None
        return on_all_processes(loaded, store.directory, group)

    found = Group().run(resume)
    if others_have == "the same":
        assert not sent
        for step, arrays, metadata in found:
            assert step == 1
            assert_same(Snapshot(dict(arrays), metadata), small(1))
    else:
        assert found == [sorted(small(1).arrays)] * PROCESSES
        assert [each is None for each in sent].count(True) == PROCESSES - 1


def test_a_part_that_was_moved_into_a_checkpoint_is_not_removed_by_its_old_name(tmp_path, monkeypatch):
    """A network file system may find it there under both names for a while."""
    removed = []
    monkeypatch.setattr("lockstep.checkpoint.store.shutil.rmtree", lambda path, **_: removed.append(path))
    assert write(tmp_path, 1) == [None] * PROCESSES
    assert removed == []
