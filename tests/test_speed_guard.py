"""The guard of speed can fail, takes a bad time again, and says what it saw; ``scripts/guard`` runs the real one."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def guard():
    sys.path.insert(0, str(FOLDER))
    try:
        import guard
    finally:
        sys.path.remove(str(FOLDER))
    return guard


def check(guard, *found, limit=1.5, attempts=3):
    measured = iter(found)
    return guard.Check("a step", limit, lambda: next(measured), attempts)


def test_what_is_above_its_limit_each_time_is_exceeded(guard):
    lines = []
    assert guard.judge([check(guard, 1.9, 1.8, 1.6), check(guard, 1.4)], lines.append) == 1
    assert lines[1:] == ["| a step | 1.6 | 1.5 | EXCEEDED |", "| a step | 1.4 | 1.5 |  |"]


def test_a_bad_time_is_taken_again_and_the_best_counts(guard):
    assert guard.judge([check(guard, 1.9, 1.5)], lambda line: None) == 0


def test_a_count_is_taken_once(guard):
    assert guard.judge([check(guard, 3, limit=2, attempts=1)], lambda line: None) == 1


def test_a_measurement_that_is_no_number_does_not_pass(guard):
    assert guard.judge([check(guard, *[float("nan")] * 3)], lambda line: None) == 1


def test_an_exceeded_limit_is_the_exit_code(guard, monkeypatch):
    for found, code in ((2.0, 1), (1.0, 0)):
        monkeypatch.setattr(guard, "checks", lambda found=found: [check(guard, *[found] * 3)])
        monkeypatch.setattr(guard.lockstep.config, "set_logical_cpu_devices", lambda count: None)
        with pytest.raises(SystemExit) as ended:
            guard.main()
        assert ended.value.code == code


def test_collectives_are_counted_in_the_text_of_a_program(guard):
    text = "%a = f32[2] all-reduce(%x), to_apply=%add\n%b = f32[4] all-gather-start(%a)\n%c = f32[2] add(%all-reduce.1, %a)"
    assert guard.COLLECTIVE.findall(text) == ["all-reduce", "all-gather"]
