"""Cases of the differential suite: small models that together use the features of Keras.

Each runs on plain Keras and under strategies; what must agree is in ``compare.py``. Models are tiny, and rows (23, in
batches of 8, 8 and 7, predicted by 9) leave a remainder for every number of replicas.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, ops, optimizers

from .compare import RELATIVE

ROWS = 23


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its data, and arguments of fit; ``reason`` explains a comparison that differs from the usual one."""

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator], dict[str, Any]]
    fit: dict[str, Any] = field(default_factory=dict)
    relative: float = RELATIVE
    reason: str = ""
    plain: Callable[[], keras.Model] | None = None  # where plain Keras must build it another way
    fit_only: bool = False

    def __str__(self) -> str:
        return self.name


# --- data ----------------------------------------------------------------------------------------------------------


def classes(rng, rows=ROWS, weights=False):
    data = {"x": rng.normal(size=(rows, 6)).astype("float32"), "y": rng.integers(0, 3, rows)}
    return data | ({"sample_weight": rng.uniform(0, 2, rows).astype("float32")} if weights else {})


def regression(rng, width=2):
    return {"x": rng.normal(size=(ROWS, 6)).astype("float32"), "y": rng.normal(size=(ROWS, width)).astype("float32")}


def binary(rng):
    return {"x": rng.normal(size=(ROWS, 6)).astype("float32"), "y": rng.integers(0, 2, (ROWS, 1)).astype("float32")}


def tokens(rng):
    x = rng.integers(1, 20, (ROWS, 7))
    for row, length in enumerate(rng.integers(0, 8, ROWS)):
        x[row, length:] = 0  # Padding, masked by the model; some rows are all padding.
    return {"x": x, "y": rng.integers(0, 3, ROWS)}


def tagged(rng):
    data = tokens(rng)
    return {"x": data["x"], "y": rng.integers(0, 3, data["x"].shape)}


def pictures(rng):
    return {"x": rng.normal(size=(ROWS, 8, 8, 3)).astype("float32"), "y": rng.integers(0, 3, ROWS)}


def series(rng):
    return {"x": rng.normal(size=(ROWS, 6, 4)).astype("float32"), "y": rng.integers(0, 3, ROWS)}


# --- models --------------------------------------------------------------------------------------------------------

logits_loss = losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, optimizer="sgd", loss=logits_loss, measure=("accuracy",), **options):
    optimizer = optimizers.SGD(0.1) if optimizer == "sgd" else optimizer
    model.compile(optimizer=optimizer, loss=loss, metrics=list(measure) or None, **options)
    return model


def mlp(*hidden, outputs=3, activation=None, **options):
    hidden = hidden or (layers.Dense(8, activation="tanh"),)
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(outputs, activation=activation)])
    return compiled(model, **options)


def stack(shape, *inner, dtype="float32", **options):
    return compiled(keras.Sequential([keras.Input(shape, dtype=dtype), *inner, layers.Dense(3)]), **options)


def with_loss(loss, data=regression, outputs=2, activation=None, measure=("mae",)):
    return lambda: mlp(outputs=outputs, activation=activation, loss=loss(), measure=measure), data


def with_optimizer(make):
    return lambda: mlp(optimizer=make()), classes


def batch_mean(y_true, y_pred):
    """A custom loss that is already averaged, and so cannot be split by rows."""
    return ops.mean(ops.square(y_true - y_pred))


def correlation(y_true, y_pred):
    """A loss of the whole batch that is no sum over rows."""
    a, b = y_true - ops.mean(y_true, axis=0), y_pred - ops.mean(y_pred, axis=0)
    return 1 - ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-3)


class Largest(metrics.Metric):
    """A stateful metric that is no sum."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(ops.cast(y_pred, "float32")))))

    def result(self):
        return ops.convert_to_tensor(self.value)


class Penalty(layers.Layer):
    """Adds a loss that is averaged over the rows, and one that is a constant."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.add_loss(ops.convert_to_tensor(0.5))
        return x


class Counter(layers.Layer):
    """Non-trainable variables with each aggregation."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="rows")
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean", name="level")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.level.assign(ops.mean(x))
        return x


class Tally(layers.Layer):
    """Scales its output by sums over the rows, kept in variables without an aggregation."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="rows")
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")

    def call(self, x):
        scale = 1 + ops.tanh(self.total) / ops.cast(1 + self.rows, "float32")
        self.rows.assign_add(ops.shape(x)[0])
        self.total.assign_add(ops.sum(x))
        return x * scale


