"""The limits notice what must not be: a collective too many, bytes too many, state that is kept twice, the host."""

from dataclasses import replace

import pytest

from tests.accelerators.limits import faults
from tests.accelerators.steps import PLANS, Case, Measured, Sizes

MODEL = Sizes(gradients=1_000_000, statistics=2_000, outputs=40, trainable=8, averaged=4, metrics=4, state=40)
ROWS, DEVICES = 256, 8
KERAS = Measured(1, {"all-reduce": (1, 1_002_008)}, 3_000_000, 5_000_000, 40, ())
STEP = Measured(1, {"all-reduce": (1, 1_002_008)}, 3_000_000, 5_100_000, 40, ())
RUN = replace(STEP, exchanged={"all-reduce": (1, 1_002_004)}, donated=36)
EVALUATED = replace(STEP, exchanged={"all-reduce": (1, 8)}, donated=0)
PREDICTED = replace(STEP, exchanged={"all-gather": (1, ROWS * 40)}, donated=0)
SHARDED = replace(
    STEP, exchanged={"reduce-scatter": (2, 125_000), "all-reduce": (1, 2_008), "all-gather": (3, 1_020_000)}
)
TREE = replace(STEP, exchanged={"all-to-all": (2, 900_000), "all-gather": (4, 1_200_000)}, donated=35)
RIGHT = {"fast": STEP, "uneven": STEP, "shard_optimizer": SHARDED, "run": RUN, "deterministic": TREE}
RIGHT |= {"evaluate": EVALUATED, "predict": PREDICTED}


def found(plan, measured):
    return faults(Case("CNN", plan, "v5e 2x4"), measured, KERAS, MODEL, ROWS, DEVICES)


@pytest.mark.parametrize("plan", PLANS)
def test_step_within_its_limits_has_no_faults(plan):
    assert not found(plan, RIGHT[plan])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["collective-broadcast", "ragged-all-to-all"])
def test_collective_of_another_kind_is_a_fault(plan, name):
    more = replace(RIGHT[plan], exchanged=RIGHT[plan].exchanged | {name: (1, 4)})
    assert found(plan, more) == [f"1 {name} of 4 bytes: at most 0 of 0 are expected"]


@pytest.mark.parametrize("plan", ["fast", "uneven", "run"])
def test_one_more_all_reduce_is_a_fault(plan):
    more = replace(RIGHT[plan], exchanged=RIGHT[plan].exchanged | {"all-reduce": (2, 1_002_008)})
    assert found(plan, more) == ["2 all-reduce of 1002008 bytes: at most 1 of 1006096 are expected"]


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_that_are_gathered_once_more_are_a_fault(plan):
    right = RIGHT[plan].exchanged
    number, size = right.get("all-gather", (0, 0))
    more = replace(RIGHT[plan], exchanged=right | {"all-gather": (number + 10, size + 400_000)})
    assert "all-gather" in found(plan, more)[0]


def test_outputs_of_predict_stay_on_the_devices_of_one_host():
    stays = replace(PREDICTED, exchanged={})
    (gathered,) = faults(Case("CNN", "predict", "v5e 2x2"), PREDICTED, KERAS, MODEL, ROWS, 4)
    assert "1 all-gather" in gathered
    assert not faults(Case("CNN", "predict", "v5e 2x2"), stays, KERAS, MODEL, ROWS, 4)


def test_sharded_sums_of_many_tpus_may_be_all_reduces():
    whole = replace(SHARDED, exchanged={"all-reduce": (2, 2_040_000)})
    assert not faults(Case("CNN", "shard_optimizer", "v5e 16x16"), whole, KERAS, MODEL, ROWS, 256)
    assert found("shard_optimizer", whole)


def test_gradients_that_are_not_reduced_are_a_fault():
    less = replace(STEP, exchanged={"all-reduce": (1, 900_000)})
    assert found("fast", less) == ["900000 bytes are reduced: the gradients and statistics have 1002000"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"memory": 12_000_000}, "12000000 bytes of memory: at most "),
        ({"donated": 30}, "30 arrays of the state are donated: expected 40"),
        ({"from_host": ("outfeed",)}, "an exchange with the host: outfeed"),
    ],
)
def test_memory_state_and_host_have_limits(change, fault):
    (sentence,) = found("fast", replace(STEP, **change))
    assert sentence.startswith(fault)
