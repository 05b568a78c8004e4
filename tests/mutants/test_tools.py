"""Selection and order of the tests of a mutant, and its line in the report."""

import json

import pytest

from tests.mutants import reach, report, run
from tests.mutants.mutant import Mutant
from tests.mutants.recording import name_of

FILE = "devices/batch_layout.py"
TESTS = [
    ["a.py::slow", 9.0, "passed"],
    ["a.py::quick", 1.0, "passed"],
    ["b.py::one", 2.0, "passed"],
    ["c.py::red", 1.0, "failed"],
]


def mutant(old, file=FILE):
    return Mutant("one", file, old, "pass", "")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keeps which of ``TESTS`` reach the line of which text of ``FILE``."""

    def keep(**reached):
        numbers = {mutant(text).place()[1]: own for text, own in reached.items()}
        monkeypatch.setattr(reach, "KEPT", tmp_path / "reach.json")
        reach.KEPT.write_text(json.dumps({"suite": "", "tests": TESTS, "lines": {FILE: numbers}}))
        return reach.Reach()

    return keep


CHUNK = "chunk = -(-rows // replicas)"
CAPACITY = "return max(self.device_rows)"


def test_those_that_reach_the_line_and_passed_are_taken(kept):
    found = kept(**{CHUNK: [0, 2, 3], CAPACITY: [1]})
    assert found.tests_of(mutant(CHUNK)) == ["a.py::slow", "b.py::one"]
    assert found.tests_of(mutant(CHUNK), wide=True) == ["a.py::slow", "a.py::quick", "b.py::one"]


def test_a_line_that_goes_on_belongs_to_its_statement(kept):
    text = "return tuple(rows for device in self.per_device for rows in device if rows)"
    assert kept(**{text: [0]}).tests_of(mutant(text)) == ["a.py::slow"]


def test_of_a_signature_whoever_runs_the_function_is_concerned(kept):
    header = "def rows_of_replicas(rows: int, replicas: int) -> tuple[int, ...]:"
    assert kept(**{CHUNK: [2]}).tests_of(mutant(header)) == ["b.py::one"]


def test_of_what_a_module_sets_at_its_import_all_that_run_its_functions_are_concerned(kept):
    assert kept(**{CHUNK: [2]}).tests_of(mutant("import numpy as np")) == ["b.py::one"]


def test_small_files_come_first_and_in_them_the_cheapest_tests(kept):
    found = kept(**{CHUNK: [0, 1, 2]})
    assert list(run._limits(found.tests_of(mutant(CHUNK)), found)) == ["b.py::one", "a.py::quick", "a.py::slow"]


def test_the_page_shows_survivors_with_their_reasons(tmp_path, monkeypatch, capsys):
    found = [Mutant(f"m{n}", FILE, f"a = {n}", "a = 9", "a fault") for n in range(3)]
    outcomes = {"m0": "caught", "m1": "survived", "m2": "survived"}
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    run.RESULTS.write_text(json.dumps({name: {"outcome": outcome} for name, outcome in outcomes.items()}))
    for name in ("PAGE", "REASONS"):
        monkeypatch.setattr(report, name, tmp_path / name)
    report.REASONS.write_text(json.dumps({"m1": "Nobody sees it."}))
    monkeypatch.setattr(report, "every", lambda: found)
    monkeypatch.setattr(report, "drawn", lambda: found[1:])
    assert report.write() == 1
    assert capsys.readouterr().out == "1 of 3 are caught; not explained: m2\n"
    page = report.PAGE.read_text()
    assert "| all | 3 | 1 (33 %) | 1 | 1 (100 %) |" in page
    assert (
        "### m1: survived\n\n`devices/batch_layout.py`, a fault\n\n```diff\n- a = 1\n+ a = 9\n```\n\nNobody sees it.\n"
        in page
    )


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("a.py::test_b@group", "a.py::test_b"),
        ("a.py::test_b[c@d]", "a.py::test_b[c@d]"),
        ("a.py::b[c]@d e", "a.py::b[c]"),
    ],
)
def test_recording_leaves_out_the_group_of_a_test(nodeid, name):
    assert name_of(nodeid) == name
