"""``fit`` with variables on servers, by real processes: laws 1, 2 and 4, and all processes come out of it alike."""

import functools

import numpy as np
import pytest

from tests.parameter_server.jobs.outcomes import arrays, assert_close, bits, server_job, train

pytestmark = pytest.mark.xdist_group(__name__)

ORDINARY = ["mixed", "plain", "shuffled", "embedded", "momentum"]
PLAIN = [*ORDINARY, "own step", "observed", "paired"]
DIVIDED = [*ORDINARY, "function"]


@pytest.fixture(scope="module")
def without_staleness(forks, tmp_path_factory):
    """What the chief leaves of all cases, made once for each number of workers."""

    @functools.cache
    def found(workers):
        made = server_job(forks, tmp_path_factory.mktemp("without_staleness"), workers)
        try:
            return train(made, cases=DIVIDED, strategy={"max_staleness": 0})
        finally:
            made.clean()

    return found


def test_one_worker_gives_the_numbers_of_one_device(job, alone):
    expected = alone(PLAIN, evaluates=True)
    made = job(workers=1, servers=2)
    found = train(made, cases=PLAIN, strategy={"shards": 2}, evaluates=True)
    assert_close(found, expected)
    for task, index in (("worker", 0), ("ps", 0), ("ps", 1)):
        assert bits(arrays(made, task, index)) == bits(found)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_fit_without_staleness_has_numbers_of_as_many_replicas(alone, workers, without_staleness):
    assert_close(without_staleness(workers), alone(DIVIDED, replicas=workers))


def test_fit_without_staleness_has_same_bits_if_a_worker_dies(job, without_staleness):
    assert DIVIDED[:2] == ["mixed", "plain"]  # So that both runs have trained the same before.
    options = {"cases": DIVIDED[:2], "strategy": {"max_staleness": 0}}
    expected = {name: value for name, value in bits(without_staleness(2)).items() if name.split("/")[0] in DIVIDED[:2]}
    dying = job(workers=2, servers=1)
    dying.start_all(each=lambda task, index: {"stop": [5, 9]} if (task, index) == ("worker", 1) else {}, **options)
    dying.end(but=["worker1"])
    assert dying.processes["worker1"].end() == -9
    assert "will be reassigned to other workers" in dying.processes["chief0"].said
    assert bits(arrays(dying, "chief", 0)) == expected


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_each_row_counts_once_an_epoch_whatever_workers_do(job, max_staleness):
    from tests.parameter_server.jobs.programs.train import Y

    made = job(workers=3, servers=2)
    options = {"cases": ["counted", "mixed"], "strategy": {"max_staleness": max_staleness}}
    made.start_all(each=lambda task, index: {"stop": [4, 9]} if (task, index) == ("worker", 2) else {}, **options)
    made.end(but=["worker2"])
    found = arrays(made, "chief", 0)
    np.testing.assert_allclose(found["counted/history/row_sum"], 3 * [Y.sum()], rtol=1e-5)
    assert int(found["counted/optimizer/0"]) == 3 * 6
    assert bits(arrays(made, "worker", 0)) == bits(arrays(made, "ps", 1)) == bits(found)
    assert np.isfinite(found["mixed/history/val_loss"]).all()
