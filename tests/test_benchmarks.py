"""Benchmarks start without ``KERAS_BACKEND``, keep what they have recorded, and fail if what they claim is not so."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import faults, fuzz
from benchmarks.accelerator import __main__ as accelerator
from tests.faults.matrix import cells

FOLDER = Path(__file__).parents[1] / "benchmarks"


USES_KERAS = re.compile(
    r"^(?:import (?:keras|lockstep)\b|from (?:keras|lockstep\.(?!tools\b|checkpoint\b|launch\b))\b)", re.MULTILINE
)


def chooses_backend(path):
    """Whether a file of benchmarks sets the backend before it imports Keras, or imports one before that does."""
    before = USES_KERAS.split(path.read_text())[0]
    neighbours = re.findall(r"^(?:import|from) (\w+)", before, re.MULTILINE)
    return '"KERAS_BACKEND"' in before or any(
        chooses_backend(FOLDER / f"{name}.py") for name in neighbours if (FOLDER / f"{name}.py").exists()
    )


def test_benchmarks_that_use_keras_choose_its_backend():
    scripts = [path for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    users = [path for path in scripts if USES_KERAS.search(path.read_text())]
    assert len(users) >= 15
    assert not [path.name for path in users if not chooses_backend(path)]


ROW = ("workers", 1, 3344, 0, 0, 0, 0, 2.2)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("digests that differ", 1),
        ("exit code", -9),
        ("processes left", 1),
        ("descriptors more", 1),
        ("MiB more", 500.0),
    ],
)
def test_fuzz_fails_if_strangers_leave_something_behind(column, value):
    assert not fuzz.is_wrong(ROW)
    assert fuzz.is_wrong([value if name == column else given for name, given in zip(fuzz.COLUMNS, ROW, strict=True)])


RIGHT, WRONG = {"right": True}, {"right": False}


@pytest.mark.parametrize(
    ("recorded", "small", "expected"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"small": True}, True, True),
        ({"small": True}, False, False),
        ({"commit": "another"}, False, False),
        ({"error": "not done after 540 s"}, False, False),
        ({"findings": [RIGHT, WRONG]}, False, False),
    ],
)
def test_accelerator_runs_a_part_again_if_its_record_does_not_stand_for_it(monkeypatch, recorded, small, expected):
    monkeypatch.setenv("LOCKSTEP_COMMIT", "0123456789abcdef")
    record = {"commit": "0123456789ab", "small": False, "error": "", "findings": [RIGHT]} | recorded
    assert accelerator.is_done(record, small) == expected


def test_accelerator_runs_a_part_without_a_record():
    assert not accelerator.is_done(None, small=True)


def test_faults_of_one_kind_of_job_keep_the_recorded_cells_of_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "RESULTS", tmp_path / "faults.json")
    worker, server = cells("workers")[0], cells("servers")[0]
    before = {"wrong": [], "codes": {}, "commit": "0" * 40}
    faults.RESULTS.write_text(json.dumps({"cells": {worker.key: before, server.key: before, "no such cell": before}}))
    results, current = faults.known()
    assert results == {worker.key: before, server.key: before}
    assert not current
