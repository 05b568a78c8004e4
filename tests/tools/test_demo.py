"""The demo trains, checks and draws; its command line says what is wrong."""

import subprocess
import sys

import numpy as np
import pytest

from lockstep import cli
from lockstep.tools import demo


@pytest.mark.slow
def test_the_demo_agrees_with_one_device_and_draws_curves(tmp_path, capsys):
    assert cli.main(["demo", "--epochs", "1", "--devices", "cpu:0", "cpu:1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1,347 images, 22 steps of 64, on 2 replicas" in printed
    assert "The numbers agree." in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo_would_notice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_largest_difference", lambda ours, theirs: 1e-2)
    train, test = demo._digits()
    few = tuple(array[:64] for array in train), tuple(array[:64] for array in test)
    monkeypatch.setattr(demo, "_digits", lambda: few)
    assert cli.main(["demo", "--epochs", "1", "--devices", "cpu:0", "--output", str(tmp_path)]) == 1
    assert "THE NUMBERS DO NOT AGREE" in capsys.readouterr().out


def test_the_difference_is_that_of_the_weights():
    ours, theirs = [np.array([1.0, 2.0]), np.array([4.0])], [np.array([1.0, 2.0]), np.array([5.0])]
    assert demo._largest_difference(ours, theirs) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--epochs", "0"], "--epochs: expected a whole number of at least 1"), (["--devices", "gpu:0"], "no device")],
)
def test_wrong_options_end_with_one_line(option, message, capsys):
    assert cli.main(["demo", *option]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert "\n" not in printed


def test_a_folder_without_the_data_ends_with_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path))
    assert cli.main(["demo", "--data", "mnist", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"lockstep demo: LOCKSTEP_DATA={tmp_path} has no folder 'mnist'. Fix: put the files there, or unset LOCKSTEP_DATA to have "
        "Keras fetch them.\n"
    )


@pytest.mark.slow
def test_the_command_needs_no_environment():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; os.environ.pop('KERAS_BACKEND', None); from lockstep.cli import main; main(['demo', '--epochs', '0'])",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "--epochs: expected a whole number of at least 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_demo_names_a_missing_extra(package, python, tmp_path):
    block = f"import sys; sys.modules[{package!r}] = None; sys.modules[{package!r} + '.datasets'] = None; "
    block += f"from lockstep.cli import main; sys.exit(main(['demo', '--epochs', '1', '--output', {str(tmp_path)!r}]))"
    done = python(code=block, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "pip install '.[demo]'" in done.stderr
