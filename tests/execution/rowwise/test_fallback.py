"""Models that mix rows, or cannot be proved not to, run on the global batch and log the reason."""

import contextlib
import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


class ReversedGamma(layers.Layer):
    """Draws from a distribution whose parameter is that of another row."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return ops.flip(keras.random.gamma(ops.shape(x), alpha=ops.exp(x), seed=self.seed), axis=0)


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
    """Keeps a custom moving mean, too."""

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


@pytest.mark.slow
def test_the_layer_is_named_whose_operations_change_with_the_number_of_rows(caplog):
    class SwapsHalves(layers.Layer):
        def call(self, x):
            return ops.concatenate(ops.split(x, 2, axis=0)[::-1], axis=0) if x.shape[0] == 4 else x

    (line,) = lines_of(caplog, SwapsHalves(name="swaps"))
    assert "its operations change with the number of rows, layer 'swaps'" in line


def test_numbers_that_are_drawn_with_a_parameter_of_each_row_belong_to_rows(caplog):
    (line,) = lines_of(caplog, ReversedGamma())
    assert "rev reverses" in line


def steps_of(caplog, train_step):
    """Return the number of rows of each call of a model within another's train step, and the log lines about them."""
    seen = []

    class Inner(keras.Model):
        def __init__(self):
            super().__init__(name="inner")
            self.dense = layers.Dense(3, use_bias=False)
            self.dense.build((None, 4))
            self.built = True

        def call(self, x, of_row=None, of_all=None):
            seen.append(len(x))
            x = x if of_row is None else x + of_row
            return self.dense(x if of_all is None else x + ops.sum(of_all, axis=0))

    class Outer(keras.Model):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = Inner()
            self.built = True

        def call(self, x):
            return self.inner(x)

        def train_step(self, state, data):
            return {"loss": train_step(self.inner, state[0], data[0])}, state

    with caplog.at_level(logging.INFO, logger="lockstep"):
        with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            model = Outer()
            model.compile("sgd")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    return set(seen), [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]


@pytest.mark.parametrize("options", [{}, {"of_row": np.ones((8, 4), "float32")}])
def test_a_model_within_another_is_taken_apart_where_a_train_step_calls_it(options, caplog):
    def step(inner, values, x):
        return ops.mean(inner.stateless_call(values, [], x[:, ::-1], **options)[0])

    seen, lines = steps_of(caplog, step)
    assert (seen, lines) == ({8, 4}, [])  # Eight for the proof.


def test_a_call_of_a_model_within_another_that_is_not_taken_apart_has_a_line(caplog):
    _, (line,) = steps_of(
        caplog, lambda inner, values, x: ops.mean(inner.stateless_call(values, [], x, None, 2 * x)[0])
    )
    assert line.startswith("Model 'outer': model 'inner' within it runs on the global batch, ")
    assert "add works on a sum over the rows" in line


def test_a_model_that_is_called_directly_has_a_line(caplog):
    def step(inner, values, x):
        with keras.StatelessScope(zip(inner.trainable_variables, values, strict=True)):
            return ops.mean(inner(x))

    seen, (line,) = steps_of(caplog, step)
    assert seen == {8}
    assert line.startswith("Model 'outer': model 'inner' is called directly, and so runs on the global batch, ")


class Student(keras.Model):
    """Its loss calls a normalized model directly."""

    def __init__(self, is_training):
        super().__init__(name="student")
        self.is_training, self.dense = is_training, layers.Dense(1)
        self.teacher = keras.Sequential([keras.Input((4,)), layers.BatchNormalization()], name="teacher")
        self.dense.build((None, 4))
        self.built = True

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((self.teacher(x, training=self.is_training) - y_pred) ** 2)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_line_about_a_direct_call_names_statistics_of_the_batch_only_if_it_uses_them(is_training, caplog):
    with caplog.at_level(logging.INFO, logger="lockstep"):
        with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            model = Student(is_training)
            model.compile("sgd")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    included = ", BatchNormalization included" if is_training else ""
    assert f"model 'teacher' is called directly, and so runs on the global batch{included}, and XLA" in caplog.text


def test_a_model_that_cannot_be_taken_apart_is_not_told_to_call_stateless_call(caplog):
    def step(inner, values, x):
        of_parts = inner.stateless_call(values, [], x, None, 2 * x)[0]
        with keras.StatelessScope(zip(inner.trainable_variables, values, strict=True)):
            return ops.mean(of_parts) + ops.mean(inner(x))

    _, (line,) = steps_of(caplog, step)
    assert "add works on a sum over the rows" in line


def test_the_reason_is_what_the_model_says_and_not_where_keras_stood(caplog):
    (line,) = lines_of(caplog, Picky())
    assert "it runs on 8 rows but not on 4 of them (the batches of this layer have 8 rows)" in line


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization(), Normalized(), layers.Dropout(0.2), layers.ActivityRegularization(0.1)]
)
def test_what_is_by_replica_by_design_or_a_mean_needs_no_line(caplog, layer):
    assert lines_of(caplog, layer) == []


class Turned(layers.Layer):
    """Reverses some rows. Its random draws are on the mesh of the state, and the rows are not; JAX records that in the trace."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return ops.where(keras.random.uniform((x.shape[0], 1), seed=self.seeds) < 0.5, x, -x)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_where_an_array_lies_mixes_no_rows(caplog, devices, eagerly):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    with caplog.at_level(logging.INFO, logger="lockstep"):
        with lockstep.MirroredStrategy([f"cpu:{n}" for n in range(devices)], replicas=4).scope():
            model = keras.Sequential([keras.Input((4,)), Turned(), layers.Dense(3)])
            model.compile("sgd", "mse", run_eagerly=eagerly)
        model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0)
    assert "global batch" not in caplog.text


class Seeing(layers.Layer):
    """Reads concrete values, which a trace does not have."""

    def call(self, x):
        self.greatest = float(np.asarray(x).max())
        return x

    def compute_output_shape(self, shape):
        return shape


def test_what_cannot_be_traced_predicts_eagerly_as_on_plain_keras(caplog):
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    found = []
    for strategy in (None, lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3)):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([Seeing(), layers.Dense(2)])
            model.compile("sgd", "mse", run_eagerly=True)
        model.build((None, 4))
        with caplog.at_level(logging.INFO, logger="lockstep"):
            found.append([model.predict(x, batch_size=8, verbose=0), model.layers[0].greatest])
    for ours, plain in zip(*found[::-1], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
    (line,) = [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]
    assert (
        "on one device: it cannot be traced (The numpy.ndarray conversion method __array__() was called on traced array)"
        in line
    )
