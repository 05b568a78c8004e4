"""The command runs a script up to its first fit; its exit code and its JSON say what was found."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.cli import main

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
SCRIPT = """
import os, sys
import keras, lockstep, numpy as np
print("the script's own words", sys.argv[1:])
os.system("echo and those of its children")
def build(activation):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
WITH
model.fit(np.ones((64, 2)), np.zeros(64, int), batch_size=16)
raise RuntimeError("too far")
"""
PLAIN = "model = build('softmax')"
STRATEGY = "with lockstep.MirroredStrategy(['cpu:0'], replicas=2).scope():\n    model = build(None)"


def doctor(folder, code, *arguments, environ=None):
    (folder / "train.py").write_text(code)
    inherited = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "PJRT_NPROC")}
    command = [sys.executable, "-m", "lockstep.cli", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=inherited | (environ or {})
    )


def test_a_finding_gives_code_1_and_json_is_not_spoilt(tmp_path):
    done = doctor(tmp_path, SCRIPT.replace("WITH", PLAIN), "--json", "train.py", "--rate", "3")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert finding["name"] == "softmax-from-logits"
    assert finding["where"] == "layer 'dense', compiled at train.py:8"
    assert report["looked_at"][0] == "no strategy: as on one device"
    assert "the script's own words ['--rate', '3']\n" in done.stderr
    assert "and those of its children\n" in done.stderr


def test_a_clean_script_gives_code_0_and_a_cluster_is_looked_at(tmp_path):
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    code = SCRIPT.replace("WITH", STRATEGY)
    done = doctor(tmp_path, code, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nno findings\nlooked at:\n" in done.stdout
    done = doctor(tmp_path, code, "train.py", environ={"TF_CONFIG": json.dumps(cluster)})
    assert done.returncode == 1, done.stderr
    assert "worker-not-reached: worker 0 at 127.0.0.1:1 refused: nothing listens there yet" in done.stdout


def test_a_script_that_fails_before_its_fit_gives_code_2(tmp_path):
    done = doctor(tmp_path, "import lockstep\n1 / 0", "train.py")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "train.py failed before or in its first fit" in done.stderr


def test_a_script_without_fit_and_a_missing_one_give_code_2(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    for name, told in (
        ("train.py", "it ended before any model was trained by fit"),
        ("none.py", "there is no such file"),
    ):
        assert main(["doctor", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.full
@pytest.mark.usefixtures("data_folder")
@pytest.mark.parametrize("script", ["guide/single.py", "mnist_table/mirrored.py", "reuters/single.py"])
def test_the_examples_have_no_finding(tmp_path, script):
    done = doctor(tmp_path, "", "--json", f"{ROOT}/examples/{script}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
