"""Layers of users whose results depend on all rows, or on none, in ways that shapes do not show: the numbers are those of plain Keras."""

import types

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src.utils import module_utils

import lockstep

X = np.random.default_rng(0).normal(1, 1, (8, 4)).astype("float32")


class Noise(layers.Layer):
    """Noise of a fixed seed, which is the same in each step."""

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=7)


class GammaNoise(layers.Layer):
    """The same of another distribution, which JAX draws by a primitive of its own."""

    def call(self, x):
        return x + keras.random.gamma(ops.shape(x), alpha=2.0, seed=7)


class NoiseOfOwnKey(layers.Layer):
    """Noise of a key in a variable that is no ``SeedGenerator``."""

    def build(self, shape):
        self.key = self.add_weight(shape=(2,), dtype="uint32", initializer="ones", trainable=False)

    def call(self, x):
        key = jax.random.wrap_key_data(ops.convert_to_tensor(self.key))
        return x + jax.random.normal(key, x.shape)


@ops.custom_gradient
def clipped(weight):
    return weight, lambda upstream: ops.clip(upstream, -0.01, 0.01)


class ClippedGradient(layers.Layer):
    """A weight whose gradient is clipped, which is not the sum of clipped gradients of parts of the batch."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * clipped(ops.convert_to_tensor(self.scale))


@jax.custom_jvp
def normed_derivative(x):
    return x * 1.0


@normed_derivative.defjvp
def _(primals, tangents):
    return primals[0] * 1.0, tangents[0] / jax.numpy.linalg.norm(primals[0])


class NormedDerivative(layers.Layer):
    """A derivative that is divided by the norm of all rows."""

    def call(self, x):
        return normed_derivative(x)


class LastMeans(layers.Layer):
    """Keeps the mean of whole batches and that of smaller ones."""

    def build(self, shape):
        make = {"shape": (), "initializer": "zeros", "trainable": False}
        self.full, self.rest = (self.add_weight(name=name, **make) for name in ("full", "rest"))

    def call(self, x):
        (self.full if x.shape[0] == len(X) else self.rest).assign(ops.mean(x))
        return x


class AsksTheHost(layers.Layer):
    """Divides by the number of rows, which only a function on the host has."""

    def call(self, x):
        rows = x.shape[0] or 1
        return x * jax.pure_callback(lambda: np.float32(1 / rows), jax.ShapeDtypeStruct((), "float32"))

    def compute_output_shape(self, shape):
        return shape


class NoiseOrMean(layers.Layer):
    """Keeps noise or a moving mean, as a variable says."""

    def __init__(self):
        super().__init__()
        self.normalization, self.seed = layers.BatchNormalization(), keras.random.SeedGenerator(3)

    def build(self, shape):
        self.normalization.build(shape)
        self.kept = self.add_weight(shape=(shape[-1],), trainable=False)
        self.is_noise = self.add_weight(shape=(), dtype="bool", initializer="ones", trainable=False)

    def call(self, x, training=False):
        found = self.normalization(x, training=training)
        if training:
            noise = keras.random.uniform((x.shape[-1],), seed=self.seed)
            mean = ops.convert_to_tensor(self.normalization.moving_mean)
            self.kept.assign(ops.cond(ops.convert_to_tensor(self.is_noise), lambda: noise, lambda: mean))
        return found


class Counter(layers.Layer):
    """Counts its calls in floating point, with and without an aggregation, and once as a whole number."""

    def build(self, shape):
        make = {"shape": (), "initializer": "zeros", "trainable": False}
        self.counts = [
            self.add_weight(dtype=dtype, aggregation=aggregation, **make)
            for dtype in ("float32", "int32")
            for aggregation in ("none", "mean")
        ]

    def call(self, x, training=False):
        for count in self.counts if training else ():
            count.assign_add(ops.cast(1, count.dtype))
        return x


class Means(layers.Layer):
    """Keeps the mean of its inputs as complex and as whole numbers."""

    def build(self, shape):
        make = {"shape": (), "initializer": "zeros", "trainable": False, "aggregation": "mean"}
        self.means = [self.add_weight(dtype=dtype, **make) for dtype in ("complex64", "int32")]

    def call(self, x):
        for mean in self.means:
            mean.assign(ops.cast(ops.mean(10 * x), mean.dtype))
        return x


def trained(layer, devices, steps=1, rows=8):
    """Predictions before, all weights after training."""
    strategy = lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)]) if devices else None
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else keras.name_scope("plain"):
        model = keras.Sequential([keras.Input((4,)), layer(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
    before = model.predict(X[:rows], verbose=0)
    for _ in range(steps):
        model.train_on_batch(X[:rows], X[:rows, :1])
    return [before, *map(np.asarray, model.get_weights())]


@pytest.mark.parametrize(
    "layer",
    [
        *(Noise, GammaNoise, NoiseOfOwnKey, ClippedGradient, NormedDerivative, Means),
        *(LastMeans, pytest.param(AsksTheHost, marks=pytest.mark.filterwarnings("ignore"))),
    ],
)
def test_own_layer_has_the_numbers_of_plain_keras(layer, caplog):
    caplog.set_level("INFO", "lockstep")
    for ours, plain in zip(trained(layer, 2), trained(layer, 0), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
    assert "runs on the global batch" in caplog.text


def test_noise_that_a_condition_chooses_is_that_of_the_first_replica():
    """Which has the numbers of plain Keras."""
    kept = []
    for devices in (2, 0):
        keras.utils.set_random_seed(0)
        strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"]) if devices else None
        with strategy.scope() if strategy else keras.name_scope("plain"):
            layer = NoiseOrMean()
            model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
            model.compile("sgd", "mse")
        model.train_on_batch(X, X[:, :1])
        kept.append(np.asarray(layer.kept))
    np.testing.assert_array_equal(*kept)


def test_noise_of_seed_generators_is_split(caplog):
    caplog.set_level("INFO", "lockstep")
    trained(lambda: layers.GaussianNoise(1.0), 2)
    assert "runs on the global batch" not in caplog.text


def test_linear_gradient_of_a_weight_is_split(caplog):
    caplog.set_level("INFO", "lockstep")

    @ops.custom_gradient
    def rounded(weight):
        return ops.round(weight), lambda upstream: 2 * upstream

    class Rounded(ClippedGradient):
        def call(self, x):
            return x * rounded(ops.convert_to_tensor(self.scale))

    for ours, plain in zip(trained(Rounded, 2), trained(Rounded, 0), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
    assert "runs on the global batch" not in caplog.text


@ops.custom_gradient
def penalized(x):
    return x, lambda upstream: upstream + 0.1 * x + 0.1


@ops.custom_gradient
def of_unit_length(x):
    return x, lambda upstream: upstream / ops.norm(upstream, axis=-1, keepdims=True)


@pytest.mark.parametrize("function", [penalized, of_unit_length])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_gradient_that_is_not_zero_where_the_loss_has_none_is_that_of_plain_keras(function, devices):
    """An uneven batch is padded, and the rows of padding have no loss."""

    class Encoder(layers.Dense):
        def call(self, x):
            return function(super().call(x))

    ours, plain = (trained(lambda: Encoder(3, name="encoder"), number, steps=2, rows=7) for number in (devices, 0))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


REVERSED = {
    "reversed": lambda upstream: -0.5 * upstream,
    "clipped": lambda upstream: ops.clip(upstream, -0.1, 0.1),
    "scaled to a length": lambda upstream: upstream / (ops.norm(upstream, axis=-1, keepdims=True) + 1e-3),
    "of some rows": lambda upstream: ops.where(upstream > 0.1, upstream, 0.0),
}


@pytest.mark.parametrize("backward", REVERSED.values(), ids=REVERSED)
def test_a_gradient_that_is_zero_where_the_loss_has_none_is_split(backward, caplog):
    caplog.set_level("INFO", "lockstep")

    @ops.custom_gradient
    def function(x):
        return x, backward

    class Encoder(layers.Dense):
        def call(self, x):
            return function(super().call(x))

    ours, plain = (trained(lambda: Encoder(3, name="encoder"), devices, rows=7) for devices in (2, 0))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert "runs on the global batch" not in caplog.text


@pytest.mark.slow
def test_what_is_the_same_on_each_replica_is_not_averaged(caplog):
    """Weights of three sevenths and four sevenths do not add up to 1 in floating point."""
    caplog.set_level("INFO", "lockstep")
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=3).scope():
        model = keras.Sequential([keras.Input((4,)), Counter(), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
    for _ in range(9):
        model.train_on_batch(np.ones((98, 4)), np.ones((98, 1)))
    assert [float(count.value) for count in model.layers[0].counts] == [9, 9, 9, 9]
    assert "runs on the global batch" not in caplog.text


def test_infinities_survive_a_replica_without_rows():
    class WithMask(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x), ops.triu(ops.full((2, 2), -np.inf), 1)

    with lockstep.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).scope():
        model = WithMask()
    np.testing.assert_array_equal(model.predict(X[:2], verbose=0)[1], [[0, -np.inf], [0, 0]])


def test_state_of_a_function_of_jax_is_that_of_plain_keras(monkeypatch):
    asked = types.ModuleType("tensorflow")  # JaxLayer asks it one question.
    asked.inside_function = lambda: False
    monkeypatch.setattr(module_utils.tensorflow, "module", asked)

    def init(rng, inputs):
        return {"w": jax.numpy.ones((4, 1))}, {"rows": jax.numpy.zeros(()), "total": jax.numpy.zeros(())}

    def call(params, state, inputs):
        state = {"rows": state["rows"] + inputs.shape[0], "total": state["total"] + inputs.sum()}
        return inputs @ params["w"], state

    def layer():
        return layers.JaxLayer(call, init)

    for ours, plain in zip(trained(layer, 2), trained(layer, 0), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
