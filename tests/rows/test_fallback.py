"""What becomes of models that mix rows, or cannot be proved not to: the global batch, and a line with the reason."""

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


class Picky(layers.Layer):
    def call(self, x):
        if x.shape[0] not in (None, 8):
            raise ValueError("the batches of this layer have 8 rows")
        return 2 * x

    def compute_output_shape(self, shape):
        return shape


class OwnNormalization(layers.BatchNormalization):
    def call(self, x, training=None, *, scale=1.0):
        return scale * super().call(x, training=training)


class Normalized(layers.Layer):
    """Keeps a moving mean of its own, too."""

    def build(self, shape):
        self.normalize = OwnNormalization()
        self.normalize.build(shape)
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False, name="level")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=None):
        self.level.assign(0.9 * self.level + 0.1 * ops.mean(x))
        self.calls.assign_add(1)
        return self.normalize(x, training=training, scale=2.0)


def lines_of(caplog, layer, replicas=2):
    with caplog.at_level(logging.INFO, logger="lockstep"):
        with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=replicas).scope():
            model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layer, layers.Dense(1)], name="net")
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, epochs=2, verbose=0)
    return [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]


def test_a_line_names_operation_layer_and_line_of_code(caplog):
    (line,) = lines_of(caplog, Centred(name="centred"))
    assert line.startswith(
        "Model 'net': it runs on the global batch, and XLA divides the work: it mixes the rows of its batch: "
    )
    assert "sub works on a sum over the rows, layer 'centred', test_fallback.py:" in line


def test_the_reason_is_what_the_model_says_and_not_where_keras_stood(caplog):
    (line,) = lines_of(caplog, Picky())
    assert "it runs on 8 rows but not on 4 of them (the batches of this layer have 8 rows)" in line


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization(), Normalized(), layers.Dropout(0.2), layers.ActivityRegularization(0.1)]
)
def test_what_is_by_replica_by_design_or_a_mean_needs_no_line(caplog, layer):
    assert lines_of(caplog, layer) == []
