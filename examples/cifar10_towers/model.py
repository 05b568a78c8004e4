"""The pictures, of which each tower draws batches of its own, and the network."""

import keras
import numpy as np
from keras import layers

from lockstep import datasets

SIDE = 24  # pixels; a picture has 32, and each time it is drawn another part of it is seen
ORDER, CHANGES = 0, 1  # two streams of random numbers


def load():
    """The first 10,000 pictures of CIFAR-10, ``uint8 (rows, 32, 32, 3)``, and the middle of each one for testing."""
    (x, y), (x_test, y_test) = datasets.cifar10()
    edge = (32 - SIDE) // 2
    return (x[:10_000], y[:10_000]), (scaled(x_test[:, edge:-edge, edge:-edge]), y_test)


def batches(x, y, rows, towers, steps, seed, start=0):
    """``rows`` changed pictures and their labels for each tower in turn, step after step from ``start`` on.

    A batch depends on (seed, step, tower) alone. Epochs follow each other without a gap, so that all batches are full and an
    epoch, each in its own order, holds every picture once.
    """
    for step in range(start, steps):
        for tower in range(towers):
            drawn = rows_of_batch(step * towers + tower, rows, len(x), seed)
            yield changed(x[drawn], np.random.default_rng((seed, CHANGES, step, tower))), y[drawn]


def rows_of_batch(number, rows, pictures, seed):
    epochs, places = np.divmod(np.arange(number * rows, (number + 1) * rows), pictures)
    orders = {epoch: np.random.default_rng((seed, ORDER, epoch)).permutation(pictures) for epoch in np.unique(epochs)}
    return np.asarray([orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)])


def changed(pictures, rng):
    """A part of each picture, half of them seen in a mirror, with less contrast or more."""
    tops, lefts = rng.integers(0, 32 - SIDE + 1, (2, len(pictures)))
    turns = rng.choice([1, -1], len(pictures))
    parts = [
        picture[top : top + SIDE, left : left + SIDE][:, ::turn]
        for picture, top, left, turn in zip(pictures, tops, lefts, turns, strict=True)
    ]
    pixels = scaled(np.stack(parts))
    mean = pixels.mean(axis=(1, 2), keepdims=True)
    contrast = rng.uniform(0.6, 1.4, (len(pictures), 1, 1, 1)).astype("float32")
    return mean + contrast * (pixels - mean)


def scaled(pixels):
    return pixels.astype("float32") / 127.5 - 1


def build(learning_rate, decay, decay_steps):
    """The learning rate falls in stairs, counted in steps; the optimizer keeps moving averages of the weights."""
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3)),
            *block(32),
            *block(64),
            *block(128),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    stairs = keras.optimizers.schedules.ExponentialDecay(learning_rate, decay_steps, decay, staircase=True)
    model.compile(
        optimizer=keras.optimizers.SGD(
            stairs, momentum=0.9, nesterov=True, weight_decay=5e-4, use_ema=True, ema_momentum=0.99
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.optimizer.build(model.trainable_variables)
    return model


def block(channels):
    # A stride in place of pooling: the same accuracy here, and a fifth of the time on CPU.
    convolution = layers.Conv2D(channels, 3, strides=2, padding="same", use_bias=False)
    return convolution, layers.BatchNormalization(), layers.ReLU()
