"""A batch in parts is the batch, where its loss is a mean over rows; every other loss is refused."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep import ModelError
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import PlacedRows
from lockstep.parameter_server.gradient_step import (
    check_can_split,
    compare_losses_of_parts,
    count_batch_rows,
    nonempty_parts,
    part_of,
)
from tests.parameter_server.own_step import OwnStep

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(7, 3)).astype("float32")
Y = RANDOM.normal(size=(7, 1)).astype("float32")
WEIGHTS = RANDOM.uniform(0.1, 5, size=7).astype("float32")
WORDS = np.array([[1, 0, 0], [2, 3, 1], [3, 0, 0], [1, 1, 1], [2, 0, 0], [3, 2, 0], [0, 0, 3]])


class AddsLoss(layers.Layer):
    def __init__(self, of, **options):
        super().__init__(**options)
        self.of = of

    def call(self, x):
        self.add_loss(self.of(x))
        return x


class NoLoss(keras.Sequential):
    """Its steps say nothing of a loss."""

    def test_step(self, state, data):
        return {"mae": ops.zeros(())}, state


def compares_rows(true, predicted):
    return ops.mean((predicted - ops.mean(predicted)) ** 2, axis=-1)


def dense(*more, kind=keras.Sequential, **options):
    return kind([keras.Input((3,)), *more, layers.Dense(1, **options)], name="net")


def words():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(4, 2, mask_zero=True), layers.Dense(1)], name="net"
    )


MEANS = {
    "mse": (dense, "mse", (X, Y)),
    "weights of rows": (dense, "mse", (X, Y, WEIGHTS)),
    "regularizers": (lambda: dense(kernel_regularizer="l2", activity_regularizer=None), "mse", (X, Y)),
    "a loss of a layer that is a mean": (lambda: dense(AddsLoss(lambda x: ops.mean(x**2))), "mse", (X, Y)),
    "another reduction that is a mean": (dense, keras.losses.MeanSquaredError("mean"), (X, Y)),
    "classes": (lambda: dense(), keras.losses.BinaryCrossentropy(from_logits=True), (X, (Y > 0).astype("float32"))),
    "no loss that is known": (lambda: dense(kind=NoLoss), "mse", (X, Y)),
}
OTHERS = {
    "a mask": (words, "mse", (WORDS, RANDOM.normal(size=(7, 3, 1)).astype("float32"))),
    "a sum": (dense, keras.losses.MeanSquaredError("sum"), (X, Y)),
    "rows that are compared": (dense, compares_rows, (X, Y)),
    "a mean by weights": (dense, keras.losses.MeanSquaredError("mean_with_sample_weight"), (X, Y, WEIGHTS)),
    "a loss of a layer that is a sum": (lambda: dense(AddsLoss(lambda x: ops.sum(x**2))), "mse", (X, Y)),
}


def checked(make, loss, batch, parts):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    before = [np.array(variable.value) for variable in model.variables]
    reason = compare_losses_of_parts(model, batch, parts)
    assert all((one == other.value).all() for one, other in zip(before, model.variables, strict=True))
    return reason


@pytest.mark.parametrize(("make", "loss", "batch"), MEANS.values(), ids=MEANS)
def test_a_mean_over_rows_is_taken(make, loss, batch):
    assert not checked(make, loss, batch, 3)


class OwnLoss(keras.Sequential):
    """Keras's guide to custom steps: the test_step that it inherits calls its method with other arguments."""

    def compute_loss_and_updates(self, trainable, non_trainable, x, y, training=False):
        pass


