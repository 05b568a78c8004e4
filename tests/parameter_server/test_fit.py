"""``fit`` with variables on servers, by real processes: laws 1, 2 and 4, and all processes come out of it alike."""

import numpy as np
import pytest

from tests.parameter_server.outcomes import arrays, assert_close, bits, train

ORDINARY = ["mixed", "plain", "shuffled", "embedded", "momentum"]
PLAIN = [*ORDINARY, "own step"]
DIVIDED = [*ORDINARY, "function"]


def test_one_worker_gives_the_numbers_of_one_device(job, alone):
    expected = alone(PLAIN, evaluates=True)
    made = job(workers=1, servers=2)
    found = train(made, cases=PLAIN, strategy={"shards": 2}, evaluates=True)
    assert_close(found, expected)
    for task, index in (("worker", 0), ("ps", 0), ("ps", 1)):
        assert bits(arrays(made, task, index)) == bits(found)


@pytest.mark.parametrize("workers", [2, 3])
def test_without_staleness_workers_give_the_numbers_of_as_many_replicas(job, alone, workers):
    expected = alone(DIVIDED, replicas=workers)
    found = train(job(workers=workers, servers=1), cases=DIVIDED, strategy={"max_staleness": 0})
    assert_close(found, expected)


def test_without_staleness_neither_shards_nor_a_death_decide_a_bit(job):
    options = {"cases": ["mixed", "plain"], "strategy": {"max_staleness": 0}}
    expected = bits(train(job(workers=2, servers=1), **options))
    dying = job(workers=2, servers=1)
    dying.start_all(each=lambda task, index: {"stop": [5, 9]} if (task, index) == ("worker", 1) else {}, **options)
    dying.end(but=["worker1"])
    assert dying.processes["worker1"].end() == -9
    assert "others do piece" in dying.processes["chief0"].said
    assert bits(arrays(dying, "chief", 0)) == expected


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_each_row_counts_once_an_epoch_whatever_workers_do(job, max_staleness):
    from tests.parameter_server.programs.train import Y

    made = job(workers=3, servers=2)
    options = {"cases": ["counted", "mixed"], "strategy": {"max_staleness": max_staleness}}
    made.start_all(each=lambda task, index: {"stop": [4, 9]} if (task, index) == ("worker", 2) else {}, **options)
    made.end(but=["worker2"])
    found = arrays(made, "chief", 0)
    np.testing.assert_allclose(found["counted/history/row_sum"], 3 * [Y.sum()], rtol=1e-5)
    assert int(found["counted/optimizer/0"]) == 3 * 6
    assert bits(arrays(made, "worker", 0)) == bits(arrays(made, "ps", 1)) == bits(found)
    assert np.isfinite(found["mixed/history/val_loss"]).all()
