"""What a call of a model leaves besides its outputs (masks, attributes, noise): under replicas as in plain Keras, or on the global batch."""

import contextlib
import random

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep

ROWS, BATCH = 24, 8
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X[:, :1] * 2 + 1
TOKENS = np.random.default_rng(1).integers(0, 3, (ROWS, 5))


class KeepsRows(keras.Model):
    """Divides by a number of rows that its call has kept."""

    def __init__(self):
        super().__init__()
        self.last, self.kept = layers.Dense(1), {}

    def call(self, x):
        self.kept = {"rows": ops.shape(x)[0], "share": float("nan"), "array": np.arange(x.shape[0] or 1)}
        return self.last(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum((y - y_pred) ** 2) / self.kept["rows"]


class KeepsRowsInAHelper(KeepsRows):
    """The same in a layer that Keras never calls, and so never builds."""

    def __init__(self):
        super().__init__()
        self.helper = layers.Layer()

    def build(self, shape):
        self.last.build(shape)

    def call(self, x):
        self.helper.rows = ops.shape(x)[0]
        return self.last(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum((y - y_pred) ** 2) / self.helper.rows


class CountsCalls(keras.Model):
    """Counts in Python how often it is called, and uses the count."""

    def __init__(self):
        super().__init__()
        self.last, self.calls = layers.Dense(1), 0

    def call(self, x):
        self.calls += 1
        result = self.last(x)
        self.add_loss(self.calls * ops.mean(result**2))
        return result


class HalfTheColumns(layers.Layer):
    """Keeps sublayers, and numbers, that its ``build`` makes."""

    def build(self, shape):
        self.narrow, self.wide, self.rows = layers.Reshape((3, 2)), layers.Flatten(), shape[0]

    def call(self, x):
        return self.wide(self.narrow(x)) * 0.5


class Augmented(keras.Model):
    """Has layers that are called in training only, and so are built in the trace of the first step."""

    def __init__(self):
        super().__init__()
        self.augment = keras.Sequential([layers.Rescaling(2.0), layers.Rescaling(0.5)])
        self.half, self.last = HalfTheColumns(), layers.Dense(1)

    def build(self, shape):
        self.last.build(shape)

    def call(self, x, training=False):
        return self.last(self.half(self.augment(x)) if training else x)


class WholeNumbers(layers.Layer):
    """Keeps whole numbers and bools that belong to no row, and returns some."""

    def call(self, x):
        self.large, self.negative = ops.arange(3) + 2**30 + 1, ops.convert_to_tensor([-7, 7], "int8")
        self.causal = ops.tril(ops.ones((3, 3), "bool"))
        return x


class RunningMean(layers.Layer):
    """Has a running mean that no gradient flows into, and its mean with a constant."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1] + 1,), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            mean = ops.stop_gradient(ops.concatenate([ops.mean(x, 0), ops.ones(1)]))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x


class KeepsAverage(layers.Layer):
    """Keeps a running mean in an attribute, which has no value before the first call; without a compiled step it may."""

    def __init__(self):
        super().__init__()
        self.average, self.calls = None, ops.zeros(())

    def call(self, x, training=False):
        before = 0.0 if self.average is None else self.average
        if training:
            self.average = 0.5 * before + 0.5 * ops.stop_gradient(ops.mean(x, axis=0))
            self.calls = self.calls + 1
        return x - before / (1 + self.calls)


class DrawsInPython(layers.Layer):
    """Draws from Python's and NumPy's generators, as ports from PyTorch do: once for each trace."""

    def call(self, x):
        return x * random.choice([0.5, 1.0, 2.0]) + np.random.uniform(0.1, 0.5)


def quantised(mode):
    """Weights of whole numbers, whose layer has a custom derivative that is zero for them, and others that are trained."""

    def make():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(1)])
        model.layers[0].quantize(mode)
        model.layers[0].enable_lora(2)
        return model

    return make


class SummedLoss(layers.Layer):
    """Adds a loss that belongs to no row."""

    def call(self, x):
        self.add_loss(ops.sum(x * x))
        return x


class ReadsLosses(layers.Layer):
    """Reads in its call the losses that a layer within it has added."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4, activity_regularizer=lambda x: ops.mean(x * x))

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) * (1 + sum(self.inner.losses))


class KeepsMasked(keras.Model):
    """Uses a tensor with a mask, which its call has kept, in its loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.pool = layers.Embedding(5, 4, mask_zero=True), layers.GlobalAveragePooling1D()
        self.last = layers.Dense(1)

    def call(self, x):
        self.kept = self.embed(x)
        return self.last(self.pool(self.kept))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) + ops.mean(self.pool(self.kept) ** 2)


class EncoderDecoder(keras.Model):
    """Gives a model the masked output of another one."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Embedding(5, 4, mask_zero=True), layers.Dense(3)])
        self.decoder = keras.Sequential([layers.GlobalAveragePooling1D(), layers.Dense(1)])
        self.encoder.build((None, 5))
        self.decoder.build((None, 5, 3))
        self.decoder.supports_masking = True

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        count = len(self.encoder.trainable_variables)

        def loss_of(trainable):
            hidden, _ = self.encoder.stateless_call(trainable[:count], [], x)
            found, _ = self.decoder.stateless_call(trainable[count:], [], hidden)
            return ops.mean((y - found) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, others, optimizer, metrics)


class ReadsOutputsInOrder(keras.Model):
    """Its loss reads a dict in the order in which the call wrote it, and a number of Python."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_variance = layers.Dense(1), layers.Dense(1)

    def call(self, x):
        return {"mean": self.mean(x), "log_variance": self.log_variance(x), "count": 2}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean, log_variance, count = y_pred.values()
        for _ in range(count):
            mean = ops.tanh(mean)
        return ops.mean(log_variance + ops.square(y - mean) * ops.exp(-log_variance))


class Counting(layers.BatchNormalization):
    """Counts rows besides, in training, in a variable without an aggregation."""

    def build(self, shape):
        super().build(shape)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def call(self, x, training=None, mask=None):
        if training:
            self.rows.assign(self.rows + ops.sum(ops.cast(x[:, 0] > 0, "float32")))
        return super().call(x, training=False)


class OwnCall(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return super().call(x, training=training, mask=mask)


class KeepsStatistics(layers.Layer):
    """Keeps a copy of the moving mean of its normalization."""

    def __init__(self):
        super().__init__()
        self.normalization = layers.BatchNormalization()

    def build(self, shape):
        self.normalization.build(shape)
        self.copy = self.add_weight(shape=(shape[-1],), trainable=False, name="copy")

    def call(self, x, training=False):
        found = self.normalization(x, training=training)
        if training:
            self.copy.assign(self.normalization.moving_mean)
        return found


class QuantizesVectors(layers.Layer):
    """Moves the entries of a codebook, which is a frozen embedding or a weight that was frozen later, to the means of their rows."""

    def __init__(self, is_embedding):
        super().__init__()
        self.codebook = layers.Embedding(5, 4, "random_normal", trainable=False) if is_embedding else None

    def build(self, shape):
        if self.codebook:
            self.codebook.build(None)
        else:
            self.codes = self.add_weight(shape=(5, 4), initializer="random_normal")
            self.codes.trainable = False

    def call(self, x, training=False):
        variable = self.codebook.embeddings if self.codebook else self.codes
        codes = ops.convert_to_tensor(variable)
        chosen = ops.one_hot(ops.argmin(ops.sum((x[:, None] - codes) ** 2, -1), 1), 5)
        if training:
            rows = ops.sum(chosen, 0)[:, None]
            means = ops.matmul(ops.transpose(chosen), x) / ops.maximum(rows, 1)
            variable.assign(ops.where(rows > 0, (codes + means) / 2, codes))
        return x + ops.stop_gradient(ops.matmul(chosen, codes) - x)


class RandomDepth(keras.Model):
    """Draws which layer a batch goes through, and logs the number of that layer."""

    def __init__(self, how):
        super().__init__()
        self.how, self.seed = how, keras.random.SeedGenerator(5)
        self.short, self.long = layers.Dense(1), layers.Dense(1)

    def build(self, shape):
        self.short.build(shape)
        self.long.build(shape)

    def call(self, x):
        is_short = keras.random.uniform((), seed=self.seed) < 0.5
        if self.how == "cond":
            return ops.cond(is_short, lambda: (self.short(x), ops.array(3)), lambda: (self.long(x), ops.array(9)))
        last = ops.where(is_short, 3, 9)
        return self.short(x), ops.while_loop(lambda n: n < last, lambda n: (n + 1,), (ops.array(0),))[0]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y_pred[0] - y) ** 2)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"depth": y_pred[1]}


class NoisyMask(layers.Layer):
    """Draws a mask of its inputs' columns and keeps it in a variable."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.mask = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False, name="mask")

    def call(self, x, training=False):
        if training:
            self.mask.assign(ops.cast(keras.random.uniform((x.shape[-1],), seed=self.seed) > 0.5, "float32"))
        return x * self.mask


def sequential(layer):
    return lambda: keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layer(), layers.Dense(1)])