class Samples(layers.Layer):
    """Draws in evaluation, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seeds)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: dense(kind=OwnLoss), "its test_step fails: TypeError"),
        (lambda: dense(Samples()), "draws random numbers"),
    ],
)
def test_losses_that_cannot_be_compared_are_told_and_not_refused(make, reason):
    assert reason in checked(make, "mse", (X, Y), 3)


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_it_is_one_on_any_number_of_parts(parts):
    checked(*MEANS["weights of rows"], parts)


@pytest.mark.parametrize(("make", "loss", "batch"), OTHERS.values(), ids=OTHERS)
def test_everything_else_is_refused_with_both_losses(make, loss, batch):
    with pytest.raises(
        ModelError,
        match=r"Model 'net': the loss of a batch is [\d.e-]+, and the mean of the losses of its 2 parts, by rows, [\d.e-]+\. .*"
        "no mask, no reduction='sum', no loss that compares rows",
    ):
        checked(make, loss, batch, 2)


def test_weights_are_refused_also_if_losses_cannot_be_compared():
    with pytest.raises(ModelError, match="divided by its weights"):
        checked(lambda: dense(Samples()), keras.losses.MeanSquaredError("mean_with_sample_weight"), (X, Y, WEIGHTS), 3)


# Of these batches the mean of the parts is that of the batch, of later ones it is not.
FIRST = {
    "the unmasked entries of its outputs": (words, "mse", (np.maximum(WORDS, 1), OTHERS["a mask"][2][1])),
    "its weights": (*OTHERS["a mean by weights"][:2], (X, Y, np.ones_like(WEIGHTS))),
}


@pytest.mark.parametrize(
    ("make", "loss", "batch", "divisor"), [(*case, name) for name, case in FIRST.items()], ids=FIRST
)
def test_a_loss_that_is_a_mean_for_the_first_batch_only_is_refused(make, loss, batch, divisor):
    with pytest.raises(ModelError, match=f"Model 'net': the loss of a batch is divided by {divisor}.*no mask"):
        checked(make, loss, batch, 2)


def test_a_batch_that_stays_whole_may_have_any_loss():
    checked(*OTHERS["rows that are compared"], parts=1)


class Counter(layers.Layer):
    """Adds something to a variable that has no aggregation."""

    def __init__(self, of, dtype="float32", **options):
        super().__init__(**options)
        self.of, self.kind = of, dtype

    def build(self, shape):
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total", dtype=self.kind)

    def call(self, x):
        self.total.assign(self.total + self.of(x))
        return x


class Centers(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


class HasPart(OwnStep):
    """Its step calls the model by way of a model within it."""

    def stateless_call(self, *arguments, **options):
        return self.layers[0].stateless_call(*arguments, **options)


class HasFactor(OwnStep):
    """Its step gives it an array of one number before the rows."""

    def train_step(self, state, data):
        return super().train_step(state, ((ops.ones((1,)), data[0]), data[1]))

    def call(self, x, **options):
        return super().call(x[1] if isinstance(x, tuple) else x, **options)


def normalized(**options):
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        return dense(layers.BatchNormalization(name="norm", **options))


def with_part(*more):
    return HasPart([keras.Input((3,)), dense(*more)], name="net")


def stateful():
    return keras.Sequential([keras.Input((3, 1), batch_size=7), layers.GRU(2, stateful=True, name="gru")], name="net")


SPLIT = {
    "no state": dense,
    "an embedding and a mask": words,
    "statistics and noise": lambda: dense(layers.BatchNormalization(), layers.Dropout(0.5)),
    "a count of steps": lambda: dense(Counter(lambda x: 1)),
    "a mean": lambda: dense(Counter(lambda x: ops.mean(x))),
    "a step of its own": lambda: dense(kind=OwnStep),
    "a model within it": with_part,
}
WHOLE = {
    "synchronized": (lambda: normalized(synchronized=True), r"layer 'norm' normalizes over all replicas"),
    "stateful": (stateful, r"layer 'gru' keeps a state for each row"),
    "a sum": (lambda: dense(Counter(lambda x: ops.sum(x))), "variable '.*/total' has no aggregation"),
    "a count of rows": (lambda: dense(Counter(lambda x: ops.shape(x)[0], "int32")), "has no aggregation"),
    "rows that are compared": (lambda: dense(Centers()), "it mixes the rows of its batch"),
    "a step of its own": (lambda: dense(Centers(), kind=OwnStep), "it mixes the rows of its batch"),
    "a model within it": (lambda: with_part(Centers()), "it mixes the rows of its batch"),
    "an array before the rows": (lambda: dense(Centers(), kind=HasFactor), "it mixes the rows of its batch"),
}


def check_split(make):
    model = make()
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    before = [np.array(variable.value) for variable in model.variables]
    x = np.ones((7, *model.input_shape[1:]), model.inputs[0].dtype)
    check_can_split(model, (x, np.ones((7, *model.output_shape[1:]), "float32")), 2)
    assert all((one == other.value).all() for one, other in zip(before, model.variables, strict=True))


@pytest.mark.parametrize("make", SPLIT.values(), ids=SPLIT)
def test_a_model_that_replicas_run_on_their_rows_is_taken(make):
    check_split(make)


@pytest.mark.parametrize(("make", "reason"), WHOLE.values(), ids=WHOLE)
def test_a_model_that_must_see_all_rows_at_once_is_refused_with_the_reason(make, reason):
    with pytest.raises(ModelError, match=rf"Model 'net' .*max_staleness=0.*{reason}.* Fix: use MultiWorkerMirrored"):
        check_split(make)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("parts", range(1, 6))
def test_parts_are_the_rows_of_replicas_in_their_order(rows, parts):
    batch = ({"a": np.arange(rows), "b": np.arange(rows) * 2.0}, np.arange(rows)[:, None])
    busy = nonempty_parts(rows, parts)
    found = [part_of(batch, part, parts) for part in range(busy)]
    assert [count_batch_rows(one) for one in found] == list(BatchLayout(rows, parts, 1).busy_replicas)
    for one, whole in zip(zip(*map(keras.tree.flatten, found), strict=True), keras.tree.flatten(batch), strict=True):
        assert (np.concatenate(one) == whole).all()


def test_rows_are_counted_on_the_host_and_on_devices():
    placed = PlacedRows(
        jax.numpy.zeros((8, 3)), BatchLayout(7, 2, 2)
    )  # The devices have a place more than there are rows.
    assert count_batch_rows((X, Y)) == count_batch_rows((placed, placed)) == 7
    assert count_batch_rows(({"a": np.zeros((4, 2))},)) == 4
