"""Law 1: N replicas give the weights, logs and predictions of one device with the same global batches."""

import pytest

from lockstep.collectives import ALGORITHMS
from lockstep.execution import spmd

from .cases import CASES, case_named
from .compare import DEVICES, REPLICAS, TOPOLOGIES, Topology, assert_same, reference, run

# The model and the layout of rows interact only when a call is split, when outputs and variables of replicas are merged, and
# when losses are weighted. These cases do each of this differently, so they run on every number of replicas; the other cases
# do so in the nightly set.
ON_EVERY_COUNT = (
    "adam",
    "sample_weight_and_weighted_metrics",
    "loss_of_the_whole_batch",
    "add_loss",
    "gradient_accumulation",
    "batch_normalization_synchronized",
    "lstm_masked",
    "variables_of_every_aggregation",
    "outputs_with_and_without_rows",
    "own_train_step",
    "last_batch_of_one",
)


def pairs():
    """Yield every case with every number of replicas, each on one number of devices that changes from case to case.

    One pair of a case also evaluates, predicts and uses single batches; of these one in 24 is in the quick subset.
    """
    for number, case in enumerate(CASES):
        for turn, replicas in enumerate(REPLICAS):
            topology = Topology(replicas, DEVICES[(number + turn) % len(DEVICES)])
            whole = replicas == REPLICAS[1 + number % 4]
            marks = [pytest.mark.xdist_group(case.name)]
            if not whole and case.name not in ON_EVERY_COUNT:
                marks.append(pytest.mark.nightly)
            elif not whole or number % 24:
                marks.append(pytest.mark.slow)
            yield pytest.param(case, topology, not whole, id=f"{case}-{topology}", marks=marks)


@pytest.mark.parametrize(("case", "topology", "only_fit"), list(pairs()))
def test_n_replicas_equal_one_device(case, topology, only_fit):
    assert_same(run(case, topology, only_fit), reference(case, only_fit), case.relative)


def products():
    for name, marks in {
        "dicts": [pytest.mark.slow],
        "adam": [pytest.mark.nightly],
        "loss_masked": [pytest.mark.nightly],
    }.items():
        for topology in TOPOLOGIES:
            yield pytest.param(name, topology, id=f"{name}-{topology}", marks=[*marks, pytest.mark.xdist_group(name)])


@pytest.mark.parametrize(("name", "topology"), list(products()))
def test_the_whole_product_of_replicas_and_devices(name, topology):
    case = case_named(name)
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), case.relative)


@pytest.mark.slow
def test_devices_with_three_different_shares_of_a_batch():
    """XLA could not compile this for CPUs when each device looked up its share within the sums of the loss."""
    case = case_named("hidden_too")
    assert_same(run(case, Topology(5, 3)), reference(case), case.relative)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_cross_device_operation_keeps_the_law(algorithm, count):
    case = case_named("global_clipnorm")
    topology = Topology(3, count, {"cross_device_ops": ALGORITHMS[algorithm]})
    relative = 2.0**-7 if algorithm == "half_precision" else case.relative  # Two roundings to bfloat16.
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), relative)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(3, 2), Topology(4, 3)], ids=str)
@pytest.mark.parametrize("name", ["add_loss", "ema", "lstm_masked", "variables_of_every_aggregation"])
def test_the_conditional_of_accelerators_gives_what_selecting_gives(name, topology, monkeypatch):
    """Accelerators run a device's share of an uneven batch in a conditional, which also works on CPU, but slowly."""
    used = []

    def switch(choice, branches, operands):
        used.append(len(branches))
        return spmd.switch_with_common_residuals(choice, branches, operands)

    monkeypatch.setattr(spmd, "_select", switch)
    monkeypatch.setattr(spmd.SpmdForward, "padded_calls", lambda _: None)  # as if each replica had something of its own
    case = case_named(name)
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), case.relative)
    assert max(used) >= 2
