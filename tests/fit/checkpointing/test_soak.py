"""Twenty kills at random; ``benchmarks/soak.py`` makes hundreds of them with the same code."""

import random

import pytest

from tests.fit.checkpointing.soaking import Soak

pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.nightly, pytest.mark.timeout(900)]


SHARDED = {"shard": "variables", "recompute": "blocks"}


@pytest.mark.parametrize(("workers", "kills", "strategy"), [(1, 12, None), (2, 8, None), (2, 6, SHARDED)])
def test_killed_at_random_nothing_is_lost_and_nothing_is_trained_twice(workers, kills, strategy, forks, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # Is shown where the test fails.
    found = Soak(forks, tmp_path, workers, save_freq=1, seed=seed, strategy=strategy).run(kills)
    assert found.kills == kills
    assert (found.differ, found.steps_in_weights, found.rows, found.other_codes) == (0, 0, 0, 0)
