"""``lockstep checkpoint show | verify``, and which checkpoint ``export`` takes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from lockstep import cli

from .cases import names_in, said, small, store_in


def test_show_is_a_table(tmp_path, capsys):
    store = store_in(tmp_path, 7, 12, 130)
    (store.paths()[2] / "manifest.json").unlink()
    lines = said(capsys, "show", tmp_path).out.splitlines()
    assert [line.split()[:6] for line in lines[:3]] == [
        ["step", "epochs", "batches", "bytes", "replicas", "versions"],
        ["7", "0", "7", "1,144", "4", "jax"],
        ["12", "1", "2", "1,144", "4", "jax"],
    ]
    assert lines[2].endswith("jax 0.10.2, keras 3.15.1")
    assert lines[3].startswith("step-000000130: ")
    assert "manifest.json: is missing" in lines[3]


def test_show_lists_arrays_where_that_is_asked_for(tmp_path, capsys):
    (path,) = store_in(tmp_path, 7).paths()
    lines = said(capsys, "show", "-v", path).out.splitlines()
    assert len(lines) == 6
    assert lines[3].startswith("    optimizer/dense/kernel/momentum: bfloat16 (3,), sha256 ")


def test_verify_reads_everything(tmp_path, capsys):
    store = store_in(tmp_path, 7, 8, 9)
    assert said(capsys, "verify", tmp_path).out == "".join(f"step-00000000{step}: good\n" for step in (7, 8, 9))
    os.truncate(store.paths()[1] / "arrays.npz", 50)
    lines = said(capsys, "verify", tmp_path, code=1).out.splitlines()
    assert lines[1:3] == [
        "step-000000008: damaged",
        f"  {tmp_path}/step-000000008/arrays.npz: is truncated: it has 50 bytes, expected 1,144. "
        "Fix: restore it from a copy, or use another checkpoint.",
    ]
    said(capsys, "verify", tmp_path / "step-000000008", code=1)
    said(capsys, "verify", tmp_path / "step-000000009")


def test_a_checkpoint_is_known_by_its_name_too(tmp_path, capsys, monkeypatch):
    first, second = store_in(tmp_path, 7, 8).paths()
    monkeypatch.chdir(first)
    assert said(capsys, "verify", ".").out == "step-000000007: good\n"
    (second / "manifest.json").unlink()
    assert said(capsys, "verify", second, code=1).out.startswith("step-000000008: damaged\n")
    assert "manifest.json: is missing" in said(capsys, "show", second).out


def test_export_writes_what_every_numpy_reads(tmp_path, capsys):
    store_in(tmp_path / "runs", 7, 8)
    target = tmp_path / "weights.npz"
    assert said(capsys, "export", tmp_path / "runs", target).out == f"{target}: 4 arrays of step 8\n"
    with np.load(target, allow_pickle=False) as found:
        assert set(found) == {*small().arrays, "lockstep.json"}
        np.testing.assert_array_equal(found["model/dense/kernel"], small(8).arrays["model/dense/kernel"], strict=True)
        momentum = np.asarray([0.5, -1.5, 8], np.float32)
        np.testing.assert_array_equal(found["optimizer/dense/kernel/momentum"], momentum, strict=True)
    assert names_in(tmp_path) == ["runs", "weights.npz"]


def test_export_takes_the_step_and_the_names_that_are_asked_for(tmp_path, capsys):
    store = store_in(tmp_path / "runs", 7, 8)
    target = tmp_path / "weights.npz"
    for step, directory in ((7, tmp_path / "runs"), (8, tmp_path / "runs"), (7, store.paths()[0])):
        said(capsys, "export", directory, target, "--step", step, "--only", "model/*", "--overwrite")
        with np.load(target, allow_pickle=False) as found:
            assert list(found) == ["model/dense/kernel"]
            np.testing.assert_array_equal(found["model/dense/kernel"], small(step).arrays["model/dense/kernel"])


DIRECTORY = "Fix: give the directory of a lockstep.callbacks.BackupAndRestore."


def test_export_takes_the_newest_good_one(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "lockstep")
    store = store_in(tmp_path / "runs", 7, 8)
    (store.paths()[1] / "arrays.npz").unlink()
    printed = said(capsys, "export", tmp_path / "runs", tmp_path / "weights.npz")
    assert printed.out.endswith("weights.npz: 4 arrays of step 7\n")
    assert [record.message.partition(": ")[0] for record in caplog.records] == ["checkpoint refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing"], f"nothing: no checkpoint found: there is no such directory. {DIRECTORY}"),
        (["verify", "."], f"no checkpoint found: the directory has none. {DIRECTORY}"),
        (["export", "nothing", "out"], f"nothing: no checkpoint found: there is no such directory. {DIRECTORY}"),
        (
            ["export", "runs", "model.weights.h5"],
            "model.weights.h5: is the name of a file of Keras, and not of npz. Fix: choose another ending; for a file of Keras, "
            "restore the checkpoint with fit and call model.save or model.save_weights.",
        ),
        (
            ["export", "runs", "out", "--step", "9"],
            "no checkpoint of step 9. Fix: choose one that 'lockstep checkpoint show' lists.",
        ),
        (
            ["export", "runs/step-000000007", "out", "--step", "9"],
            "no checkpoint of step 9. Fix: choose one that 'lockstep checkpoint show' lists.",
        ),
        (
            ["export", "runs", "out", "--only", "x*"],
            "no array name matches 'x*'. Fix: see 'lockstep checkpoint show -v'.",
        ),
        (
            ["export", "runs", "missing/out"],
            "missing/out: cannot be written as npz: No such file or directory. Fix: check the directory, its permissions and the free space.",
        ),
        (
            ["import", "missing", "new"],
            "missing: cannot be read: No such file or directory. Fix: name an export that this user may read.",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store_in(tmp_path / "runs", 7)
    printed = said(capsys, *arguments, code=2).err
    assert printed.startswith("lockstep checkpoint: ")
    assert printed.endswith(f"{message}\n")
    assert printed.count("\n") == 1
    assert names_in(tmp_path) == ["runs"]


def test_without_an_action_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["checkpoint"])
    assert "show,verify,sign,export,import" in capsys.readouterr().err


def test_the_command_needs_neither_jax_nor_keras(tmp_path):
    store_in(tmp_path, 7)
    code = f"import sys; from lockstep.cli import main; main(['checkpoint', 'verify', {str(tmp_path)!r}]); print({{'jax', 'keras'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "step-000000007: good\nset()\n", done.stderr
