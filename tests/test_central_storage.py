"""``CentralStorageStrategy``: the same numbers, with all variables on one device."""

import pytest

from .laws.cases import CASES
from .laws.compare import Central, assert_same, run

QUICK = ["adam", "loss_scale", "own_train_step"]
OTHERS = [
    "sgd_nesterov",
    "lamb",
    "muon",
    "schedule",
    "global_clipnorm",
    "gradient_accumulation",
    "ema",
    "ema_overwrite",
    "mixed_float16",
    "float8",
    "batch_normalization_synchronized",
    "variables_of_every_aggregation",
    "subclassed_and_built_by_fit",
    "frozen_and_recompiled",
    "steps_per_execution",
    "run_eagerly",
    "not_compiled",
    "validation_split",
    "one_row",
]


@pytest.mark.parametrize("home", ["cpu:1", "cpu:4"])
@pytest.mark.parametrize("name", QUICK + [pytest.param(name, marks=pytest.mark.full) for name in OTHERS])
def test_law_1_holds(name, home):
    case = next(case for case in CASES if case.name == name)
    topology = Central(3, 2, home=home)
    assert_same(run(case, topology, only_fit=name not in QUICK), run(case, only_fit=name not in QUICK), case.relative)
