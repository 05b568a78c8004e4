"""Inputs that are left in the middle or read again: nobody waits for a batch that nobody takes, and nothing of what was read is lost."""

import pytest

pytestmark = pytest.mark.xdist_group(__name__)


def test_an_input_that_is_left_in_the_middle_continues_where_it_was(job):
    for told in job(2).run("stops", timeout=20):
        for kind in ("fit", "loop", "own"):
            assert told[kind] == [0, 1, 2, 3]
            assert told[f"{kind} goes on"] == [4, 5, 6]
        assert told["seconds"] < 20


def test_caches_are_of_each_worker(job, tmp_path):
    folder = tmp_path / "cached"
    folder.mkdir()
    for told in job(2).run("cached", cache=str(folder / "cache")):
        assert told == {"on_devices": True, "files": ["cache.0", "cache.1"], "asked": 4, "steps": 8}
    assert not list(folder.iterdir())
