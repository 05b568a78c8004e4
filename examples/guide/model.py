"""The network and the data of the guide, which both scripts of this folder share."""

import keras
from keras import layers

from lockstep import datasets


def load():
    (x, y), (x_test, y_test) = datasets.mnist()
    x, x_test = (pictures.reshape(-1, 784).astype("float32") / 255 for pictures in (x, x_test))
    return (x[:-10_000], y[:-10_000]), (x[-10_000:], y[-10_000:]), (x_test, y_test)


def build():
    inputs = keras.Input((784,))
    hidden = layers.Dense(256, activation="relu")(layers.Dense(256, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(10)(hidden))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model
