"""Trains on a mesh over the devices of all workers, and saves, loads and resumes."""

from pathlib import Path

import keras
import numpy as np
from keras import layers

import lockstep
from tests.distributed.jobs.program import config, digest, make_mesh, tell

folder = Path(config["folder"])
# Two batches of 9 rows, of which two parts of a mesh have 5 and 4: one program for both.
ROWS, BATCH = 18, 9
x = np.random.default_rng(0).normal(size=(ROWS, 12)).astype("float32")
y = np.arange(ROWS) % 4
OPTIONS = config.get("options", {})


def build(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = [layers.Dense(12, activation="tanh", name=f"hidden_{number}") for number in range(4)]
        norm = [layers.BatchNormalization(), layers.Dropout(0.2, seed=1)]
        model = keras.Sequential([keras.Input((12,)), *hidden, *norm, layers.Dense(4, name="last")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def fit(model, epochs, *callbacks):
    options = {"batch_size": BATCH, "validation_data": (x[:BATCH], y[:BATCH]), "verbose": 0}
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options).history


def run_alone():
    model = build(lockstep.MirroredStrategy(["cpu:0"]))
    tell(history=fit(model, 3), predicted=model.predict(x, batch_size=BATCH, verbose=0).tolist())


def run_workers():
    strategy = make_mesh(**OPTIONS)
    model = build(strategy)
    tell(history=fit(model, 3), predicted=model.predict(x, batch_size=BATCH, verbose=0).tolist())
    arrays = [variable.value for variable in (*model.weights, *model.optimizer.variables)]
    here = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    tell(bytes=[here, strategy.layout(model).device_bytes, strategy.layout(model).bytes], bits=digest(model))
    fit(build(make_mesh(**OPTIONS)), 1, lockstep.callbacks.BackupAndRestore(folder / "run"))
    resumed = build(make_mesh(**OPTIONS))
    fit(resumed, 3, lockstep.callbacks.BackupAndRestore(folder / "run"))
    model.save(folder / "model.keras")
    with make_mesh(**OPTIONS).scope():
        loaded = keras.models.load_model(folder / "model.keras")
    pairs = zip(model.get_weights(), loaded.get_weights(), strict=True)
    tell(loaded=all(np.array_equal(ours, theirs) for ours, theirs in pairs))
    tell(resumed=digest(resumed), checked=len(strategy.self_check(model, x[:8], y[:8])))


if config["workers"] == 1:
    run_alone()
else:
    run_workers()
