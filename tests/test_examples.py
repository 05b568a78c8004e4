"""The examples run as a user runs them, and each pair differs by the few lines that are the lesson."""

import difflib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import STARTUP
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAIRS = sorted(path.parent.name for path in EXAMPLES.glob("*/mirrored.py"))
TWINS = sorted(
    path.relative_to(EXAMPLES) for kind in ("mirrored", "asynchronous") for path in EXAMPLES.glob(f"*/{kind}.py")
)


@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_the_twins_differ_by_less_than_ten_lines(twin):
    texts = [(EXAMPLES / path).read_text() for path in (twin.with_name("single.py"), twin)]
    single, mirrored = ([line for line in re.sub(r'^"""[\s\S]*?"""', "", text).splitlines() if line] for text in texts)
    changed = [line for line in difflib.ndiff(single, mirrored) if line.startswith(("+ ", "- "))]
    added = [line for line in changed if line.startswith("+ ")]
    assert 1 <= len(added) < 10, "\n".join(changed)


def limits(steps):
    return {"KERAS_MAX_EPOCHS": "1", "KERAS_MAX_STEPS_PER_EPOCH": str(steps)}


def run_cold(script, *arguments, steps, timeout, launcher=()):
    """Run an example of several processes in an interpreter of its own; gives what it has printed."""
    command = [sys.executable, *launcher, str(EXAMPLES / script), *arguments]
    path = os.environ.get("PYTHONPATH", "").replace(STARTUP, "")  # An example may need what is blocked there.
    environ = os.environ | limits(steps) | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def run(python):
    """Run an example for so many steps in a fork; gives what it has printed."""

    def run(script, *arguments, steps=12, timeout=280):
        done = python(script=EXAMPLES / script, arguments=arguments, environ=limits(steps), timeout=timeout)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def logs(printed):
    return {name: float(value) for name, value in re.findall(r"(\w+): (\d+\.\d+)", printed.splitlines()[-1])}


@pytest.fixture(scope="module")
def reuters_on_plain_keras(run):
    """What ``reuters/single.py`` prints."""
    return run("reuters/single.py")


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.usefixtures("data_folder")
@pytest.mark.xdist_group("reuters")
@pytest.mark.parametrize("devices", [(), ("cpu:0", "cpu:1")])
def test_reuters_begins_as_plain_keras_does(devices, run, request):
    plain = request.getfixturevalue("reuters_on_plain_keras")  # after data_folder, which may skip
    printed = run("reuters/mirrored.py", *devices)
    assert "332,856" in plain
    assert "332,856" in printed
    found, expected = logs(printed), logs(plain)
    assert found.keys() == expected.keys() >= {"loss", "val_loss"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-4), name


@pytest.mark.data
@pytest.mark.nightly
@pytest.mark.usefixtures("data_folder")
def test_reuters_trains_on_workers_that_do_not_wait():
    limit = 250
    launcher = ("-m", "lockstep.cli", "run", "--workers", "2", "--servers", "1", "--timeout", str(limit))
    printed = run_cold("reuters/asynchronous.py", steps=40, timeout=limit + 30, launcher=launcher)
    assert {*re.findall(r"^\[(.*?)\]", printed, flags=re.MULTILINE)} == {"chief"}  # It prints alone.
    assert "332,856" in printed
    found = logs(printed)
    assert found.keys() >= {"loss", "val_loss", "updates_per_sec", "staleness"}
    assert 0 < found["loss"] < 3.828  # The logarithm of 46 classes: it has learned.


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.usefixtures("data_folder")
@pytest.mark.parametrize(
    "name", sorted(set(PAIRS) - {"reuters", "cifar10_towers", "cats_vs_dogs"})
)  # those have their own
def test_an_example_runs(name, run):
    printed = run(f"{name}/mirrored.py", steps=6)
    assert re.search(r"accuracy", printed)


