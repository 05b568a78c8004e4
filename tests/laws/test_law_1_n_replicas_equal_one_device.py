"""Law 1: N replicas give the weights, logs and predictions of one device with the same global batches."""

import functools

import pytest

from .cases import CASES
from .compare import DEVICES, REPLICAS, Topology, assert_same, run


@functools.cache
def plain_keras(case):
    return run(case)


def pairs():
    """Every case with every number of replicas, each on one number of devices that changes from case to case.

    The quick subset takes one pair of a case. One xdist worker runs a case, so that plain Keras runs it once.
    """
    for number, case in enumerate(CASES):
        for turn, replicas in enumerate(REPLICAS):
            topology = Topology(replicas, DEVICES[(number + turn) % len(DEVICES)])
            marks = [pytest.mark.xdist_group(case.name)]
            if replicas != REPLICAS[1 + number % 4]:
                marks.append(pytest.mark.full)
            yield pytest.param(case, topology, id=f"{case}-{topology}", marks=marks)


@pytest.mark.parametrize(("case", "topology"), list(pairs()))
def test_n_replicas_equal_one_device(case, topology):
    assert_same(run(case, topology), plain_keras(case), case.relative)
