"""Law 3: a run that is interrupted anywhere and resumed ends with the same bits.

With arrays a net of convolutions is trained, and the uninterrupted run compiles everything separately.
"""

import functools
import itertools
import shutil

import keras
import numpy as np
import pytest

from tests.fit.checkpointing.runs import INPUTS, Run, Shuffled, data, whole_and_heard
from tests.support import compile_cache

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

RAGGED = (
    "arrays, the last batch short"  # Trained by three replicas on two devices: shares of the rows that differ, too.
)
QUICK = {(RAGGED, 3), ("PyDataset", 6), ("generator", 3), ("function", 6)}
STEPS = {"arrays, endless": 3, "PyDataset, endless": 3}


def cases():
    """Yield each kind of input with the steps in which it is broken off.

    Arrays are broken off in the middle of an epoch, in its last step and in the first step after a validation; every other
    input at one of these places, as test_every_input_goes_on_from_a_validation in
    tests/fit/checkpointing breaks each off after a validation, too. The nightly set has every input at every place.
    """
    for number, kind in enumerate(kind for kind in INPUTS if kind != "arrays"):
        steps = STEPS.get(kind, 5)
        places = (3 if steps > 3 else 2, steps, steps + 1)
        quick = {stop for one, stop in QUICK if one == kind}
        every_day = {*places} if kind == RAGGED else quick or {places[number % 3]}
        for stop in sorted({1, 3, 4, steps, steps + 1, steps + 3, 2 * steps, *places}):
            marks = [] if (kind, stop) in QUICK else [pytest.mark.slow]
            if stop not in every_day:
                marks = [pytest.mark.nightly]
            yield pytest.param(kind, stop, marks=[pytest.mark.xdist_group(f"resume {kind}"), *marks])


def run_of(kind, folder=None, **options):
    if kind == RAGGED:
        options = {"net": "convolutions", "replicas": 3} | options
    return Run(folder, kind, **options)


@functools.cache
def whole(kind):
    """Return digest and steps of the uninterrupted run, computed once for each kind."""
    if kind != RAGGED:
        return whole_and_heard(kind, 3)
    run = run_of(kind)
    with compile_cache.unused():
        return run.fit(backup=False), run.heard


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), list(cases()))
def test_the_same_bits_and_no_step_twice(kind, stop, tmp_path):
    expected, steps = whole(kind)
    first = run_of(kind, tmp_path)
    assert first.fit(stop) is None
    second = run_of(kind, tmp_path)
    assert second.fit() == expected
    assert second.heard == steps[len(steps) - len(second.heard) :]
    assert len(first.heard) + len(second.heard) - len(steps) <= 2  # save_freq: so much is done again, and no more


def batches_without_end():
    x, y = data()
    parts = ((x[16 * number :][:16], y[16 * number :][:16]) for number in itertools.cycle(range(5)))
    return {"validation_data": parts, "validation_steps": 2}


def shuffled_batches():
    return {"validation_data": Shuffled(), "validation_steps": 2}


def batches_of_arrays():
    x, y = data()
    return {"validation_data": (x, y), "validation_batch_size": 16, "validation_steps": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "validation",
    [
        batches_without_end,
        shuffled_batches,
        pytest.param(batches_of_arrays, marks=pytest.mark.nightly),
    ],
)
def test_a_validation_continues_where_it_was(validation, tmp_path):
    expected = Run(None, validation=validation).fit(backup=False)
    assert Run(tmp_path, validation=validation).fit(13) is None
    assert Run(tmp_path, validation=validation).fit() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "stop"),
    [
        *(("memory", 3), ("device", 8)),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("memory", 6), ("memory", 8), ("device", 3))),
    ],
)
def test_a_cache_keeps_the_first_pass_also_if_another_process_reads_it(cache, stop, tmp_path):
    expected = Run(None, "PyDataset", cache=cache).fit(backup=False)
    assert Run(tmp_path, "PyDataset", cache=cache).fit(stop) is None
    assert Run(tmp_path, "PyDataset", cache=cache).fit() == expected


class Draws(keras.callbacks.Callback):
    """Draws from the global generator when an epoch begins."""

    def __init__(self):
        super().__init__()
        self.drawn = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.drawn = float(np.random.random())

    def on_epoch_end(self, epoch, logs=None):
        logs["drawn"] = self.drawn


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), [("generator", 6), ("PyDataset, endless", 6), ("PyDataset", 8)])
def test_callbacks_draw_the_numbers_of_the_uninterrupted_run(kind, stop, tmp_path):
    expected = Run(None, kind).fit(backup=False, callbacks=[Draws()])
    assert Run(tmp_path, kind).fit(stop, callbacks=[Draws()]) is None
    assert Run(tmp_path, kind).fit(callbacks=[Draws()]) == expected


@pytest.mark.slow
@pytest.mark.xdist_group("resume PyDataset")
def test_broken_off_again_and_again(tmp_path):
    for stop in (3, 1, 4):
        assert Run(tmp_path, "PyDataset").fit(stop) is None
    assert Run(tmp_path, "PyDataset").fit() == whole("PyDataset")[0]


@pytest.mark.slow
def test_on_other_devices_with_deterministic(tmp_path):
    expected = Run(None, devices=2, deterministic=True, replicas=3).fit(backup=False)
    assert Run(tmp_path / "two", devices=2, deterministic=True, replicas=3).fit(7) is None
    for devices in (1, 3):
        folder = shutil.copytree(tmp_path / "two", tmp_path / str(devices))
        assert Run(folder, devices=devices, deterministic=True, replicas=3).fit() == expected, devices


@pytest.mark.slow
@pytest.mark.xdist_group(f"resume {RAGGED}")
def test_backing_up_changes_no_bit(tmp_path):
    assert run_of(RAGGED, tmp_path, options={"save_freq": 1}).fit() == whole(RAGGED)[0]


@pytest.mark.slow
def test_with_the_variables_on_one_device(tmp_path):
    expected = run_of("PyDataset", home="cpu:4").fit(backup=False)
    assert run_of("PyDataset", tmp_path, home="cpu:4").fit(4) is None
    assert run_of("PyDataset", tmp_path, home="cpu:4").fit() == expected
