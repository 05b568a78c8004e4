"""Law 1: N replicas give the weights, logs and predictions of one device with the same global batches."""

import functools

import pytest
from jax import lax

from lockstep.collectives import ALGORITHMS
from lockstep.step import devices

from .cases import CASES
from .compare import DEVICES, REPLICAS, TOPOLOGIES, Topology, assert_same, run


@functools.cache
def plain_keras(case, only_fit=False):
    return run(case, only_fit=only_fit)


def pairs():
    """Every case with every number of replicas, each on one number of devices that changes from case to case.

    One pair of a case also evaluates, predicts and uses single batches; of these a sixth are the quick subset. One
    xdist worker runs a case, so that plain Keras runs it once.
    """
    for number, case in enumerate(CASES):
        for turn, replicas in enumerate(REPLICAS):
            topology = Topology(replicas, DEVICES[(number + turn) % len(DEVICES)])
            whole = replicas == REPLICAS[1 + number % 4]
            quick = whole and number % 6 == 0
            marks = [pytest.mark.xdist_group(case.name)] + ([] if quick else [pytest.mark.full])
            yield pytest.param(case, topology, not whole, id=f"{case}-{topology}", marks=marks)


@pytest.mark.parametrize(("case", "topology", "only_fit"), list(pairs()))
def test_n_replicas_equal_one_device(case, topology, only_fit):
    assert_same(run(case, topology, only_fit), plain_keras(case, only_fit), case.relative)


@pytest.mark.full
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", ["adam", "loss_masked", "dicts"])
def test_the_whole_product_of_replicas_and_devices(name, topology):
    case = next(case for case in CASES if case.name == name)
    assert_same(run(case, topology, only_fit=True), plain_keras(case, only_fit=True), case.relative)


def test_devices_with_three_different_shares_of_a_batch():
    """XLA could not compile this for CPUs where each device looked up its share within the sums of the loss."""
    case = next(case for case in CASES if case.name == "hidden_too")
    assert_same(run(case, Topology(5, 3)), plain_keras(case), case.relative)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_cross_device_operation_keeps_the_law(algorithm, count):
    case = next(case for case in CASES if case.name == "global_clipnorm")
    topology = Topology(3, count, {"cross_device_ops": ALGORITHMS[algorithm]})
    relative = 2.0**-7 if algorithm == "half_precision" else case.relative  # Two roundings to bfloat16.
    assert_same(run(case, topology, only_fit=True), plain_keras(case, only_fit=True), relative)


@pytest.mark.full
@pytest.mark.parametrize("topology", [Topology(3, 2), Topology(4, 3)], ids=str)
@pytest.mark.parametrize("name", ["adam", "ema", "lstm_masked"])
def test_the_conditional_of_accelerators_gives_what_selecting_gives(name, topology, monkeypatch):
    """Accelerators run a device's share of an uneven batch under ``lax.switch``; it works on CPU too, only slowly."""
    used = []

    def switch(choice, branches):
        used.append(len(branches))
        return lax.switch(choice, branches)

    monkeypatch.setattr(devices, "_select", switch)
    case = next(case for case in CASES if case.name == name)
    assert_same(run(case, topology, only_fit=True), plain_keras(case, only_fit=True), case.relative)
    assert max(used) >= 2