class GradientOfUnitNorm(layers.Layer):
    """Normalizes its gradient to norm one over all rows."""

    def call(self, x):
        @ops.custom_gradient
        def same(value):
            return value, lambda upstream: upstream / (1e-3 + ops.norm(upstream))

        return same(x)


class FirstSteps(layers.Layer):
    """Returns one mask for all rows."""

    supports_masking = True

    def call(self, x, mask=None):
        return x

    def compute_mask(self, x, mask=None):
        return ops.arange(x.shape[1])[None] < 3


class Scales(layers.Layer):
    """A regularizer and an added loss that are vectors, with as many entries as a replica may have rows."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones", regularizer=lambda w: 0.1 * w**2, name="scale")

    def call(self, x):
        self.add_loss(0.1 * ops.square(self.scale))
        return x[:, :4] * self.scale


class WithTable(keras.Model):
    """Returns rows, a table that has none, and a number."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2)
        self.table = self.add_weight(shape=(4, 2), initializer="glorot_uniform", name="table")

    def call(self, x):
        return self.out(x), self.table + 0.0, ops.mean(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        out, table, number = y_pred
        return ops.mean(ops.square(out - y)) + ops.sum(ops.square(table)) + number**2

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self.get_metrics_result()


class Towers(keras.Model):
    """Scores each row against each other row of the batch, which needs the whole batch."""

    def __init__(self):
        super().__init__()
        self.query, self.key = layers.Dense(4), layers.Dense(4)

    def call(self, x):
        return ops.matmul(self.query(x), ops.transpose(self.key(x)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = ops.arange(y_pred.shape[0])
        return ops.mean(losses.sparse_categorical_crossentropy(own, y_pred, from_logits=True))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self.get_metrics_result()


class Recommender(keras.Model):
    """The product of two embeddings, summed over their width and, by mistake, over the rows, which shapes do not show."""

    def __init__(self):
        super().__init__()
        self.users, self.films = layers.Embedding(40, 8), layers.Embedding(40, 8)
        self.bias = layers.Embedding(40, 1)

    def call(self, x):
        return ops.tensordot(self.users(x[:, 0]), self.films(x[:, 1]), 2) + self.bias(x[:, 0])


class Centred(layers.Layer):
    """Subtracts the mean of its batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class Summed(layers.Layer):
    """Adds a loss that grows with the batch size."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Views(keras.Model):
    """Returns two views of each row: all first views, then all second views, twice as many as there are rows."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x):
        return self.out(ops.concatenate([x, 0.5 * x + 0.1]))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        one, other = ops.split(y_pred, 2)
        return ops.mean(ops.square(one - 2 * other + 1))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self.get_metrics_result()


class WithPositions(keras.Model):
    """A custom step that passes a table as long as some batches."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x, positions=None):
        return self.out(x) if positions is None else self.out(x) + ops.sum(positions[:7], axis=0)[:3]

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metric_values = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        positions = ops.reshape(ops.arange(8 * 3, dtype="float32"), (8, 3)) / 24

        def loss(trainable):
            logits, _ = self.stateless_call(trainable, non_trainable, x, positions=positions)
            return ops.mean(losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, non_trainable, optimizer, metric_values)


def folded_rows():
    """Returns rows times time steps on the first axis."""
    x = keras.Input((6, 4))
    model = keras.Model(x, layers.Lambda(lambda value: ops.reshape(value, (-1, 3)))(layers.Dense(3)(x)))
    model.compile(optimizers.SGD(0.1), loss=lambda y, p: ops.mean(ops.square(ops.reshape(y, (-1, 3)) - p)))
    return model


def squeezed():
    """Drops the axis of rows if there is one row."""
    x = keras.Input((6,))
    model = keras.Model(x, layers.Lambda(ops.squeeze, output_shape=())(layers.Dense(1)(x)))
    model.compile(optimizers.SGD(0.1), loss=lambda y, p: ops.mean(ops.square(y[:, 0] - p)))
    return model


def fixed_batch():
    """A model that only works for batches of 8."""
    x = keras.Input(batch_shape=(8, 6))
    y = layers.Lambda(lambda value: ops.reshape(value, (8, 2, 3)))(layers.Dense(6)(x))
    return compiled(keras.Model(x, layers.Dense(3)(layers.Flatten()(y))))


def float8():
    model = mlp(layers.Dense(16), layers.Dense(16))
    for layer in model.layers:
        layer.quantize("float8")
    return compiled(model)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(3)

    def call(self, x, training=False):
        return self.out(self.hidden(x))


class Insists(Subclassed):
    """Only accepts batches of 8, and raises a custom exception otherwise."""

    def call(self, x):
        assert x.shape[0] == 8
        return super().call(x)


class OwnStep(Subclassed):
    """The train step of Keras's guide "Customizing what happens in fit() with JAX"."""

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metric_values = state
        x, y = data[:2]
        step = jax.value_and_grad(self.compute_own_loss, has_aux=True)
        (loss, (y_pred, non_trainable)), gradients = step(trainable, non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        new, logs = [], {}
        for metric in self.metrics:
            own = metric_values[len(new) : len(new) + len(metric.variables)]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
            else:
                own = metric.stateless_update_state(own, y, y_pred)
            result = metric.stateless_result(own)
            logs |= result if isinstance(result, dict) else {metric.name: result}
            new += own
        return logs, (trainable, non_trainable, optimizer, new)

    def compute_own_loss(self, trainable, non_trainable, x, y):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        per_row = ops.mean(ops.square(ops.one_hot(y, 3) - y_pred), axis=-1)
        return ops.mean(per_row), (y_pred, non_trainable)


class Adversaries(keras.Model):
    """A generator and a discriminator that the train step calls separately, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.built = True

    def call(self, x):
        return self.discriminator(self.generator(x))

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metric_values = state
        x = data[0]
        count = len(self.generator.trainable_variables)

        def judged(of_discriminator, images):
            return self.discriminator.stateless_call(of_discriminator, [], images, training=True)[0]

        def losses_of(trainable):
            made, _ = self.generator.stateless_call(trainable[:count], [], x[:, ::-1], training=True)
            frozen = [jax.lax.stop_gradient(value) for value in trainable[count:]]
            both = judged(trainable[count:], ops.concatenate([x, jax.lax.stop_gradient(made)]))
            labels = ops.concatenate([ops.ones((len(x), 1)), ops.zeros((len(x), 1))])
            of_discriminator = ops.mean(ops.binary_crossentropy(labels, both, from_logits=True))
            of_generator = ops.mean(ops.softplus(-judged(frozen, made)))
            return of_discriminator + of_generator, (of_discriminator, of_generator)

        (_, found), gradients = jax.value_and_grad(losses_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs = dict(zip(("discriminator", "generator"), found, strict=True))
        return logs, (trainable, non_trainable, optimizer, metric_values)


class Contrasted(Adversaries):
    """Two views of each row through one encoder, whose loss compares all rows, as in SimCLR."""

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metric_values = state
        x, count = data[0], len(self.generator.trainable_variables)

        def loss_of(trainable):
            one, other = (
                ops.normalize(self.generator.stateless_call(trainable[:count], [], view, training=True)[0])
                for view in (x, 0.5 * x[:, ::-1])
            )
            likeness = ops.matmul(one, ops.transpose(other)) / 0.1
            return ops.mean(ops.sparse_categorical_crossentropy(ops.arange(len(x)), likeness, from_logits=True))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"contrast": loss}, (trainable, non_trainable, optimizer, metric_values)


class KeepsHidden(Subclassed):
    """Stores results in attributes, directly and in a list, and its loss reads them there."""

    def call(self, x):
        self.last = self.hidden(x)
        self.averages = [ops.mean(self.last), (ops.mean(ops.square(self.last), axis=0),)]
        return self.out(self.last)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own, (columns,) = self.averages
        return ops.mean(ops.square(ops.one_hot(y, 3) - y_pred)) + own + ops.sum(columns) + ops.max(self.last)


class WeightOfTheLoss(Subclassed):
    """Its calls use no trainable weight: no result of their backward pass depends on a value."""

    def __init__(self):
        super().__init__()
        self.hidden.trainable = self.out.trainable = False
        self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.one_hot(y, 3) - self.scale * y_pred))


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.one_hot(y, 3) - y_pred)) + 0.1 * ops.mean(ops.abs(x))


def two_in_two_out():
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([a, b]))
    model = keras.Model(
        {"a": a, "b": b}, {"p": layers.Dense(3, name="p")(hidden), "q": layers.Dense(2, name="q")(hidden)}
    )
    model.compile(
        optimizers.SGD(0.1),
        loss={"p": logits_loss, "q": "mse"},
        loss_weights={"p": 1.0, "q": 0.3},
        metrics={"p": ["accuracy"], "q": ["mae"]},
    )
    return model


def two_in_two_out_data(rng):
    x = {"a": rng.normal(size=(ROWS, 6)).astype("float32"), "b": rng.normal(size=(ROWS, 4)).astype("float32")}
    return {"x": x, "y": {"p": rng.integers(0, 3, ROWS), "q": rng.normal(size=(ROWS, 2)).astype("float32")}}


def tuples():
    a, b = keras.Input((6,)), keras.Input((4,))
    model = keras.Model((a, b), (layers.Dense(3)(a), layers.Dense(2)(b)))
    model.compile(optimizers.SGD(0.1), loss=[logits_loss, "mse"], metrics=[["accuracy"], ["mae"]])
    return model


def tuples_data(rng):
    data = two_in_two_out_data(rng)
    return {"x": tuple(data["x"].values()), "y": tuple(data["y"].values())}


def hidden_too():
    """Two losses, one of which is on the input of the other output."""
    x = keras.Input((6,))
    hidden = layers.Dense(4)(x)
    model = keras.Model(x, (layers.Dense(2)(hidden), hidden))
    model.compile(optimizers.SGD(0.1), ["mse", "mse"])
    return model


def hidden_too_data(rng):
    data = regression(rng)
    return data | {"y": (data["y"], rng.normal(size=(ROWS, 4)).astype("float32"))}


def frozen():
    model = mlp(layers.Dense(8, activation="tanh"), layers.Dense(8, activation="tanh"))
    model.layers[0].trainable = False
    return compiled(model)


def autoencoder():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh"), layers.Dense(6)])
    return compiled(model, loss="mse", measure=("mae",))


def autoencoder_data(rng):
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    return {"x": x, "y": x}


def normalized(**options):
    return lambda: mlp(layers.Dense(8), layers.BatchNormalization(**options), layers.Activation("tanh"))


def attention():
    x = keras.Input((6, 4))
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))
    return compiled(keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y))))


def masked_tagger(loss=logits_loss):
    def build():
        inner = layers.Embedding(20, 4, mask_zero=True), layers.LSTM(5, return_sequences=True)
        return stack((7,), *inner, dtype="int32", loss=loss)

    return build


def mixed_precision():
    hidden = layers.Dense(8, activation="tanh", dtype="mixed_float16")
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=3)
    return mlp(hidden, optimizer=scaled)


MIXED = "its outputs cannot be evaluated or predicted row by row"
OWN = "its train step says what it is for, and nothing else"
AVERAGES = "plain Keras frees the averages in the first evaluate after fit"

CASES = [
    Case("mse", *with_loss(lambda: "mse")),
    Case("mae", *with_loss(lambda: "mae")),
    Case("huber", *with_loss(losses.Huber)),
    Case("log_cosh", *with_loss(losses.LogCosh)),
    Case("cosine_similarity", *with_loss(losses.CosineSimilarity)),
    Case(
        "binary_crossentropy",
        lambda: mlp(outputs=1, activation="sigmoid", loss="binary_crossentropy", measure=("accuracy", metrics.AUC())),
        binary,
    ),
    Case("focal", *with_loss(losses.BinaryFocalCrossentropy, binary, 1, "sigmoid", ("accuracy",))),
    Case("reduction_sum", *with_loss(lambda: losses.MeanSquaredError(reduction="sum"))),
    Case("reduction_mean", *with_loss(lambda: losses.MeanSquaredError(reduction="mean"))),
    Case(
        "reduction_mean_with_sample_weight",
        lambda: mlp(loss=losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight")),
        lambda rng: classes(rng, weights=True),
    ),
    Case("loss_that_averages_by_itself", *with_loss(lambda: batch_mean)),
    Case("loss_of_the_whole_batch", *with_loss(lambda: correlation)),
    Case("class_weight", mlp, classes, {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    Case(
        "sample_weight_and_weighted_metrics",
        lambda: mlp(weighted_metrics=["accuracy", "sparse_categorical_crossentropy"]),
        lambda rng: classes(rng, weights=True),
    ),
    Case("l2_and_l1", lambda: mlp(layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1")), classes),
    Case("activity_regularizer", lambda: mlp(layers.Dense(8, activity_regularizer="l2")), classes),
    Case("add_loss", lambda: mlp(layers.Dense(8), Penalty()), classes),
    Case("sgd_nesterov", *with_optimizer(lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True))),
    Case("adam", *with_optimizer(lambda: optimizers.Adam(0.01))),
    Case("adam_amsgrad", *with_optimizer(lambda: optimizers.Adam(0.01, amsgrad=True))),
    Case("adamw", *with_optimizer(lambda: optimizers.AdamW(0.01, weight_decay=0.1))),
    Case("nadam", *with_optimizer(lambda: optimizers.Nadam(0.01))),
    Case("rmsprop", *with_optimizer(lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True))),
    Case("adagrad", *with_optimizer(lambda: optimizers.Adagrad(0.05))),
    Case("lamb", *with_optimizer(lambda: optimizers.Lamb(0.01))),
    Case("lion", *with_optimizer(lambda: optimizers.Lion(0.001))),
    Case("muon", *with_optimizer(lambda: optimizers.Muon(0.01))),
    Case("ftrl", *with_optimizer(lambda: optimizers.Ftrl(0.05))),
    Case(
        "schedule",
        *with_optimizer(lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True))),
    ),
    Case("clipnorm", *with_optimizer(lambda: optimizers.SGD(0.1, clipnorm=0.05))),
    Case("global_clipnorm", *with_optimizer(lambda: optimizers.SGD(0.1, global_clipnorm=0.05))),
    Case("clipvalue", *with_optimizer(lambda: optimizers.SGD(0.1, clipvalue=0.02))),
    Case("gradient_accumulation", *with_optimizer(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2))),
    Case(
        "ema",
        *with_optimizer(lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)),
        fit_only=True,
        reason=AVERAGES,
    ),
    Case(
        "ema_overwrite",
        *with_optimizer(lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)),
    ),
    Case(
        "loss_scale",
        *with_optimizer(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), dynamic_growth_steps=3)),
    ),
    Case("mixed_float16", mixed_precision, classes, relative=5e-3, reason="half precision has 11 bits"),
    Case(
        "metrics_of_classes",
        lambda: mlp(
            activation="softmax",
            loss="categorical_crossentropy",
            measure=(
                metrics.AUC(),
                metrics.TopKCategoricalAccuracy(2),
                metrics.F1Score(average="macro"),
                metrics.Precision(),
                metrics.Recall(),
                metrics.OneHotMeanIoU(3),
                Largest(),
                batch_mean,
            ),
        ),
        lambda rng: (data := classes(rng)) | {"y": np.eye(3, dtype="float32")[data["y"]]},
    ),
    Case(
        "metrics_of_numbers",
        lambda: mlp(
            outputs=2,
            loss="mse",
            measure=(metrics.R2Score(), metrics.RootMeanSquaredError(), metrics.CosineSimilarity(), correlation),
        ),
        regression,
    ),
    Case("batch_normalization_synchronized", normalized(synchronized=True), classes, plain=normalized()),
    Case("group_normalization", lambda: mlp(layers.Dense(8), layers.GroupNormalization(2)), classes),
    Case("layer_normalization", lambda: mlp(layers.Dense(8), layers.LayerNormalization()), classes),
    Case(
        "lstm_masked",
        lambda: stack((7,), layers.Embedding(20, 4, mask_zero=True), layers.LSTM(5), dtype="int32"),
        tokens,
    ),
    Case(
        "gru_bidirectional_masked",
        lambda: stack(
            (7,), layers.Embedding(20, 4, mask_zero=True), layers.Bidirectional(layers.GRU(4)), dtype="int32"
        ),
        tokens,
    ),
    Case("loss_masked", masked_tagger(), tagged),
    Case(
        "loss_masked_sum",
        masked_tagger(losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")),
        tagged,
        relative=3e-5,
        reason="the summed loss is two orders larger than a mean, and so are its steps",
    ),
    Case(
        "loss_masked_alike_for_all_rows",
        lambda: stack((6, 4), layers.Dense(5), FirstSteps()),
        lambda rng: series(rng) | {"y": rng.integers(0, 3, (ROWS, 6))},
    ),
    Case("simple_rnn", lambda: stack((6, 4), layers.SimpleRNN(5)), series),
    Case(
        "embedding_conv1d",
        lambda: stack((7,), layers.Embedding(20, 4), layers.Conv1D(5, 3), layers.GlobalMaxPooling1D(), dtype="int32"),
        tokens,
    ),
    Case("conv2d", lambda: stack((8, 8, 3), layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.Flatten()), pictures),
    Case(
        "depthwise",
        lambda: stack((8, 8, 3), layers.DepthwiseConv2D(3), layers.SeparableConv2D(4, 3), layers.Flatten()),
        pictures,
    ),
    Case("attention", attention, series),
    Case("variables_of_every_aggregation", lambda: mlp(layers.Dense(8), Counter()), classes),
    Case("vectors_that_are_no_rows", lambda: mlp(Scales()), classes),
    Case(
        "outputs_with_and_without_rows",
        lambda: compiled(WithTable(), measure=()),
        regression,
        fit_only=True,
        reason=MIXED,
    ),
    Case(
        "rows_multiplied_and_summed",
        lambda: compiled(Recommender(), loss="mse", measure=()),
        lambda rng: {"x": rng.integers(0, 40, (ROWS, 2)), "y": rng.normal(size=(ROWS, 1)).astype("float32")},
    ),
    Case("centred_on_the_batch", lambda: mlp(layers.Dense(8), Centred()), classes),
    Case("loss_summed_over_the_batch", lambda: mlp(layers.Dense(8), Summed()), classes),
    Case("sums_in_variables_without_aggregation", lambda: mlp(layers.Dense(8), Tally()), classes),
    Case("gradient_normed_over_the_batch", lambda: mlp(layers.Dense(8), GradientOfUnitNorm()), classes),
    Case("towers_over_the_batch", lambda: compiled(Towers(), measure=()), classes, fit_only=True, reason=MIXED),
    Case("two_views_of_each_row", lambda: compiled(Views(), measure=()), classes, fit_only=True, reason=MIXED),
    Case(
        "table_as_long_as_the_batch",
        lambda: compiled(WithPositions(), measure=()),
        classes,
        fit_only=True,
        reason=MIXED,
    ),
    Case(
        "rows_folded_with_time",
        folded_rows,
        lambda rng: series(rng) | {"y": rng.normal(size=(ROWS, 6, 3))},
        fit_only=True,
        reason=MIXED,
    ),
    Case("squeezed", squeezed, binary),
    Case(
        "batch_of_fixed_size",
        fixed_batch,
        lambda rng: classes(rng, rows=16),
        fit_only=True,
        reason="takes batches of 8 alone",
    ),
    Case(
        "batch_of_asserted_size",
        lambda: compiled(Insists()),
        lambda rng: classes(rng, rows=16),
        fit_only=True,
        reason="takes batches of 8 alone",
    ),
    Case("float8", float8, classes),
    Case("dicts", two_in_two_out, two_in_two_out_data),
    Case("tuples", tuples, tuples_data),
    Case("hidden_too", hidden_too, hidden_too_data),
    Case("autoencoder", autoencoder, autoencoder_data),
    Case("subclassed_and_built_by_fit", lambda: compiled(Subclassed()), classes),
    Case("own_train_step", lambda: compiled(OwnStep()), classes),
    Case("adversaries", lambda: compiled(Adversaries(), measure=()), classes, fit_only=True, reason=OWN),
    Case("contrasted", lambda: compiled(Contrasted(), measure=()), classes, fit_only=True, reason=OWN),
    Case("own_compute_loss", lambda: compiled(OwnLoss()), classes),
    Case("loss_of_what_the_call_has_kept", lambda: compiled(KeepsHidden()), classes),
    Case("frozen_and_recompiled", frozen, classes),
    Case("steps_per_execution", lambda: mlp(steps_per_execution=2), classes),
    Case("run_eagerly", lambda: mlp(run_eagerly=True), classes),
    Case("not_compiled", lambda: mlp(jit_compile=False), classes),
    Case("validation_split", mlp, classes, {"validation_split": 0.3}),
    Case("one_row", mlp, lambda rng: classes(rng, rows=1)),
    Case("last_batch_of_one", mlp, lambda rng: classes(rng, rows=9)),
    Case("weight_of_the_loss", lambda: compiled(WeightOfTheLoss()), classes),
]


def with_topologies(in_the_suite: tuple[str, ...], topology_of: Callable[[int], Any]) -> Iterator[Any]:
    """Yield each case with the topology of its number, as parameters of a test: those in the suite are slow, all others nightly."""
    assert set(in_the_suite) <= {case.name for case in CASES}
    for number, case in enumerate(CASES):
        topology = topology_of(number)
        marks = [pytest.mark.slow if case.name in in_the_suite else pytest.mark.nightly]
        yield pytest.param(case, topology, id=f"{case}-{topology}", marks=[*marks, pytest.mark.xdist_group(case.name)])


def case_named(name: str) -> Case:
    """Return one of the cases."""
    return next(case for case in CASES if case.name == name)
