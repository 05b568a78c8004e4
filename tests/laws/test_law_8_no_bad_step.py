"""Law 8: no non-finite step changes a variable, and a guard without findings changes no bit."""

import functools
from itertools import product

import keras
import pytest

from lockstep.callbacks import BackupAndRestore, NanGuard
from tests.fit.nan_guard_runs import BAD_STEP, CAUSES, STEPS, Run, data, without
from tests.support.marks import every_pair, quick_first

pytestmark = pytest.mark.xdist_group(__name__)  # One process traces the operations of the diagnosis once.

EXECUTORS = {
    "default": {},
    "default, one device": {"devices": 1},
    "deterministic": {"deterministic": True},
    "deterministic, three devices": {"deterministic": True, "devices": 3},
    "sliced optimizer": {"strategy": {"shard": "optimizer"}},
    "sharded variables": {"strategy": {"shard": "variables", "recompute": "blocks"}},
    "variables on one device": {"home": "cpu:1"},
    "not compiled": {"compile": {"run_eagerly": True}},
}
KINDS = {
    "plain": {},
    "several steps at once": {"compile": {"steps_per_execution": 4}},
    "accumulation": {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)},
    "loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))},
    "averages": {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True)},
    "replicas without rows": {"replicas": 7},
}
OTHERS = [cause for cause in CAUSES if cause != "layer"]


def executors_and_kinds():
    """Each way to run a step with the plain kind, and each other kind with one of two ways; both are in the nightly set.

    The test of each kind of training has the other one of the two.
    """
    yield from ((executor, "plain") for executor in EXECUTORS)
    for number, kind in enumerate(KINDS):
        for deterministic, executor in enumerate(("default", "deterministic") if number else ()):
            is_left = (number + deterministic) % 2 == 0
            yield pytest.param(executor, kind, marks=pytest.mark.nightly if is_left else ())


@pytest.mark.parametrize(("executor", "kind"), quick_first(executors_and_kinds()))
def test_with_finite_numbers_no_bit_changes(executor, kind):
    options = (
        EXECUTORS[executor]
        | KINDS[kind]
        | {"compile": EXECUTORS[executor].get("compile", {}) | KINDS[kind].get("compile", {})}
    )
    (x, y), run = data(), Run(**options)
    # Of 45 rows in batches of 8 the last batch has fewer; in batches of 9 all are alike, and uneven for the replicas.
    has_two_shapes = kind == "plain" and executor in ("default", "deterministic")
    given = {"epochs": 2, "shuffle": True, "batch_size": 8 if has_two_shapes else 9}
    rows = 18 if executor == "not compiled" else 45  # Not compiled, each step takes long.
    expected = run.fit(x[:rows], y[:rows], **given)[1:]
    assert run.fit(x[:rows], y[:rows], NanGuard(), **given)[1:] == expected


@functools.cache
def left_without_the_bad_step(executor):
    return Run(**EXECUTORS[executor]).fit(*without([BAD_STEP], *data()))[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "cause"),
    [
        *((executor, "layer") for executor in EXECUTORS),
        *product(["default"], OTHERS),
        *(pytest.param("deterministic", cause, marks=pytest.mark.nightly) for cause in OTHERS),
    ],
)
def test_a_step_that_is_skipped_is_as_if_it_had_not_been_there(executor, cause):
    x, y = data(cause)
    guard = NanGuard("skip")
    _, left, history = Run(**EXECUTORS[executor]).fit(x, y, guard)
    assert guard.skipped == 1
    assert (left, history) == left_without_the_bad_step(executor)


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [
        pytest.param(
            kind, deterministic, marks=pytest.mark.nightly if (number + deterministic) % 2 else pytest.mark.slow
        )
        for number, kind in enumerate(KINDS)
        for deterministic in (False, True)
    ],
)
def test_so_it_is_in_each_kind_of_training_and_for_each_step(kind, deterministic):
    bad_steps = (0, 2, 3, STEPS - 1)
    x, y = data("layer", bad_steps=bad_steps)
    run = Run(deterministic=deterministic, **KINDS[kind])
    guard = NanGuard("skip")
    assert run.fit(x, y, guard)[1] == run.fit(*without(bad_steps, x, y))[1]
    assert guard.skipped == len(bad_steps)


@pytest.mark.parametrize(("bad_step", "deterministic"), every_pair((BAD_STEP, STEPS - 1), (False, True)))
@pytest.mark.slow
def test_after_a_rollback_the_steps_since_the_checkpoint_are_as_if_they_had_not_been_there(
    tmp_path, bad_step, deterministic
):
    x, y = data("layer", bad_steps=[bad_step])
    run = Run(deterministic=deterministic)
    guard = NanGuard("rollback")
    left = run.fit(x, y, guard, BackupAndRestore(tmp_path, save_freq=2, keep=100))[1]
    assert guard.rollbacks == 1
    lost = range(bad_step // 2 * 2, bad_step + 1)
    assert left == run.fit(*without(lost, x, y))[1]