class Function(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


@jax.custom_vjp
def centred_in_training(x):
    return x


centred_in_training.defvjp(lambda x: (x - x.mean(0), None), lambda _, gradient: (gradient,))


def by_rows(x):
    return ops.map(lambda row: ops.cumsum(row) * 0.1 + ops.flip(row, 0), x)


CASES = {
    "a number of rows in an attribute": (KeepsRows, X),
    "a number of rows in a layer that is never built": (KeepsRowsInAHelper, X),
    "a count of calls in an attribute": (CountsCalls, X),
    "a kept tensor with a mask": (KeepsMasked, TOKENS),
    "a masked input of a model": (EncoderDecoder, TOKENS),
    "a dict of outputs that is read in order": (ReadsOutputsInOrder, X),
    "a subclass of BatchNormalization": (sequential(Counting), X),
    "a frozen embedding that a layer changes": (sequential(lambda: QuantizesVectors(True)), X),
    "a weight that was frozen later": (sequential(lambda: QuantizesVectors(False)), X),
    "a reshape in Fortran's order": (sequential(lambda: Function(lambda x: x.ravel(order="F").reshape(x.shape))), X),
    "a forward pass that is another one in training": (sequential(lambda: Function(centred_in_training)), X),
    "layers that are built in a step": (Augmented, X),
    "whole numbers without rows": (sequential(WholeNumbers), X),
    "a running mean without a gradient": (sequential(RunningMean), X),
    "random numbers of Python": (sequential(DrawsInPython), X),
    "int8 weights": (quantised("int8"), X),
    "int4 weights": (quantised("int4"), X),
    "losses that a layer reads": (sequential(ReadsLosses), X),
    "a map over the rows": (sequential(lambda: Function(by_rows)), X),
}


def trained(make, data, scope, rows=ROWS, **options):
    keras.utils.set_random_seed(0)
    with scope:
        model = make()
        has_own_loss = isinstance(model, (EncoderDecoder, ReadsOutputsInOrder))
        model.compile(keras.optimizers.SGD(0.05), None if has_own_loss else "mse", **options)
    losses = model.fit(data[:rows], Y[:rows], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    predicted = [] if has_own_loss else [model.predict(data[:rows], batch_size=BATCH, verbose=0)]
    return [*model.get_weights(), losses, *predicted]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "rows"), [(2, ROWS), (3, ROWS - 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", CASES)
def test_what_a_call_leaves_is_that_of_one_device(name, replicas, rows):
    make, data = CASES[name]
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=replicas)
    expected = trained(make, data, contextlib.nullcontext(), rows)
    for found, one in zip(trained(make, data, strategy.scope(), rows), expected, strict=True):
        np.testing.assert_allclose(found, one, rtol=2e-5, atol=1e-6)


class CountsRows(layers.Layer):
    def call(self, x):
        self.rows = x.shape[0]
        return x


def test_an_attribute_that_has_the_number_of_rows_is_named(caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        trained(sequential(CountsRows), X, lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope(), BATCH)
    assert "layer 'counts_rows' keeps another number in its attribute 'rows' for 8 rows than for 4." in caplog.text


KEPT_BETWEEN_CALLS = {
    "a count of calls": CountsCalls,
    "arrays in attributes": sequential(KeepsAverage),
    "random numbers of Python": sequential(DrawsInPython),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "eager") for name in KEPT_BETWEEN_CALLS]
    + [(name, "deterministic") for name in KEPT_BETWEEN_CALLS if name != "arrays in attributes"],
)
def test_each_replica_starts_with_what_the_call_before_has_left(name, way, caplog):
    make, options = KEPT_BETWEEN_CALLS[name], {"run_eagerly": way == "eager"}
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3, deterministic=way == "deterministic")
    expected = trained(make, X, contextlib.nullcontext(), ROWS - 3, **options)
    with caplog.at_level("INFO", logger="lockstep"):
        found = trained(make, X, strategy.scope(), ROWS - 3, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert "global batch" not in caplog.text


@pytest.mark.parametrize("how", ["cond", "while"])
def test_a_number_that_a_draw_chooses_is_that_of_one_device(how):
    def depths(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = RandomDepth(how)
            model.build((None, 6))
            model.compile("sgd")
        options = {"batch_size": ROWS, "verbose": 0, "shuffle": False}
        return model.fit(X[:ROWS], Y[:ROWS], epochs=5, **options).history["depth"]

    expected = depths(contextlib.nullcontext())
    assert set(expected) == {3, 9}
    assert depths(lockstep.MirroredStrategy(replicas=2).scope()) == expected


@pytest.mark.slow
def test_statistics_that_a_user_s_layer_keeps_are_those_of_all_replicas():
    def statistics(layer):
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy(replicas=2).scope():
            model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(data, Y[:ROWS], batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(variable) for variable in layer.non_trainable_variables]

    data = X[:ROWS] + np.linspace(0, 5, ROWS)[:, None]  # The replicas have different statistics.
    mean, variance = statistics(layers.BatchNormalization())
    np.testing.assert_allclose(statistics(OwnCall()), [mean, variance], rtol=1e-6)
    kept = KeepsStatistics()
    copy, *_ = statistics(kept)
    np.testing.assert_allclose(copy, kept.normalization.moving_mean, rtol=1e-6)


SPLIT = [
    "a map over the rows",
    "a count of calls in an attribute",
    "layers that are built in a step",
    "whole numbers without rows",
    "a running mean without a gradient",
    "random numbers of Python",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8 weights", "int4 weights")),
]


@pytest.mark.parametrize("name", SPLIT)
def test_what_depends_on_no_other_row_is_split(name, caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        trained(CASES[name][0], X, lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope())
    assert "global batch" not in caplog.text


class CallsWith(keras.Model):
    """Its train step calls it with arguments of its own; each replica normalizes its own rows."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments, self.dense = arguments, layers.Dense(1)
        self.normalize = layers.BatchNormalization()

    def call(self, time, x=None, training=False):
        time, x = (0.0, time) if x is None else (time, x)
        return self.dense(self.normalize(x, training=training)) + time

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data[:2]

        def loss(trainable):
            args, kwargs = self.arguments(x)
            found, changed = self.stateless_call(trainable, non_trainable, *args, training=True, **kwargs)
            return ops.mean(ops.square(found - y)), changed

        (value, non_trainable), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, non_trainable, optimizer, metrics)


ARGUMENTS = {
    "the first": lambda x: ((x,), {}),
    "after a number": lambda x: ((ops.zeros(()), x), {}),
    "after an array without rows": lambda x: ((ops.zeros((1,)), x), {}),
    "by keyword": lambda x: ((), {"time": 0.0, "x": x}),
}


@pytest.mark.slow
def test_rows_are_found_in_any_argument():
    first, *others = (
        trained(
            lambda arguments=arguments: CallsWith(arguments),
            X,
            lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope(),
        )
        for arguments in ARGUMENTS.values()
    )
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


class ReturnsWholeNumbers(layers.Layer):
    def call(self, x):
        large = ops.convert_to_tensor([-(2**31), -1, 2**24 + 1, 2**31 - 1], "int32")
        return x, large, ops.cast(large, "uint32"), ops.cast(large, "int8"), large > 0


@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_whole_numbers_without_rows_are_exact(replicas, caplog):
    def made():
        inputs = keras.Input((6,))
        return keras.Model(inputs, ReturnsWholeNumbers()(inputs))

    expected = made().predict(X[:7], verbose=0)
    with caplog.at_level("INFO", logger="lockstep"), lockstep.MirroredStrategy(replicas=replicas).scope():
        found = made().predict(X[:7], verbose=0)
    assert "global batch" not in caplog.text
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_predict_ignores_losses_and_is_split(caplog):
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = sequential(SummedLoss)()
    with caplog.at_level("INFO", logger="lockstep"):
        model.predict(X, verbose=0)
    assert "global batch" not in caplog.text


def test_noise_in_a_variable_without_an_aggregation_is_that_of_one_device():
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3).scope():
        model = sequential(NoisyMask)()
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert set(np.unique(model.layers[1].mask)) <= {0.0, 1.0}


class KeepsFlag(layers.Layer):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def build(self, shape):
        options = {"dtype": "bool", "initializer": "zeros", "trainable": False, "aggregation": "sum"}
        self.flag = self.add_weight(shape=(), **options)

    def call(self, x):
        self.flag.assign(self.of(self.flag, x))
        return x


@pytest.mark.parametrize(
    ("of", "is_split"), [(lambda flag, x: ~flag.value, True), (lambda flag, x: ops.any(x > 2), False)]
)
def test_bools_to_be_summed_are_those_of_one_device(of, is_split, caplog):
    x = np.arange(4.0)[:, None]  # of which the second replica alone has more than 2
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((1,)), KeepsFlag(of), layers.Dense(1)])
        model.compile("sgd", "mse")
    with caplog.at_level("INFO", logger="lockstep"):
        model.fit(x, x, shuffle=False, verbose=0)
    assert model.layers[0].flag.numpy()
    assert ("is bool, which has no sum over the replicas" in caplog.text) != is_split
