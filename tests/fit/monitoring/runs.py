"""One small run under a strategy, which all tests of this folder train."""

import keras
import numpy as np

import lockstep

ROWS, BATCH, STEPS = 40, 8, 5


def data(rows=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def built(replicas=2, devices=1, optimizer="adam", strategy=None, **options):
    keras.utils.set_random_seed(1)
    strategy = strategy or lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def fit(model, *callbacks, rows=ROWS, **options):
    x, y = data(rows)
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, callbacks=list(callbacks), **options).history
