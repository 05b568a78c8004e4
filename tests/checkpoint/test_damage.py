"""What is not as it was written is refused with what was found, and the newest good checkpoint is used."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest

from lockstep import CheckpointError
from lockstep.checkpoint.manifest import decode
from lockstep.checkpoint.serialization import Snapshot, describe
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, small, store_in, traced_memory


def flipped(content):
    """Each copy of some bytes with one bit turned, and in which byte."""
    for position in range(8 * len(content)):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        yield position // 8, bytes(changed)


def test_every_bit_of_the_manifest_counts(tmp_path):
    store = store_in(tmp_path, 4)
    (path,) = store.paths()
    where = path / "manifest.json"
    for byte, changed in flipped(where.read_bytes()):
        with pytest.raises(CheckpointError, match=r"manifest\.json: is (foreign|damaged|truncated, or damaged)"):
            decode(changed, where)
        if byte % 20 == 0:
            where.write_bytes(changed)
            assert len(store.verify(path)) == 1


@pytest.mark.parametrize("others", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_every_bit_of_the_arrays_counts_and_no_other_bit_of_their_file_changes_what_is_read(others, tmp_path):
    store = store_in(tmp_path, 4)
    (path,) = store.paths()
    entries = describe(path).arrays.values()
    counting = {byte for entry in entries for byte in range(entry.offset, entry.offset + entry.nbytes)}
    assert len(counting) == 24 + 6 + 4
    for number, (byte, changed) in enumerate(flipped((path / "arrays.npz").read_bytes())):
        if byte not in counting and (number + byte) % 8 >= others:
            continue
        (path / "arrays.npz").write_bytes(changed)
        if byte in counting:
            with pytest.raises(CheckpointError, match=r"array '.*' is damaged: its \d+ bytes have sha256"):
                store.read(path)
            assert len(store.verify(path)) == 1
        else:
            assert_equal(store.read(path), small(4))


@pytest.mark.parametrize("name", ["manifest.json", "arrays.npz"])
def test_every_shorter_and_every_longer_file_is_refused(name, tmp_path):
    store = store_in(tmp_path, 4)
    (path,) = store.paths()
    content = (path / name).read_bytes()
    for length in range(len(content)):
        (path / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"truncated|is empty"):
            store.read(path)
    (path / name).write_bytes(content + b"\n")
    with pytest.raises(CheckpointError, match="damaged"):
        store.read(path)


def fields_of(path):
    fields = json.loads((path / "manifest.json").read_text())
    del fields["sha256"]
    return fields


def say(path, fields):
    """Write a manifest of these fields, with a right sha256."""
    head = ("{\n" + "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items())).encode()
    (path / "manifest.json").write_bytes(head + f'"sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode())


def replace_by_a_file(path):
    shutil.rmtree(path)
    path.write_text("")


def replace_zeros(path):
    (path / "arrays.npz").write_bytes(bytes((path / "arrays.npz").stat().st_size))


DAMAGES = {
    "foreign": (
        lambda path: (path / "manifest.json").write_text('{"model": 1}'),
        "manifest.json: is foreign: no manifest of Lockstep begins with b'{\"model\": 1}'",
    ),
    "empty directory": (
        lambda path: [file.unlink() for file in path.iterdir()],
        "manifest.json: is missing.",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: is missing."),
    "no arrays": (lambda path: (path / "arrays.npz").unlink(), "arrays.npz: is missing."),
    "torn manifest": (
        lambda path: os.truncate(path / "manifest.json", 0),
        "manifest.json: is empty: its writer was interrupted.",
    ),
    "torn arrays": (
        lambda path: os.truncate(path / "arrays.npz", 100),
        "arrays.npz: is truncated: it has 100 bytes, expected 1,144.",
    ),
    "zeros": (replace_zeros, "array 'model/dense/kernel' is damaged: its 24 bytes have sha256"),
    "a file": (replace_by_a_file, "manifest.json: cannot be read: Not a directory."),
    "a newer version": (
        lambda path: say(path, fields_of(path) | {"version": 7, "arrays": "elsewhere"}),
        "is of format version 7; this Lockstep reads versions up to 2. Fix: read it with the Lockstep that wrote it, or a newer",
    ),
    "another step": (
        lambda path: say(path, fields_of(path) | {"step": 4}),
        "is the checkpoint of step 4 under the name of another.",
    ),
    "arrays of another checkpoint": (
        lambda path: shutil.copy(path.parent / "step-000000008" / "arrays.npz", path),
        "array 'model/dense/kernel' is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_refused_with_what_was_found_and_the_newest_good_one_is_used(damage, tmp_path):
    do, found = DAMAGES[damage]
    lines = []
    store = store_in(tmp_path, 7, 8, 9, log=lines.append)
    do(store.paths()[-1])
    loaded = store.newest()
    assert loaded.step == 8
    assert_equal(loaded, small(8))
    (line,) = lines
    assert line.startswith(f"checkpoint refused: {tmp_path / 'step-000000009'}")
    assert found in line
    assert found in store.verify(store.paths()[-1])[0]


def test_where_none_is_good_the_error_lists_all(tmp_path):
    lines = []
    store = store_in(tmp_path, 7, 8, log=lines.append)
    os.truncate(store.paths()[0] / "arrays.npz", 5)
    (store.paths()[1] / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint there is good:\n.*8/manifest.json: is missing\. Fix: .*\n.*truncated"
    ):
        store.newest()
    assert len(lines) == 2


def test_where_there_is_none_there_is_none(tmp_path):
    assert CheckpointStore(tmp_path / "nothing").newest() is None
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    assert CheckpointStore(tmp_path).newest() is None
    assert CheckpointStore(tmp_path).steps() == []


def test_verify_finds_each_damaged_array(tmp_path):
    (path,) = store_in(tmp_path, 4).paths()
    replace_zeros(path)
    problems = CheckpointStore(tmp_path).verify(path)
    assert [re.search("array '(.*?)'", problem)[1] for problem in problems] == list(small(4).arrays)[:3]


def entry(**fields):
    return {"a": {"dtype": "float32", "shape": [2], "offset": 0, "sha256": "0" * 64} | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"arrays": entry(shape=[2**40])},
            r"arrays.npz: has 1,144 bytes, but array 'a' of 4,398,046,511,104 begins at 0",
        ),
        ({"arrays": entry(offset=1140)}, "but array 'a' of 8 begins at 1,140"),
        ({"arrays": {str(n): entry(shape=[280])["a"] for n in range(100)}}, "the arrays in it would take 112,000"),
        ({"arrays": entry(shape=[0, 2**70])}, r"no array has shape \(0, 1180591620717411303424\)"),
        ({"arrays": entry(shape=[1] * 65)}, "array 'a': no array has shape"),
        ({"bytes": 10**12}, "is truncated: it has 1,144 bytes, expected 1,000,000,000,000"),
        ({"arrays": entry(shape=[-1])}, "a dimension or an offset: expected a whole number of at least 0, got -1"),
        ({"arrays": entry(shape=[1.5])}, "expected a whole number of at least 0, got 1.5"),
        ({"arrays": entry(offset=True)}, "got True"),
        ({"arrays": entry(dtype="object")}, "ValueError: an array of dtype 'object'"),
        ({"arrays": entry(dtype=["f4"])}, "TypeError: unhashable"),
        ({"arrays": entry(sha256=None)}, "TypeError"),
        ({"arrays": entry(sha256="../../etc/passwd")}, "ValueError: a sha256 of"),
        ({"arrays": entry(file="../../etc/passwd")}, "TypeError: .*unexpected keyword argument 'file'"),
        ({"arrays": {"a\0": {}}}, "expected names of type str without NUL"),
        ({"arrays": []}, "AttributeError"),
        ({"step": "4"}, "step: expected a whole number of at least 0, got '4'"),
        ({"version": "new"}, "version: expected a whole number"),
        ({"facts": 3}, "TypeError: 'int' object is not iterable"),
        ({"facts": None}, "TypeError"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_memory_is_taken(fields, message, tmp_path):
    (path,) = store_in(tmp_path, 4).paths()
    say(path, fields_of(path) | fields)
    with traced_memory() as peak, pytest.raises(CheckpointError, match=message):
        CheckpointStore(tmp_path).read(path)
    assert peak() < 1e6


def test_a_manifest_that_nests_without_end_or_lacks_something_is_refused(tmp_path):
    (path,) = store_in(tmp_path, 4).paths()
    fields = fields_of(path)
    del fields["facts"]
    say(path, fields)
    with pytest.raises(CheckpointError, match="no valid manifest: KeyError: 'facts'"):
        CheckpointStore(tmp_path).read(path)
    head = b'{\n"format": "lockstep checkpoint",\n"version": ' + b"[" * 100_000 + b",\n"
    digest = hashlib.sha256(head).hexdigest()
    (path / "manifest.json").write_bytes(head + f'"sha256": "{digest}"\n}}\n'.encode())
    with pytest.raises(CheckpointError, match="RecursionError"):
        CheckpointStore(tmp_path).read(path)


def test_names_of_arrays_lead_nowhere(tmp_path):
    outside = {"../../escaped": np.ones(3), "/tmp/escaped": np.ones(3), "a/../b": np.ones(1)}
    store = CheckpointStore(tmp_path / "store")
    loaded = store.read(store.write(1, Snapshot(outside)))
    assert_equal(loaded, Snapshot(outside))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
