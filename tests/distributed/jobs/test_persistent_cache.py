"""JAX's persistent compilation cache holds the programs of all plans: a second run of the same script compiles nothing."""

import pytest

pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.nightly, pytest.mark.timeout(600)]
TRIALS = 1  # Lockstep compiles an empty program to find whether XLA knows its options, which JAX does not keep.


@pytest.mark.parametrize("workers", [1, 2])
def test_second_job_compiles_nothing_on_the_first_process(job, tmp_path, workers):
    """JAX lets only the first process write; on CPUs the others look for their programs under other keys."""
    (first, *_), (second, *_) = (
        job(workers).run("caching", cache=str(tmp_path / "cache"), shard_from=3, compiles=True) for _ in range(2)
    )
    assert first["compile_requests_use_cache"] > 50
    assert first["cache_hits"] < 0.5 * first["compile_requests_use_cache"]
    assert second["cache_hits"] >= second["compile_requests_use_cache"] - TRIALS
