"""``lockstep env``: its content, no secrets, and a time limit."""

import os

import keras
import pytest

import lockstep
from lockstep import cli
from lockstep.tools.env import describe_environment

SECRETS = {"LOCKSTEP_SECRET": "hunter1", "HTTPS_PROXY": "http://me:hunter2@proxy", "JAX_TOKEN": "hunter3"}


def without_devices(folder, **variables):
    """An environment where JAX is quick, as it is not there."""
    (folder / "jax.py").write_text("raise ImportError('broken on purpose')\n")
    return {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], **variables}


@pytest.mark.slow
def test_the_report_names_what_matters(capsys):
    assert cli.main(["env"]) == 0
    report = capsys.readouterr().out
    for text in (f"keras {keras.__version__}, ", f"keras-lockstep {lockstep.__version__}", "GiB", "KERAS_BACKEND=jax"):
        assert text in report
    assert "devices:   " in report
    assert "(cpu)" in report


def test_secrets_are_not_shown(tmp_path):
    report = describe_environment(without_devices(tmp_path, **SECRETS, XLA_FLAGS="--a", UNRELATED="x"))
    assert "hunter" not in report
    assert "  LOCKSTEP_SECRET=(set, not shown)\n" in report
    assert "  XLA_FLAGS=--a" in report
    assert "UNRELATED" not in report


@pytest.mark.slow
def test_a_driver_that_hangs_does_not_hang_the_report(tmp_path):
    environment = without_devices(tmp_path)
    (tmp_path / "jax.py").write_text("import time; time.sleep(100)\n")
    assert "JAX listed no devices within 1 s: a driver hangs" in describe_environment(environment, limit=1)


def test_a_broken_jax_is_part_of_the_report(tmp_path):
    report = describe_environment(without_devices(tmp_path))
    assert "JAX does not start: ImportError: broken on purpose" in report


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "none: a program started here trains as a single process"),
        ({"TPU_WORKER_ID": "0"}, "variables of jobs of several processes are set: TPU_WORKER_ID of the TPU pod"),
        ({"TF_CONFIG": "not JSON"}, "TF_CONFIG"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            "<TorchrunClusterResolver: worker 1 of 2",
        ),
    ],
)
def test_the_cluster_is_named(tmp_path, variables, text):
    report = describe_environment(without_devices(tmp_path, **variables))
    (line,) = [line for line in report.splitlines() if line.startswith("cluster: ")]
    assert text in line
