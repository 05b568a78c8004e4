"""Law 3 for the store: killed anywhere, the newest checkpoint is complete, and no older one is lost before its time."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.checkpoint.store import CheckpointStore

from .cases import is_filled, silent

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("step", "keep"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((3, 2), (2, 1)))],
)
def test_killed_before_any_line_of_its_code_a_writer_leaves_the_old_or_the_new_one(step, keep, tmp_path):
    command = [sys.executable, str(HERE / "killed_at_each_line.py"), str(tmp_path), str(step), str(keep)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines, new = map(int, done.stdout.split())
    assert lines > 200
    assert 10 < new < lines - 100


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kills", "keep"), [(10, 1), (10, 3), pytest.param(60, 2, marks=pytest.mark.nightly)])
def test_killed_at_any_time_a_writer_leaves_complete_ones_only(kills, keep, tmp_path):
    rng = random.Random(keep)
    newest = 0
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.checkpoint.writes_for_ever", str(tmp_path), str(keep)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]) as process:
            try:
                assert int(process.stdout.readline()) == newest
                said = [newest, *(int(process.stdout.readline()) for _ in range(rng.randrange(3)))]
                killer = threading.Timer(rng.uniform(0, 0.1), process.kill)
                killer.start()
                said += map(int, process.stdout.read().split())
                killer.join()
            finally:
                process.kill()
            assert process.wait(60) == -9
        store = CheckpointStore(tmp_path, keep, log=silent)
        loaded = store.newest()
        newest = 0 if loaded is None else loaded.step
        assert newest in (said[-1], said[-1] + 1)
        assert loaded is None or is_filled(loaded)
        assert [problem for path in store.paths() for problem in store.verify(path)] == []
        assert store.steps()[-keep:] == list(range(max(1, newest - keep + 1), newest + 1))
    assert newest > 3