@pytest.mark.data
@pytest.mark.nightly
@pytest.mark.usefixtures("cats_vs_dogs")
@pytest.mark.timeout(600)
def test_cats_and_dogs_begin_on_one_replica_as_plain_keras_does(run):
    single, mirrored = (
        logs(run(f"cats_vs_dogs/{twin}.py", "--rows", "8", "--size", "32", steps=2)) for twin in ("single", "mirrored")
    )
    assert single.keys() == mirrored.keys() >= {"loss", "val_loss", "sparse_categorical_accuracy"}
    for name, value in single.items():
        assert mirrored[name] == pytest.approx(value, abs=1.1e-4), name  # They are printed with four digits.


@pytest.mark.data
@pytest.mark.nightly
@pytest.mark.usefixtures("cats_vs_dogs")
@pytest.mark.timeout(600)
def test_cats_and_dogs_run_on_two_devices(run):
    printed = run("cats_vs_dogs/mirrored.py", "cpu:0", "cpu:1", "--rows", "5", "--size", "32", steps=2)
    assert printed.startswith("2/2 - ")
    assert 0 < logs(printed)["loss"] < 5


@pytest.mark.data
@pytest.mark.nightly
@pytest.mark.usefixtures("cats_vs_dogs")
@pytest.mark.timeout(900)
def test_cats_and_dogs_on_two_workers_print_the_digits_of_one_process():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--rows", "4", "--size", "32", "--deterministic")
    script = partial(run_cold, "cats_vs_dogs/two_workers.py", *flags, steps=1, timeout=400)
    with ThreadPoolExecutor(2) as pool:
        chief, other = pool.map(lambda index: script("--index", index, "--port", str(port)), "01")
    assert "loss" not in other  # The chief prints.
    assert logs(chief) == logs(script("cpu:0", "cpu:1"))


@pytest.mark.data
@pytest.mark.nightly
@pytest.mark.usefixtures("data_folder")
@pytest.mark.timeout(3000)
def test_a_model_larger_than_the_memory_of_a_process_trains_on_four_and_resumes_on_three(tmp_path, request):
    ours = ("XLA_FLAGS", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")  # of a test process, which has eight devices
    environ = {name: value for name, value in os.environ.items() if name not in ours} | {"LOCKSTEP_KEEP_MEMORY": "0"}
    lockstep = [sys.executable, "-m", "lockstep.cli"]

    def start(workers, folder):
        command = [*lockstep, "run", "-n", str(workers), str(EXAMPLES / "larger_than_memory.py")]
        command += ["--directory", str(tmp_path / folder)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=environ, **output)
        request.addfinalizer(process.kill)
        return process

    def finish(process):
        printed = process.communicate(timeout=900)[0]
        return process.returncode, printed, [float(loss) for loss in re.findall(r"- loss: (\S+)", printed)]

    code, printed, _ = finish(start(1, "one"))
    assert code != 0
    assert "RESOURCE_EXHAUSTED" in printed
    code, printed, expected = finish(start(4, "undisturbed"))
    assert code == 0, printed
    killed, checkpoints = start(4, "run"), tmp_path / "run"
    wait_until(lambda: list(checkpoints.glob("step-*")), "the checkpoint of the first epoch", 900)
    os.kill(json.loads((checkpoints / ".lock").read_text())["pid"], signal.SIGKILL)
    assert finish(killed)[0] != 0
    code, printed, losses = finish(start(3, "run"))
    assert code == 0, printed
    assert "resumes from" in printed
    assert losses == pytest.approx(expected[-1:], rel=1e-3)
    weights = tmp_path / "weights.npz"
    export = [*lockstep, "checkpoint", "export", str(checkpoints), str(weights), "--only", "*trainable/*"]
    assert subprocess.run(export, capture_output=True, timeout=300, check=True).returncode == 0
    with np.load(weights) as arrays:
        assert sum(arrays[name].size for name in arrays.files) > 160e6
