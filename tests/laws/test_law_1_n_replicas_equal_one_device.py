"""Law 1: N replicas give the weights, logs and predictions of one device with the same global batches."""

import pytest

from lockstep.collectives import ALGORITHMS
from lockstep.execution import spmd

from .cases import CASES, case_named
from .compare import DEVICES, REPLICAS, TOPOLOGIES, Topology, assert_same, reference, run

# The model and the layout of rows interact only when a call is split, when outputs and variables of replicas are merged, and
# when losses are weighted. These cases do each of this differently, so every day they run on a second number of replicas;
# on every number all cases run in the nightly set.
ON_TWO_COUNTS = (
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

# Every day these also evaluate, predict and use single batches: each has outputs, metrics, variables or ways to run of its own.
# Other cases only train: they have the model of one of these, and another optimizer, loss or layer.
USED_EVERY_DAY = (
    "adam",
    "sample_weight_and_weighted_metrics",
    "loss_of_the_whole_batch",
    "add_loss",
    "metrics_of_classes",
    "metrics_of_numbers",
    "batch_normalization_synchronized",
    "lstm_masked",
    "loss_masked",
    "variables_of_every_aggregation",
    "rows_multiplied_and_summed",
    "centred_on_the_batch",
    "sums_in_variables_without_aggregation",
    "squeezed",
    "mixed_float16",
    "dicts",
    "tuples",
    "subclassed_and_built_by_fit",
    "loss_of_what_the_call_has_kept",
    "steps_per_execution",
    "one_row",
)


def pairs():
    """Yield every case with every number of replicas, each on one number of devices that changes from case to case.

    One pair of a case also evaluates, predicts and uses single batches. Each case has a pair in the suite, and the others
    in the nightly set. Of those in the suite one in 24 is in the quick subset.
    """
    for number, case in enumerate(CASES):
        used, trained = 1 + number % 4, (2 + number % 4 + number // 4 % 4) % 5  # two different numbers of replicas
        every_day = {used} if case.name in USED_EVERY_DAY else {trained}
        every_day |= {trained} if case.name in ON_TWO_COUNTS else set()
        for turn, replicas in enumerate(REPLICAS):
            topology = Topology(replicas, DEVICES[(number + turn) % len(DEVICES)])
            marks = [pytest.mark.xdist_group(case.name)]
            if turn not in every_day:
                marks.append(pytest.mark.nightly)
            elif number % 24:
                marks.append(pytest.mark.slow)
            yield pytest.param(case, topology, turn != used, id=f"{case}-{topology}", marks=marks)


def test_each_case_and_each_topology_is_in_the_suite():
    every_day = [each.values for each in pairs() if pytest.mark.nightly not in each.marks]
    assert {case.name for case, _, _ in every_day} == {case.name for case in CASES} >= {*ON_TWO_COUNTS, *USED_EVERY_DAY}
    for only_fit in (False, True):
        used = {str(topology) for _, topology, only in every_day if only == only_fit}
        assert used >= {f"R{replicas}P{devices}" for replicas in REPLICAS[1:] for devices in DEVICES}, only_fit


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


def algorithms_and_counts():
    """Each operation on three devices, one on two; the others on two, where tests/collectives has them, in the nightly set."""
    for algorithm in ALGORITHMS:
        yield pytest.param(algorithm, 2, marks=[] if algorithm == "auto" else pytest.mark.nightly)
        yield pytest.param(algorithm, 3, marks=pytest.mark.slow)


@pytest.mark.parametrize(("algorithm", "count"), list(algorithms_and_counts()))
def test_every_cross_device_operation_keeps_the_law(algorithm, count):
    case = case_named("global_clipnorm")
    topology = Topology(3, count, {"cross_device_ops": ALGORITHMS[algorithm]})
    relative = 2.0**-7 if algorithm == "half_precision" else case.relative  # Two roundings to bfloat16.
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), relative)


def names_and_topologies():
    """Each case with one of two topologies, and in the nightly set with both."""
    for number, name in enumerate(["add_loss", "ema", "lstm_masked", "variables_of_every_aggregation"]):
        for turn, topology in enumerate([Topology(3, 2), Topology(4, 3)]):
            marks = pytest.mark.nightly if (number + turn) % 2 else pytest.mark.slow
            yield pytest.param(name, topology, id=f"{name}-{topology}", marks=[marks, pytest.mark.xdist_group(name)])


@pytest.mark.parametrize(("name", "topology"), list(names_and_topologies()))
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
