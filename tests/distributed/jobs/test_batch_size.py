"""Workers look for a batch size together."""

import pytest

pytestmark = pytest.mark.xdist_group(__name__)


def test_workers_find_the_same_batch_and_the_one_with_least_memory_counts(job):
    chief, other = job(2).run("batch_size")
    assert chief == other
    assert chief["largest"] == [64, 16]
    assert chief["least"][0] == chief["least"][1]
    assert chief["same"]
    assert "worker 1 was called with other arguments than the chief" in chief["refused"]
    assert "[[16], 5, 63, False], the chief's [[16], 5, 64, False]" in chief["refused"]
