"""``lockstep checkpoint export`` and ``import``: other programs read an export, and what is imported has the bits that were exported.

``./scripts/test-inputs`` runs these with safetensors and Orbax, where none may be skipped.
"""

import contextlib
import importlib
import os
import shutil

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep import CheckpointError, cli
from lockstep._array_encoding import DTYPES
from lockstep.checkpoint import export_formats
from lockstep.checkpoint.export_formats import FORMATS, export, read_export
from lockstep.checkpoint.manifest import KEY_FILE, MANIFEST
from lockstep.checkpoint.serialization import ARRAYS, Loaded, Snapshot
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, names_in, said, silent, small, store_in
from .test_round_trip import ARRAYS as ANY_ARRAY
from .test_round_trip import FACTS, TEXT

PACKAGES = {"npz": None, "safetensors": "safetensors", "orbax": "orbax.checkpoint"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Orbax
    pytest.mark.filterwarnings("ignore::UserWarning:orbax"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of Orbax, for damaged directories
]

for package in ("safetensors.numpy", "orbax.checkpoint"):  # Here, as importing Orbax may change the environment.
    with contextlib.suppress(ImportError):
        importlib.import_module(package)


@pytest.fixture(params=FORMATS)
def format_name(request):
    package = PACKAGES[request.param]
    if package and os.environ.get("LOCKSTEP_ALL_INPUTS"):
        importlib.import_module(package)
    elif package:
        pytest.importorskip(package, reason=f"{package} is not installed: ./scripts/test-inputs runs this")
    return request.param


def test_the_command_knows_all_formats():
    assert tuple(FORMATS) == cli.EXPORT_FORMATS


def loaded_of(snapshot, folder, step=7):
    return Loaded(step, snapshot.arrays, snapshot.metadata, folder / "step-000000007")


def content(directory):
    return {name: (directory / name).read_bytes() for name in (MANIFEST, ARRAYS)}


def test_import_makes_the_files_that_were_exported(format_name, tmp_path, capsys):
    (original,) = store_in(tmp_path / "runs", 12).paths()
    target = tmp_path / "exported"
    printed = said(capsys, "export", tmp_path / "runs", target, "--format", format_name)
    assert printed.out == f"{target}: 4 arrays of step 12\n"
    assert printed.err == ""
    imported = tmp_path / "new" / "runs" / "step-000000012"
    printed = said(capsys, "import", target, tmp_path / "new" / "runs")
    assert (printed.out, printed.err) == (f"{imported}: 4 arrays of step 12\n", "")
    assert content(imported) == content(original)
    assert names_in(tmp_path) == ["exported", "new", "runs"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_export_returns_the_bits_of_every_dtype(dtype, format_name, tmp_path):
    bits = np.random.default_rng(0).integers(0, 256, (5, 3, DTYPES[dtype].itemsize), np.uint8)
    array = bits.view(DTYPES[dtype])[..., 0] if dtype != "bool" else (bits[..., 0] > 100)
    arrays = {"Füße/«ω»": array, "turned": array.T, "every other": array[::-2, ::2], "one": array[0, 0]}
    snapshot = Snapshot(arrays | {"none": array[:0], "no numbers": array[:, :0]}, {"epoch": 3})
    assert export(loaded_of(snapshot, tmp_path), tmp_path / "exported", format_name) == 6
    step, found = read_export(tmp_path / "exported")
    assert step == 7
    assert_equal(found, snapshot)


def test_read_export_returns_the_bits_of_every_nan(format_name, tmp_path):
    bits = np.asarray([0x7F81, 0xFFFF, 0x7FC0, 0xFF80, 0x8000], np.uint16)
    snapshot = Snapshot({"odd": bits.view(DTYPES["bfloat16"]), "usual": bits[2:].view(DTYPES["bfloat16"])})
    export(loaded_of(snapshot, tmp_path), tmp_path / "exported", format_name)
    assert_equal(read_export(tmp_path / "exported")[1], snapshot)
    if format_name == "npz":
        with np.load(tmp_path / "exported") as file:
            assert (file["odd"].dtype, file["usual"].dtype) == (np.uint16, np.float32)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(TEXT, ANY_ARRAY, min_size=1, max_size=4), st.dictionaries(TEXT, FACTS, max_size=3))
def test_read_export_returns_every_name_and_value(tmp_path_factory, arrays, metadata):
    folder = tmp_path_factory.mktemp("any")
    export(loaded_of(Snapshot(arrays, metadata), folder), folder / "exported", "npz")
    assert_equal(read_export(folder / "exported")[1], Snapshot(arrays, metadata))
    shutil.rmtree(folder)


@pytest.mark.parametrize("names", [["x", "x.npy"], ["lockstep.json", "a/b", "a"], ["../x", "", ".", "x" * 300]])
def test_read_export_tells_names_apart_that_look_alike(names, format_name, tmp_path):
    snapshot = Snapshot({name: np.arange(3) + number for number, name in enumerate(names)})
    export(loaded_of(snapshot, tmp_path), tmp_path / "exported", format_name)
    assert_equal(read_export(tmp_path / "exported")[1], snapshot)
    assert names_in(tmp_path) == ["exported"]


def test_export_is_read_by_the_library_of_its_format(format_name, tmp_path):
    snapshot = small(8)
    target = tmp_path / "exported"
    export(loaded_of(snapshot, tmp_path), target, format_name)
    if format_name == "npz":
        with np.load(target) as file:
            found = {name: file[name] for name in snapshot.arrays}
    elif format_name == "safetensors":
        found = importlib.import_module("safetensors.numpy").load_file(target)
    else:
        with importlib.import_module("orbax.checkpoint").StandardCheckpointer() as checkpointer:
            found = {"metrics/empty": snapshot.arrays["metrics/empty"]} | checkpointer.restore(target)
    assert set(found) == set(snapshot.arrays)
    for name, array in snapshot.arrays.items():
        is_wider = format_name == "npz" and array.dtype.name == "bfloat16"
        np.testing.assert_array_equal(found[name], array.astype(np.float32) if is_wider else array, strict=True)


@pytest.mark.parametrize("format_name", [name for name in FORMATS if name != "orbax"], indirect=True)
def test_a_file_that_is_exported_is_on_the_disk_and_can_be_read_by_others(format_name, tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    mask = os.umask(0o022)
    try:
        export(loaded_of(small(8), tmp_path), tmp_path / "exported", format_name)
    finally:
        os.umask(mask)
    found = (tmp_path / "exported").stat()
    assert found.st_ino in synced
    assert found.st_mode & 0o777 == 0o644


def test_import_refuses_an_export_of_some_arrays(format_name, tmp_path, capsys):
    store_in(tmp_path / "runs", 7)
    said(capsys, "export", tmp_path / "runs", tmp_path / "some", "--format", format_name, "--only", "model/*")
    printed = said(capsys, "import", tmp_path / "some", tmp_path / "new", code=2).err
    assert printed == (
        f"lockstep checkpoint: {tmp_path}/some: has no manifest of Lockstep: expected an export of a whole checkpoint. Fix: write "
        "it with 'lockstep checkpoint export' without --only.\n"
    )
    assert names_in(tmp_path) == ["runs", "some"]


def files_of(path):
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def test_read_export_refuses_every_truncation(format_name, tmp_path):
    """Or has lost nothing: Orbax has files that it does not need."""
    snapshot = small()
    target = tmp_path / "exported"
    export(loaded_of(snapshot, tmp_path), target, format_name)
    is_refused = []
    for file in files_of(target):
        whole = file.read_bytes()
        for length in sorted({0, 1, 4, 8, 9, *range(10, len(whole), max(1, len(whole) // 20)), len(whole) - 1} - {-1}):
            if length < len(whole):
                file.write_bytes(whole[:length])
                is_refused.append(refused_or_equal(target, snapshot))
        file.write_bytes(whole)
    assert all(is_refused) or (format_name == "orbax" and any(is_refused))
    assert not refused_or_equal(target, snapshot)


def test_read_export_refuses_flipped_bits(format_name, tmp_path):
    """Or has the same bits, if the flipped one is in what no reader needs, such as a time in a zip file."""
    snapshot = small()
    target = tmp_path / "exported"
    export(loaded_of(snapshot, tmp_path), target, format_name)
    count = 0
    for file in files_of(target):
        whole = bytearray(file.read_bytes())
        for place in (
            np.random.default_rng(0).integers(0, 8 * len(whole), 60 if format_name == "npz" else 20) if whole else ()
        ):
            whole[place // 8] ^= 1 << place % 8
            file.write_bytes(whole)
            count += refused_or_equal(target, snapshot)
            whole[place // 8] ^= 1 << place % 8
        file.write_bytes(whole)
    assert count > 10


def refused_or_equal(target, snapshot):
    try:
        _, found = read_export(target)
    except CheckpointError:
        return True
    assert_equal(found, snapshot)
    return False


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (b"", "is foreign or truncated"),
        (b"#!/bin/sh\n", "is foreign or truncated"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "is foreign or truncated"),
        (b"PK\x03\x04" + bytes(100), "is damaged, or no npz file: BadZipFile: .*Fix: write it anew"),
    ],
)
def test_read_export_refuses_foreign_files(begin, problem, tmp_path):
    (tmp_path / "file").write_bytes(begin)
    with pytest.raises(CheckpointError, match=f"file: {problem}"):
        read_export(tmp_path / "file")


def test_read_export_refuses_what_numpy_wrote_and_a_pipe(tmp_path):
    np.savez(tmp_path / "plain.npz", x=np.arange(3))
    with pytest.raises(CheckpointError, match=r"plain\.npz: has no manifest of Lockstep"):
        read_export(tmp_path / "plain.npz")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: cannot be read: pipe is no regular file"):
        read_export(tmp_path / "pipe")


def test_read_export_refuses_changed_arrays(tmp_path):
    snapshot = Snapshot({"kernel": np.ones(3, np.float32), "bias": np.zeros(2)})
    record = export_formats._encoded_manifest(loaded_of(snapshot, tmp_path), None)
    write = FORMATS["npz"].write
    for arrays, problem in (
        ({"kernel": np.full(3, 2, np.float32)}, "array 'kernel' is damaged or was changed: got float32"),
        ({"kernel": np.ones(4, np.float32)}, r"got float32 \(4,\), expected float32 \(3,\) with sha256"),
        ({"kernel": np.ones(3, np.float16)}, r"got float16 \(3,\), expected float32"),
        ({"other": np.ones(3)}, "its manifest has no array 'other'"),
    ):
        write(tmp_path / "file", dict(snapshot.arrays) | arrays, record)
        with pytest.raises(CheckpointError, match=problem):
            read_export(tmp_path / "file")
    write(tmp_path / "file", {"bias": np.zeros(2)}, record)
    with pytest.raises(CheckpointError, match="file: is not what was exported: it has no array 'kernel'"):
        read_export(tmp_path / "file")


def test_export_replaces_a_file_only_with_overwrite_and_a_directory_never(format_name, tmp_path, capsys):
    store_in(tmp_path / "runs", 7)
    target = tmp_path / "mine"
    command = ["export", tmp_path / "runs", target, "--format", format_name]
    target.write_text("precious")
    assert "mine: exists already, and nothing was written. Fix: give --overwrite" in said(capsys, *command, code=2).err
    assert target.read_text() == "precious"
    if format_name != "orbax":
        said(capsys, *command, "--overwrite")
        assert read_export(target)[0] == 7
    target.unlink()
    target.mkdir()
    printed = said(capsys, *command, "--overwrite", code=2).err
    assert "mine: exists already, and nothing was written. Fix: remove it, or choose another path" in printed
    assert list(target.iterdir()) == []


def test_export_that_fails_leaves_nothing(format_name, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    loaded = loaded_of(small(), tmp_path)
    with monkeypatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, refuse)
        with pytest.raises(CheckpointError, match=f"exported: cannot be written as {format_name}: "):
            export(loaded, tmp_path / "exported", format_name)
    assert names_in(tmp_path) == []


def test_export_takes_safetensors_from_the_ending(tmp_path, capsys, monkeypatch):
    store_in(tmp_path / "runs", 7)
    monkeypatch.setitem(export_formats.FORMATS, "safetensors", FORMATS["npz"])
    said(capsys, "export", tmp_path / "runs", tmp_path / "x.safetensors")
    monkeypatch.undo()
    assert names_in(tmp_path) == ["runs", "x.safetensors"]


@pytest.mark.parametrize("extra", ["safetensors", "orbax"])
def test_export_names_the_package_that_is_missing(extra, tmp_path, capsys, monkeypatch):
    store_in(tmp_path / "runs", 7)
    for module in ("safetensors", "safetensors.numpy", "orbax.checkpoint"):
        monkeypatch.setitem(importlib.import_module("sys").modules, module, None)
    printed = said(capsys, "export", tmp_path / "runs", tmp_path / "out", "--format", extra, code=2).err
    assert printed == (
        f"lockstep checkpoint: the format {extra} needs the package {extra}. Fix: pip install '.[{extra}]' in a checkout of Lockstep.\n"
    )
    assert names_in(tmp_path) == ["runs"]


def test_import_keeps_all_other_checkpoints(tmp_path, capsys):
    store_in(tmp_path / "runs", 7)
    said(capsys, "export", tmp_path / "runs", tmp_path / "x.npz")
    others = store_in(tmp_path / "others", 1, 2, 3, 4, keep=9)
    others.close()
    said(capsys, "import", tmp_path / "x.npz", tmp_path / "others")
    assert others.steps() == [1, 2, 3, 4, 7]
    assert_equal(others.newest(), small(7))


def test_import_replaces_a_checkpoint_only_with_overwrite(tmp_path, capsys):
    store_in(tmp_path / "runs", 7)
    said(capsys, "export", tmp_path / "runs", tmp_path / "x.npz")
    with CheckpointStore(tmp_path / "others", log=silent) as store:
        store.write(7, small(1))
    printed = said(capsys, "import", tmp_path / "x.npz", tmp_path / "others", code=2).err
    assert "others: has a checkpoint of step 7 already. Fix: give --overwrite, or choose another directory." in printed
    assert_equal(store.newest(), small(1))
    said(capsys, "import", tmp_path / "x.npz", tmp_path / "others", "--overwrite")
    assert_equal(store.newest(), small(7))
    assert len(store.paths()) == 1


def test_import_refuses_a_checkpoint_as_directory_and_a_directory_in_use(tmp_path, capsys):
    store = store_in(tmp_path / "runs", 7)
    said(capsys, "export", tmp_path / "runs", tmp_path / "x.npz")
    printed = said(capsys, "import", tmp_path / "x.npz", store.paths()[0], code=2).err
    assert f"is a checkpoint, expected the directory of all. Fix: name {tmp_path}/runs, or a new directory." in printed
    with CheckpointStore(tmp_path / "new"):
        printed = said(capsys, "import", tmp_path / "x.npz", tmp_path / "new", code=2).err
    assert "writes checkpoints there. Fix: give each job its own directory" in printed


def test_import_needs_the_signature_if_there_is_a_key(format_name, tmp_path, capsys, monkeypatch):
    store_in(tmp_path / "runs", 7)
    said(capsys, "export", tmp_path / "runs", tmp_path / "unsigned", "--format", format_name)
    (tmp_path / "key").write_text("0" * 32)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    printed = said(capsys, "import", tmp_path / "unsigned", tmp_path / "new", code=2).err
    assert (
        f"is not signed, and {KEY_FILE} is set. Fix: if you trust it, import it with {KEY_FILE} unset, and sign"
        in printed
    )
    said(capsys, "sign", tmp_path / "runs")
    said(capsys, "export", tmp_path / "runs", tmp_path / "signed", "--format", format_name)
    said(capsys, "import", tmp_path / "signed", tmp_path / "new")
    assert said(capsys, "verify", tmp_path / "new").out == "step-000000007: good, and signed with the key\n"


def train(folder, epochs):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        half = keras.layers.Dense(4, dtype=keras.DTypePolicy("bfloat16"))
        layers = [half, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse", metrics=["mae"])
    backup = lockstep.callbacks.BackupAndRestore(folder)
    history = model.fit(x, x[:, :1], batch_size=7, epochs=epochs, callbacks=[backup], verbose=0).history
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(variable.value).tobytes() for variable in variables], history


@pytest.mark.slow
def test_import_resumes_to_the_same_bits(format_name, tmp_path, capsys):
    train(tmp_path / "runs", epochs=1)
    said(capsys, "export", tmp_path / "runs", tmp_path / "exported", "--format", format_name)
    said(capsys, "import", tmp_path / "exported", tmp_path / "imported")
    original, imported = train(tmp_path / "runs", epochs=3), train(tmp_path / "imported", epochs=3)
    assert len(original[1]["loss"]) == 3
    assert imported == original
    assert original == train(tmp_path / "whole", epochs=3)
