"""The network, the data and the rows of the table that both scripts of this folder share."""

import keras
from keras import layers

from lockstep import datasets

ROWS = ((1, 64), (2, 256), (3, 384), (4, 512))  # replicas, global batch
EPOCHS = 5


def load():
    """50,000 pictures to train, 10,000 to validate, 10,000 to test, as float32 (n, 784) in 0 … 1."""
    (x, y), (x_test, y_test) = datasets.mnist()
    x, x_test = (pictures.reshape(-1, 784).astype("float32") / 255 for pictures in (x, x_test))
    return (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]), (x_test, y_test)


def build():
    model = keras.Sequential(
        [keras.Input((784,)), layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
