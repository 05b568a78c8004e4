"""Models on the global batch that XLA would divide with wrong gradients, or not at all, along the rows: decision 66."""

import contextlib
import logging

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers, ops

import lockstep

ROWS = 8


class Along(layers.Layer):
    """Applies a function to an array ``(rows, …)``, whose result has the same shape."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return x + ops.square(self.function(x))

    def compute_output_shape(self, input_shape):
        return input_shape


def max_pooled(x):
    return ops.max_pool(x[None], 2, 1, padding="same")[0]


def clamped_row(x):
    return lax.dynamic_index_in_dim(x, jnp.int32(99), keepdims=True)


def rows_written_at_the_end(x):
    return ops.slice_update(x, (ops.shape(x)[0] - 1, 0), x[:2] * 3)


def sorted_rows(x):
    return ops.sort(x, axis=0)


def median(x):
    return ops.median(x, axis=0, keepdims=True)


def pooled_images(x):
    """A pooling of each row, and a sum over the rows."""
    images = ops.reshape(x, (-1, 6, 1))
    pooled = ops.reshape(ops.max_pool(images, 2, 1, padding="same"), (-1, 6))
    return pooled + ops.mean(x, axis=0, keepdims=True)


def in_another_order(x):
    return ops.take(x, ops.argsort(ops.sum(x, axis=1)), axis=0)


def some_rows(x):
    return ops.tanh(x * ops.mean(ops.slice(x, (1, 0), (3, 6)), axis=0, keepdims=True))


WRONG = [max_pooled, clamped_row, rows_written_at_the_end, sorted_rows, median]


def trained(function, strategy=None, rows=ROWS):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6), Along(function), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))
    history = model.fit(x, y, batch_size=ROWS, shuffle=False, epochs=3, verbose=0).history
    return [*model.get_weights(), history["loss"], model.predict(x, batch_size=ROWS, verbose=0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: lockstep.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: lockstep.ModelParallelStrategy({"data": 2, "model": 1}, devices=["cpu:0", "cpu:1"]),
    ],
    ids=["mirrored", "mesh"],
)
@pytest.mark.parametrize("rows", [ROWS, ROWS + 5], ids=["even", "uneven"])
@pytest.mark.parametrize("function", WRONG)
def test_what_xla_divides_wrongly_is_computed_on_each_device(function, rows, make, caplog):
    expected = trained(function, rows=rows)
    with caplog.at_level(logging.INFO, logger="lockstep"):
        found = trained(function, make(), rows)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    assert "computes all rows on each device, as XLA divides" in caplog.text


@pytest.mark.parametrize("rows", [ROWS, ROWS + 5], ids=["even", "uneven"])
@pytest.mark.parametrize("function", [pooled_images, in_another_order, some_rows])
def test_what_xla_divides_rightly_is_divided(function, rows, caplog):
    with caplog.at_level(logging.INFO, logger="lockstep"):
        found = trained(function, lockstep.MirroredStrategy(["cpu:0", "cpu:1"]), rows)
    for mine, its in zip(found, trained(function, rows=rows), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    assert "it runs on the global batch, and XLA divides the work" in caplog.text
    assert "computes all rows" not in caplog.text
