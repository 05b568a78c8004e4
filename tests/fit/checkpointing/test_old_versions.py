"""What an earlier version has kept goes on: ``data/version_1`` was written by 0.1.0 after 3 of the 4 steps of the second epoch."""

import itertools
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import lockstep
from lockstep.checkpoint.store import CheckpointStore

from .runs import Hearing

DATA = Path(__file__).with_name("data")


class Begin(keras.callbacks.Callback):
    """Tells what the first step of this process begins with; an attribute of its own would come back from the checkpoint."""

    def __init__(self, found):
        super().__init__()
        self.tell = lambda: found or found.update(numbered(self.model))

    def on_train_batch_begin(self, batch, logs=None):
        self.tell()


def numbered(model):
    kinds = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
    kinds["optimizer"] = model.optimizer.variables
    return {f"{kind}/{n}": np.asarray(variable) for kind, group in kinds.items() for n, variable in enumerate(group)}


def trained(folder, epochs=3, steps=None):
    """Trains as the program did that has written the data; ends after some steps, if asked to."""
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    begun, heard = {}, []
    rng = np.random.default_rng(0)
    backup = lockstep.callbacks.BackupAndRestore(folder, save_freq=1, keep=1)
    numbers = itertools.count(1)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: end_after(steps, numbers))
    x, y = rng.normal(size=(14, 4)).astype("float32"), rng.normal(size=(14, 1)).astype("float32")
    history = model.fit(
        x, y, batch_size=4, epochs=epochs, callbacks=[backup, Begin(begun), Hearing(heard), stop], verbose=0
    )
    return begun, heard, history


class EndedError(Exception):
    """Enough steps."""


def end_after(steps, numbers):
    if steps and next(numbers) > steps:
        raise EndedError


@pytest.mark.slow
@pytest.mark.parametrize("version", [path.name for path in sorted(DATA.iterdir())])
def test_what_an_earlier_version_has_kept_goes_on(version, tmp_path):
    shutil.copytree(DATA / version, tmp_path / "run")
    kept = CheckpointStore(tmp_path / "run").newest()
    begun, heard, history = trained(tmp_path / "run")
    assert heard == [(1, 3), *((2, step) for step in range(4))]
    assert history.epoch == [0, 1, 2]
    assert set(begun) == {name for name in kept.metadata["variables"] if not name.startswith("metrics/")}
    for name, values in begun.items():
        np.testing.assert_array_equal(values, kept.arrays[name], err_msg=name)
