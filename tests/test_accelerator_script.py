"""``scripts/accelerator`` on CPU devices, at small sizes: its parts run, and their findings are recorded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import PYTHON_PATH

ROOT = Path(__file__).parents[1]


def run(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "accelerator", "--small", "--results", str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": f"{PYTHON_PATH}{os.pathsep}{ROOT / 'benchmarks'}", **environment},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.slow
def test_findings_of_a_part_are_recorded_for_the_kind_of_device(tmp_path):
    done = run(tmp_path, "uneven")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "accelerator.json").read_text())["cpu x 1"]["uneven"]
    assert len(record["findings"]) == 6
    assert not record["error"]
    assert "| 3 rows: weights |" in (tmp_path / "accelerator.md").read_text()


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_with_its_error(tmp_path):
    done = run(tmp_path, "devices", JAX_NUM_CPU_DEVICES="2", PJRT_NPROC="2")  # too few threads for two devices
    assert done.returncode == 1
    record = json.loads((tmp_path / "accelerator.json").read_text())["cpu x 2"]["devices"]
    assert "2 CPU devices need a pool" in record["error"]
    assert not record["findings"]


def test_every_part_runs_by_default_and_is_documented():
    named = re.findall(
        r'^    "(\w+)",$', (ROOT / "benchmarks" / "accelerator" / "__main__.py").read_text(), re.MULTILINE
    )
    source = (ROOT / "benchmarks" / "accelerator" / "parts.py").read_text()
    (made,) = re.findall(r"for part in \(([\w.,\s]+)\)", source)
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "docs" / "accelerators.md").read_text(), re.MULTILINE)
    documented = [part for row in rows for part in re.findall(r"`(\w+)`", row.partition("|")[0])]
    assert sorted(named) == sorted(re.findall(r"\.(\w+)", made)) == sorted(documented)


def test_a_part_that_does_not_exist_is_refused(tmp_path):
    done = run(tmp_path, "speed")
    assert done.returncode == 2
    assert "there is no part speed; parts: numbers" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_all_parts_run_on_two_devices(tmp_path):
    done = run(tmp_path, JAX_NUM_CPU_DEVICES="2", PJRT_NPROC="8")
    assert done.returncode == 0, done.stdout + done.stderr
