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


NOT_SET = ("KERAS_BACKEND", "PJRT_NPROC")


@pytest.fixture
def doctor(python, tmp_path):
    """Run ``lockstep doctor`` in a fork, where Keras is imported."""

    def run(code, *arguments, environ=None):
        (tmp_path / "train.py").write_text(code)
        changes = dict.fromkeys(NOT_SET) | (environ or {})
        return python(
            module="lockstep.cli", arguments=["doctor", *arguments], cwd=tmp_path, environ=changes, timeout=120
        )

    return run


@pytest.mark.slow
def test_doctor_gives_code_1_for_a_finding_and_names_the_backend_itself(tmp_path):
    """In an interpreter of its own, where Keras is imported after the command has named the backend."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("WITH", PLAIN))
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_SET}
    command = [sys.executable, "-m", "lockstep.cli", "doctor", "--json", "train.py", "--", "--rate", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=inherited)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert finding["name"] == "softmax-from-logits"
    assert finding["where"] == "layer 'dense', compiled at train.py:8"
    assert report["looked_at"][0] == "no strategy: as on one device"
    assert "the script's own words ['--rate', '3']\n" in done.stderr
    assert "and those of its children\n" in done.stderr


def test_doctor_gives_code_0_for_a_clean_script_and_looks_at_a_cluster(doctor):
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    code = SCRIPT.replace("WITH", STRATEGY)
    done = doctor(code, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nno findings\nchecked:\n" in done.stdout
    done = doctor(code, "train.py", environ={"TF_CONFIG": json.dumps(cluster)})
    assert done.returncode == 1, done.stderr
    assert "worker-not-reached: worker 0 at 127.0.0.1:1 refused: nothing listens there yet" in done.stdout


def test_doctor_gives_code_2_for_a_script_that_fails_before_its_fit(doctor):
    done = doctor("import lockstep\n1 / 0", "train.py")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "train.py failed before or in its first fit" in done.stderr


SUBCLASS = """
import keras, lockstep, numpy as np
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
    def call(self, x):
        return self.dense(x) BELOW
with SCOPE:
    model = Net()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.ones((64, 2)), np.zeros(64, int), batch_size=16)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["lockstep.MirroredStrategy(['cpu:0'], replicas=2).scope()", "keras.name_scope('x')"])
def test_doctor_builds_a_subclassed_model_and_runs_its_steps(doctor, scope):
    code = SUBCLASS.replace("SCOPE", scope)
    done = doctor(code.replace("BELOW", ""), "train.py")
    assert done.returncode == 0, done.stderr
    assert "training steps on a copy of the state" in done.stdout
    done = doctor(code.replace("BELOW", "+ self.missing"), "train.py")
    assert done.returncode == 2, done.stdout
    assert "has no attribute 'missing'" in done.stderr


RETRY = """
import itertools, os, keras, lockstep, numpy as np
os.environ.update({environ!r})
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
for attempt in itertools.count():  # As on machines that may be taken away.
    try:
        print("attempt", attempt)
        model.fit(np.ones((64, 2)), np.zeros(64, int), batch_size=16)
        break
    except BaseException:
        pass
"""


@pytest.mark.slow
def test_doctor_ends_a_script_that_catches_everything_and_calls_fit_again(doctor):
    done = doctor(RETRY.format(environ={}), "--json", "train.py")
    assert done.returncode == 1, done.stderr
    assert [finding["name"] for finding in json.loads(done.stdout)["findings"]] == ["softmax-from-logits"]
    assert "attempt 1\n" in done.stderr
    assert "attempt 2\n" not in done.stderr
    done = doctor(RETRY.format(environ={"JAX_ENABLE_X64": "1"}), "train.py")
    assert done.returncode == 2
    assert "Fix: export JAX_ENABLE_X64=1 before the command" in done.stderr


SAVING = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.save("begun.keras")
try:
    model.fit(np.ones((64, 2)), np.zeros((64, 1)), batch_size=16)
finally:
    try:
        model.save_weights("model.weights.h5")
    finally:
        try:
            model.export("exported")
        finally:
            try:
                keras.saving.save_model(model, "copy.keras")
            finally:
                model.save("model.keras")
"""


@pytest.mark.slow
def test_doctor_saves_no_untrained_model(doctor, tmp_path):
    (tmp_path / "model.keras").write_text("trained")
    done = doctor(SAVING, "train.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.keras").read_text() == "trained"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun.keras", "model.keras", "train.py"]


def test_a_script_without_fit_and_a_missing_one_give_code_2(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    for name, told in (
        ("train.py", "the script ended without a call of fit"),
        ("none.py", "no such file"),
    ):
        assert main(["doctor", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.usefixtures("data_folder")
@pytest.mark.parametrize("script", ["guide/single.py", "mnist_table/mirrored.py", "reuters/single.py"])
def test_doctor_finds_nothing_in_the_examples(doctor, script):
    done = doctor("", "--json", f"{ROOT}/examples/{script}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
