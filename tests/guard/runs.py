"""One small run, and ways in which a batch makes it NaN or Inf."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import lockstep

ROWS, BATCH = 24, 8  # three steps an epoch; replicas have 4 and 4 rows, or 3, 3 and 2
BAD_STEP, BAD_ROW = 1, 5


class Log(layers.Layer):
    """NaN where a sum of inputs is negative: only in a batch that has such rows."""

    def call(self, x):
        return x + ops.log(ops.sum(x, axis=-1, keepdims=True) * 0 + x[:, :1] * 0 + 1) * 0


class LogOfFirst(layers.Layer):
    """The logarithm of the first column's absolute value less a threshold, below which rows are bad."""

    def call(self, x):
        return x + 0.01 * ops.log(x[:, :1] + 50.0)


class RootOfFirst(layers.Layer):
    """A root whose gradient is infinite where the first column is 0."""

    def call(self, x):
        return x + 0.01 * ops.sqrt(ops.abs(x[:, :1]))


def cube(y_true, y_pred):
    """Infinite where a target is huge, without an infinite gradient being needed for it."""
    return ops.mean(ops.square(y_pred - y_true), axis=-1) + ops.power(y_true[:, 0], 3) * 0.001


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=(ROWS, 2)).astype("float32")


def row():
    return BAD_STEP * BATCH + BAD_ROW
