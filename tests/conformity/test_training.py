"""Behaviours of training that TensorFlow's tests hold for ``tf.distribute`` and that no other test here holds."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers, losses, metrics, ops, optimizers

import lockstep
from lockstep import get_replica_context
from lockstep.parameter_server.cluster_coordinator import PerWorkerDataset, resolve_per_worker
from lockstep.parameter_server.gradient_step import GradientStep

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype("float32")
Y = RNG.normal(size=(16, 4)).astype("float32")


def make(replicas=2, devices=2, **options):
    return lockstep.MirroredStrategy([f"cpu:{i}" for i in range(min(devices, replicas))], replicas=replicas, **options)


def mirrored(build, replicas=2, devices=2):
    keras.utils.set_random_seed(0)
    with make(replicas, devices).scope():
        return build()


def plain(build):
    keras.utils.set_random_seed(0)
    return build()


def assert_same(build, use, replicas=3, relative=1e-5):
    """What ``use`` gives of the model, under a strategy and on plain Keras; returns it."""
    found, expected = use(mirrored(build, replicas)), use(plain(build))
    ours, theirs = keras.tree.flatten(found), keras.tree.flatten(expected)
    assert ours
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=relative, atol=relative)
    return found


def stacked(shape, *inner, loss="mse", optimizer="sgd", measure=None, **options):
    model = keras.Sequential([keras.Input(shape), *inner])
    model.compile(optimizer, loss, metrics=measure, **options)
    return model


def dense(**options):
    return stacked((3,), layers.Dense(4), **options)


def one_batch(strategy, batch):
    (value,) = strategy.experimental_distribute_dataset([batch])
    return value


def values_of(variables):
    return [variable.value for variable in variables]


def generator(*arrays, rows):
    for start in range(0, len(arrays[0]), rows):
        yield tuple(array[start : start + rows] for array in arrays)


# --- losses and metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_a_weighted_loss_is_divided_by_the_number_of_rows(kind):
    model = mirrored(lambda: stacked((1,), layers.Dense(1, kernel_initializer="ones")), 3)
    x = np.arange(4.0)[:, None]
    y, weights = 2 * x + 2, np.array([0.25, 0.5, 0.75, 1])
    if kind == "arrays":
        weighted = model.evaluate(x, y, batch_size=2, sample_weight=weights, verbose=0)
    else:
        weighted = model.evaluate(generator(x, y, weights, rows=2), steps=2, verbose=0)
    assert weighted == pytest.approx(10.625)
    assert model.evaluate(x, y, batch_size=2, verbose=0) == pytest.approx(13.5)


class Shift(layers.Layer):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def build(self, shape):
        self.shift = self.add_weight(shape=(), initializer="ones", name="shift", **self.options)

    def call(self, x):
        return x + self.shift


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_regularization_loss_counts_once_for_any_number_of_replicas(replicas):
    def build():
        return stacked(
            (1,),
            Shift(regularizer=lambda value: value),
            loss=lambda y, predicted: ops.mean(predicted),
            optimizer=optimizers.SGD(1.0),
        )

    model = mirrored(build, replicas)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=2, verbose=0)
    assert float(model.get_weights()[0]) == -1.0


@pytest.mark.slow
def test_a_loss_of_the_layers_alone_needs_no_targets():
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(x))
            return x

    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(5, "relu"), Penalty(), layers.Dense(4, "softmax")])
        model.compile(optimizers.SGD(0.01))
        return model

    assert_same(build, lambda model: model.fit(X, batch_size=8, shuffle=False, verbose=0).history["loss"])


@pytest.mark.slow
def test_a_loss_of_a_weight_alone_counts_once():
    class Heavy(layers.Layer):
        def build(self, shape):
            self.dense = layers.Dense(4)
            self.dense.build(shape)

        def call(self, x):
            self.add_loss(100 * ops.mean(self.dense.kernel))
            return self.dense(x)

    def use(model):
        return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    assert_same(lambda: stacked((3,), Heavy()), use)


@pytest.mark.slow
def test_losses_of_a_model_that_is_called_three_times_add_up():
    class Compared(keras.Model):
        def __init__(self):
            super().__init__()
            self.base = keras.Sequential([keras.Input((3,)), layers.Dense(8, "relu"), layers.Dense(4)])

        def call(self, x):
            logits, zeros, ones = (self.base(each) for each in (x, ops.zeros_like(x), ops.ones_like(x)))
            self.add_loss(0.1 * ops.mean(ops.sum((logits - zeros) ** 2, axis=-1)))
            self.add_loss(0.01 * ops.mean(ops.sum(ops.abs(logits - ones), axis=-1)))
            return logits

    def build():
        model = Compared()
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=[metrics.SparseCategoricalCrossentropy(from_logits=True)])
        return model

    def use(model):
        return model.fit(X, np.arange(16) % 4, batch_size=8, shuffle=False, verbose=0).history

    found = assert_same(build, use)
    assert found["loss"][0] > found["sparse_categorical_crossentropy"][0]


def test_masked_steps_are_no_part_of_the_loss():
    def build():
        inner = layers.Masking(0.0), layers.TimeDistributed(layers.Dense(1, kernel_initializer="ones"))
        return stacked((2, 1), *inner)

    x = np.tile(np.array([1.0, 0.0])[:, None, None], (10, 2, 1))
    history = mirrored(build).fit(x, np.ones((20, 2, 1)), batch_size=10, verbose=0).history
    assert history["loss"] == [0.0]


@pytest.mark.parametrize("replicas", [2, 3])
def test_evaluate_averages_a_loss_without_reduction(replicas):
    """The field of Keras's losses that TensorFlow's own loops use; ``fit`` of Keras 3 on JAX takes no such loss."""

    def build():
        inner = layers.Dense(1, kernel_initializer="zeros", bias_initializer="ones")
        return stacked((3,), inner, loss=losses.MeanAbsoluteError(reduction="none"))

    found = mirrored(build, replicas).evaluate(np.ones((8, 3)), np.arange(8.0)[:, None], batch_size=4, verbose=0)
    assert found == pytest.approx(2.75)


def test_own_steps_log_the_sum_of_their_average_losses():
    class Own(keras.Model):
        def average(self, data):
            return {"mine": lockstep.compute_average_loss(data[1][:, 0], global_batch_size=4)}

        def train_step(self, state, data):
            return self.average(data), state

        def test_step(self, state, data):
            return self.average(data), state[:3]

    def build():
        x = keras.Input((3,))
        model = Own(x, layers.Dense(1)(x))
        model.compile("sgd")
        return model

    x, y = np.ones((8, 3)), np.arange(8.0)[:, None]
    model = mirrored(build)
    assert model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history == {"mine": [5.5]}  # That of the last batch.
    assert model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True) == {"mine": 5.5}


THRESHOLDS = {
    "classes": ([0, 1, 1, 1], [1, 0, 1, 1], [metrics.Precision, metrics.Recall], [2 / 3, 2 / 3]),
    "one threshold": (
        [0, 0, 0, 1, 1],
        [0, 0.3, 0.8, 0.3, 0.8],
        [
            lambda: metrics.SensitivityAtSpecificity(0.5),
            lambda: metrics.SpecificityAtSensitivity(0.5),
            lambda: metrics.PrecisionAtRecall(0.5),
        ],
        [0.5, 2 / 3, 0.5],
    ),
    "all thresholds": (
        [0, 0, 1, 1],
        [0, 0.5, 0.3, 0.9],
        [lambda: metrics.RecallAtPrecision(0.8), metrics.AUC],
        [0.5, 0.75],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THRESHOLDS)
def test_metrics_of_thresholds_count_all_rows(name):
    labels, scores, kinds, expected = THRESHOLDS[name]
    x, y = (np.asarray(each, "float32")[:, None] for each in (scores, labels))
    model = mirrored(lambda: stacked((1,), layers.Identity(), measure=[kind() for kind in kinds]))
    assert model.evaluate(x, y, batch_size=3, verbose=0)[1:] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["classes", "all thresholds"])
def test_metrics_of_a_loop_are_the_sums_of_their_replicas(name):
    labels, scores, kinds, expected = THRESHOLDS[name]
    strategy, kept = make(), kinds[-1]()
    values = values_of(kept.variables)
    batch = one_batch(strategy, (np.asarray(labels, "float32"), np.asarray(scores, "float32")))

    def step(y, scores):
        return get_replica_context().all_reduce("SUM", kept.stateless_update_state(values, y, scores))

    assert float(kept.stateless_result(strategy.run(step, batch))) == pytest.approx(expected[-1])


def test_a_metric_that_is_updated_in_a_scope_takes_each_value():
    strategy, before = make(), metrics.Mean()
    with strategy.scope():
        inside, outside = metrics.Mean(), metrics.Mean()
        for number in range(10):
            inside.update_state(number)
            before.update_state(number)
    assert float(inside.result()) == float(before.result()) == 4.5
    values = values_of(outside.variables)

    def step(x):
        own = outside.stateless_update_state([jnp.zeros(()) for _ in values], x)
        return get_replica_context().all_reduce("SUM", own)

    for batch in strategy.experimental_distribute_dataset([np.arange(2.0) + start for start in range(0, 10, 2)]):
        values = [old + new for old, new in zip(values, strategy.run(step, (batch,)), strict=True)]
    assert float(outside.stateless_result(values)) == 4.5


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 6])
def test_metrics_of_a_short_last_batch_are_those_of_all_rows(rows):
    model = mirrored(lambda: dense(measure=["mae", metrics.CategoricalAccuracy()]), 3)
    whole = model.evaluate(X[:10], Y[:10], batch_size=10, verbose=0)
    np.testing.assert_allclose(model.evaluate(X[:10], Y[:10], batch_size=rows, verbose=0), whole, rtol=1e-5)


# --- fit, evaluate, predict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "given", "steps"),
    [(64, {}, 2), (20, {}, 1), (64, {"batch_size": 16}, 4), (64, {"batch_size": 3, "steps_per_epoch": 5}, 5)],
)
def test_the_batch_size_is_that_of_all_replicas(rows, given, steps):
    model = mirrored(dense)
    model.fit(np.ones((rows, 3)), np.ones((rows, 4)), verbose=0, **given)
    assert int(model.optimizer.iterations) == steps


@pytest.mark.slow
def test_predict_gives_each_row_also_of_a_short_last_batch():
    def build():
        one, other = keras.Input((3,), name="one"), keras.Input((4,), name="other")
        return keras.Model({"one": one, "other": other}, [layers.Dense(7)(one), layers.Dense(2)(other)])

    model, given = mirrored(build, 3), {"one": X[:10], "other": Y[:10]}
    expected = plain(build).predict(given, verbose=0)
    for options in ({"batch_size": 4}, {"batch_size": 4, "steps": 3}, {}):
        found = model.predict(given, verbose=0, **options)
        assert isinstance(found, list)
        assert [each.shape for each in found] == [(10, 7), (10, 2)]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_without_a_gradient_stay_and_the_others_train():
    class Extra(layers.Dense):
        def build(self, shape):
            super().build(shape)
            self.extra = self.add_weight(shape=(), initializer="ones", name="extra")

    model = mirrored(lambda: stacked((3,), Extra(4), optimizer="adam"))
    before = model.get_weights()
    model.fit(X, Y, verbose=0)
    assert [np.array_equal(new, old) for new, old in zip(model.get_weights(), before, strict=True)] == [
        False,
        False,
        True,
    ]


@pytest.mark.slow
def test_validation_within_fit_is_evaluate_after_each_epoch():
    def build():
        return dense(measure=["mae", metrics.CategoricalAccuracy()])

    options = {"batch_size": 5, "shuffle": False, "verbose": 0}
    logs = mirrored(build).fit(X, Y, epochs=2, validation_data=(X, Y), validation_steps=2, **options).history
    other, found = mirrored(build), []
    for _ in range(2):
        other.fit(X, Y, **options)
        found.append(other.evaluate(X, Y, batch_size=5, steps=2, verbose=0))
    names = "val_loss", "val_mae", "val_categorical_accuracy"
    np.testing.assert_array_equal([logs[name] for name in names], np.transpose(found))


@pytest.mark.slow
def test_inputs_find_their_place_by_name():
    def build(kind):
        last, first = keras.Input((3,), name="z_last"), keras.Input((4,), name="a_first")
        out = layers.Dense(2)(layers.Add()([layers.Dense(5)(last), layers.Dense(5)(first)]))
        model = keras.Model({"z_last": last, "a_first": first} if kind is dict else [last, first], out)
        model.compile("sgd", "mse")
        return model

    found = []
    for kind in (dict, list):
        model = mirrored(functools.partial(build, kind))
        logs = model.fit({"z_last": X, "a_first": Y}, X[:, :2], batch_size=8, shuffle=False, verbose=0).history
        found.append(logs["loss"])
    assert found[0] == found[1]


METHODS = [
    f"on_{call}{batch}_{end}"
    for call in ("train", "test", "predict")
    for batch in ("", "_batch")
    for end in ("begin", "end")
]


class Calls(keras.callbacks.Callback):
    """Keeps the numbers with which each method was called."""

    def __init__(self):
        super().__init__()
        self.of = {}
        for name in [*METHODS, "on_epoch_begin", "on_epoch_end"]:
            setattr(self, name, lambda *given, name=name, **_: self.of.setdefault(name, []).append(given[:1]))

    def counts(self):
        found, self.of = {name.removeprefix("on_"): len(calls) for name, calls in self.of.items()}, {}
        return found


@pytest.mark.slow
def test_callbacks_hear_of_each_global_batch():
    model, calls = mirrored(dense, 3), Calls()
    x, y = np.ones((50, 3)), np.ones((50, 4))
    validation = {"validation_data": (x, y), "validation_steps": 3, "validation_batch_size": 5}
    model.fit(x, y, batch_size=5, epochs=2, steps_per_epoch=5, verbose=0, callbacks=[calls], **validation)
    ends = "begin", "end"
    assert calls.counts() == {
        **{f"train_{end}": 1 for end in ends},
        **{f"epoch_{end}": 2 for end in ends},
        **{f"train_batch_{end}": 10 for end in ends},
        **{f"test_{end}": 2 for end in ends},
        **{f"test_batch_{end}": 6 for end in ends},
    }
    model.evaluate(x, y, batch_size=5, steps=5, verbose=0, callbacks=[calls])
    assert calls.counts() == {f"test_{end}": 1 for end in ends} | {f"test_batch_{end}": 5 for end in ends}
    model.predict(x, batch_size=5, steps=5, verbose=0, callbacks=[calls])
    assert calls.counts() == {f"predict_{end}": 1 for end in ends} | {f"predict_batch_{end}": 5 for end in ends}


@pytest.mark.slow
@pytest.mark.parametrize("together", [20, 500])
def test_callbacks_hear_of_several_steps_a_call_as_on_plain_keras(together):
    x, y = np.ones((100, 3)), np.ones((100, 4))
    heard = []
    for model in (
        mirrored(lambda: dense(steps_per_execution=together)),
        plain(lambda: dense(steps_per_execution=together)),
    ):
        calls = Calls()
        for call, given in ((model.fit, (x, y)), (model.evaluate, (x, y)), (model.predict, (x,))):
            call(*given, batch_size=2, verbose=0, callbacks=[calls])
        heard.append({name: numbers for name, numbers in calls.of.items() if "batch" in name})
    assert heard[0] == heard[1]
    assert heard[0]["on_train_batch_begin"] == [(start,) for start in range(0, 50, together)]


class RateOfEachBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 if batch % 2 else 0.01


def test_a_rate_that_changes_with_each_batch_is_that_of_its_step():
    def use(model):
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[RateOfEachBatch()])
        return model.get_weights()

    assert_same(dense, use)


def test_options_that_a_generator_does_not_take_are_refused():
    model = mirrored(dense)
    for options in ({"validation_split": 0.5}, {"sample_weight": np.ones(10)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            model.fit(generator(X, Y, rows=5), verbose=0, **options)


@pytest.mark.slow
def test_dropout_is_of_training_alone():
    def build():
        inner = layers.Dense(1, kernel_initializer="ones"), layers.Dropout(0.9999)
        return stacked((1,), *inner, optimizer=optimizers.SGD(0.0), measure=["mae"])

    model = mirrored(build)
    ones = np.ones((16, 1))
    assert model.fit(ones, ones, batch_size=16, verbose=0).history["mae"] == pytest.approx([1.0], abs=0.1)
    np.testing.assert_array_equal(model.predict(ones, verbose=0), ones)


@pytest.mark.slow
def test_a_model_without_an_input_shape_is_built_by_fit():
    def build():
        model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    def use(model):
        return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]

    assert_same(build, use)


@pytest.mark.slow
def test_a_fixed_batch_size_need_not_be_divisible_by_the_replicas():
    def build():
        model = keras.Sequential([keras.Input((3,), batch_size=5), layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    def use(model):
        logs = model.fit(X[:10], Y[:10], batch_size=5, shuffle=False, verbose=0).history["loss"]
        return [logs, model.predict(X[:10], batch_size=5, verbose=0)]

    assert_same(build, use, replicas=2)


def test_metrics_and_optimizers_made_outside_of_the_scope_belong_to_the_model():
    strategy = make()
    optimizer, metric = optimizers.Adam(0.01), metrics.MeanAbsoluteError(name="mine")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
    model.compile(optimizer, "mse", metrics=[metric])
    assert int(model.optimizer.iterations) == 0
    logs = model.fit(X, Y, verbose=0).history
    assert logs["mine"][0] > 0
    variables = [*model.variables, *optimizer.variables, *metric.variables]
    assert {len(variable.value.sharding.device_set) for variable in variables} == {2}


# --- optimizers -------------------------------------------------------------------------------------------------------------


class Ones(optimizers.SGD):
    """Takes each gradient for 1."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([ops.ones_like(gradient) for gradient in grads], trainable_variables)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(lambda: optimizers.SGD(1.0, clipvalue=2.0), [3.0, -1.0]), (lambda: Ones(1.0), [0.0, 0.0])],
    ids=["clipped", "changed"],
)
def test_an_optimizer_sees_the_gradient_of_the_whole_batch(optimizer, expected, replicas):
    class Difference(layers.Layer):
        def build(self, shape):
            self.one = self.add_weight(shape=(), initializer="ones", name="one")
            self.other = self.add_weight(shape=(), initializer="ones", name="other")

        def call(self, x):
            return 0 * x + 3 * self.one - 3 * self.other

    model = mirrored(lambda: stacked((1,), Difference(), loss="mae", optimizer=optimizer()), replicas)
    model.fit(np.ones((10, 1)), np.ones((10, 1)), batch_size=10, verbose=0)
    assert model.get_weights() == expected


@pytest.mark.slow
def test_two_optimizers_train_two_parts_of_a_model():
    def build():
        wide, deep = optimizers.SGD(0.05), optimizers.Adagrad(0.1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(5, name="deep"), layers.Dense(4, name="wide")])
        both = optimizers.MultiOptimizer(lambda variable: wide if "wide" in variable.path else deep)
        model.compile(both, "mse")
        return model

    def use(model):
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same(build, use)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_sum_of_losses_grows_with_the_replicas_and_a_mean_does_not(replicas):
    strategy = make(replicas)
    x, y = np.array([[2.0], [7.0]], "float32"), np.array([[6.0], [21.0]], "float32")
    (batch,) = strategy.distribute_datasets_from_function(lambda context: [(x, y)] * replicas)

    def step(x, y, weight):
        each = jax.grad(lambda weight: ((x @ weight - y) ** 2).sum())(weight)
        mean = jax.grad(lambda weight: ((x @ weight - y) ** 2).mean() / replicas)(weight)
        return get_replica_context().all_reduce("SUM", (each, mean))

    each, mean = strategy.run(step, (*batch, jnp.full((1, 1), 2.0)))
    assert float(each[0, 0]) == pytest.approx(-106 * replicas)
    assert float(mean[0, 0]) == pytest.approx(-53)


def test_an_optimizer_without_variables_only_counts():
    optimizer = optimizers.SGD(0.1)
    optimizer.build([])
    state = values_of(optimizer.variables)
    values, new = make().run(lambda state: optimizer.stateless_apply(state, [], []), (state,))
    assert values == []
    assert len(new) == len(state)


# --- layers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renorm", [False, True])
def test_batch_normalization_centres_what_it_was_trained_on(renorm):
    def build():
        return stacked(
            (3, 4, 5), layers.BatchNormalization(momentum=0.8, renorm=renorm), optimizer=optimizers.SGD(0.01)
        )

    x = np.random.default_rng(0).normal(5, 10, (320, 3, 4, 5)).astype("float32")
    model = mirrored(build)
    model.fit(x, x, batch_size=32, epochs=3, verbose=0)
    gamma, beta = values_of(model.layers[0].trainable_variables)
    found = (model.predict(x, verbose=0) - np.asarray(beta)) / np.asarray(gamma)
    assert found.mean() == pytest.approx(0, abs=0.1)
    assert found.std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_moving_mean_takes_the_average_over_the_replicas(replicas):
    strategy, momentum = make(replicas), 0.9
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=momentum)])
    rows = np.arange(128, dtype="float32").reshape(16, 8)
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: rows + 100 * context.replica_id_in_sync_group
    )
    trainable, others = values_of(model.trainable_variables), values_of(model.non_trainable_variables)
    expected = np.zeros(8)
    for _ in range(3):
        others = strategy.run(
            lambda x, others: model.stateless_call(trainable, others, x, training=True)[1], (batch, others)
        )
        expected += (60 + np.arange(8) + (replicas - 1) / 2 * 100 - expected) * (1 - momentum)
        np.testing.assert_allclose(others[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_two_synchronized_normalizations_stand_side_by_side():
    def build(**options):
        x = keras.Input((4, 4, 2))
        y = layers.Conv2D(3, 2)(x)
        y = layers.Add()([layers.BatchNormalization(**options)(y), layers.BatchNormalization(**options)(y)])
        model = keras.Model(x, layers.Dense(3)(layers.Flatten()(y)))
        model.compile(optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = np.random.default_rng(0).normal(size=(16, 4, 4, 2)).astype("float32"), np.arange(16) % 3
    found = []
    for model in (mirrored(lambda: build(synchronized=True), 3), plain(build)):
        found.append(model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.slow
def test_two_texts_share_a_table_of_words():
    def build():
        table, ends = layers.Embedding(20, 6), []
        words = [keras.Input((5,), dtype="int32", name=name) for name in ("first", "other")]
        for each in words:
            ends.append(layers.GlobalAveragePooling1D()(table(each)))
        model = keras.Model(words, layers.Dot(axes=1, normalize=True)(ends))
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    words = np.random.default_rng(0).integers(1, 20, (2, 16, 5))
    x, y = {"first": words[0], "other": words[1]}, X[:, :1]

    def use(model):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same(build, use)


@pytest.mark.slow
def test_a_normalization_that_was_adapted_stays_what_it_is():
    x = np.random.default_rng(0).normal(3, 2, (16, 3)).astype("float32")

    def build():
        normalization = layers.Normalization()
        normalization.adapt(x)
        return stacked((3,), normalization, layers.Dense(4))

    def use(model):
        return model.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    assert_same(build, use)


@pytest.mark.slow
def test_each_weight_of_a_layer_in_half_precision_has_a_gradient():
    class Added(layers.Layer):
        def build(self, shape):
            self.one, self.other = (self.add_weight(shape=(), name=name) for name in ("one", "other"))

        def call(self, x):
            return self.other + (self.one + x)

    strategy = make()
    with strategy.scope():
        layer = Added(dtype="mixed_float16")
        layer.build((None, 1))

    def step(values):
        return jax.grad(lambda values: layer.stateless_call(values, [], jnp.ones(1))[0].sum().astype("float32"))(values)

    found = strategy.run(step, (values_of(layer.trainable_variables),))
    assert [float(strategy.reduce("MEAN", each, axis=None)) for each in found] == [1.0, 1.0]


# --- loops of one's own -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_replica_has_the_gradient_of_its_rows():
    strategy = make()
    with strategy.scope():
        layer = layers.Dense(4)
        layer.build((None, 3))

    def step(values, x, y):
        def loss(values):
            return losses.mean_squared_error(y, layer.stateless_call(values, [], x)[0]).sum()

        return jax.grad(loss)(values)

    values = values_of(layer.trainable_variables)
    found = strategy.run(step, (values, *one_batch(strategy, (X[:7], Y[:7]))))
    for ours, halves in zip(
        found, zip(step(values, X[:4], Y[:4]), step(values, X[4:7], Y[4:7]), strict=True), strict=True
    ):
        for own, expected in zip(strategy.experimental_local_results(ours), halves, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def by_python(step, weight, batches):
    for batch in batches:
        weight = step(weight, batch)
    return weight


def by_loop(step, weight, batches):
    return lax.fori_loop(0, len(batches), lambda _, weight: step(weight, batches[0]), weight)


def by_scan(step, weight, batches):
    return lax.scan(lambda weight, _: (step(weight, batches[0]), None), weight, length=len(batches))[0]


@pytest.mark.parametrize("loop", [by_python, by_loop, by_scan])
def test_several_steps_stand_in_one_compiled_function(loop):
    strategy = make()
    batches = list(strategy.experimental_distribute_dataset([np.ones((4, 2), "float32")] * 3))

    def step(weight, batch):
        def replica_step(rows, weight):
            return weight + get_replica_context().all_reduce("SUM", rows.sum() * weight)

        return strategy.run(replica_step, (batch, weight))

    assert float(jax.jit(lambda weight, batches: loop(step, weight, batches))(1.0, batches)) == 9.0**3


@pytest.mark.slow
def test_each_weight_of_a_recurrent_layer_has_a_gradient_in_a_loop():
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 1)), layers.LSTM(1)])
    x, y = RNG.uniform(size=(8, 5, 1)).astype("float32"), RNG.uniform(size=(8, 1)).astype("float32")
    others = values_of(model.non_trainable_variables)

    def step(values, x, y):
        def loss(values):
            return losses.mean_squared_error(y, model.stateless_call(values, others, x)[0]).mean()

        return get_replica_context().all_reduce("MEAN", jax.grad(loss)(values))

    values = values_of(model.trainable_variables)
    found = strategy.run(step, (values, *one_batch(strategy, (x, y))))
    for ours, theirs in zip(found, make(1).run(step, (values, x, y)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        assert np.abs(ours).max() > 0


# --- saving -----------------------------------------------------------------------------------------------------------------


STRATEGIES = {
    "none": contextlib.nullcontext,
    "mirrored": lambda: make().scope(),
    "more replicas": lambda: make(4, 3).scope(),
    "central": lambda: lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope(),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["none", "mirrored"])
def test_what_was_saved_loads_under_every_strategy(where, tmp_path):
    scope = STRATEGIES[where]()
    with scope:
        model = stacked((3,), layers.Dense(5), layers.BatchNormalization(), layers.Dense(4), optimizer="adam")
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "inside.keras")
    model.save(tmp_path / "outside.keras")
    expected = model.predict(X, verbose=0)
    for name, other in STRATEGIES.items():
        with other():
            loaded = keras.models.load_model(tmp_path / f"{'inside' if name == 'mirrored' else 'outside'}.keras")
        np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)
        assert int(loaded.optimizer.iterations) == 1


@pytest.mark.parametrize("in_scope", [True, False])
def test_weights_of_an_optimizer_load_in_and_out_of_the_scope(in_scope, tmp_path):
    trained = plain(lambda: dense(optimizer="adam"))
    trained.fit(X, Y, verbose=0)
    trained.save_weights(tmp_path / "m.weights.h5")
    strategy = make()
    with strategy.scope():
        model = dense(optimizer="adam")
    model.optimizer.build(model.trainable_variables)
    with strategy.scope() if in_scope else contextlib.nullcontext():
        model.load_weights(tmp_path / "m.weights.h5")
    for ours, theirs in zip(model.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)
    for each in (model, trained):
        each.fit(X, Y, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], trained.get_weights()[0], rtol=1e-5)


# --- variables on servers -----------------------------------------------------------------------------------------------------


def test_a_function_draws_from_several_data_sets_of_its_worker():
    own = iter(PerWorkerDataset(lambda: range(5))), {"other": iter(PerWorkerDataset(range(5, 10)))}
    for expected in (5, 7):  # The iterators of a worker go on from one function to the next.
        one, others = resolve_per_worker(own)
        assert next(one) + next(others["other"]) == expected
    assert next(resolve_per_worker(iter(PerWorkerDataset(range(5))))) == 0


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}], ids=str)
def test_run_eagerly_is_refused_with_servers(options):
    with pytest.raises(lockstep.ModelError, match="run_eagerly=True and jit_compile=False do not go with variables on"):
        GradientStep(plain(lambda: dense(**options)), None, None)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_replica_without_rows_has_a_gradient_of_zeros(is_compiled):
    strategy = make()

    def step(x, weight):
        return get_replica_context().all_reduce("SUM", jax.grad(lambda weight: (x @ weight).sum())(weight))

    def run(batch, weight):
        return strategy.run(step, (batch, weight))

    found = (jax.jit(run) if is_compiled else run)(one_batch(strategy, np.ones((1, 2), "float32")), jnp.ones((2, 2)))
    np.testing.assert_array_equal(found, np.ones((2, 2)))


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_what_fit_calls_is_as_on_one_device_inside_and_outside_of_the_scope(is_inside):
    strategy, seen = make(), set()

    class Noting(keras.Model):
        def call(self, x):
            replicas = lockstep.get_strategy().num_replicas_in_sync
            seen.add((lockstep.has_strategy(), replicas, lockstep.in_cross_replica_context()))
            return x

    with strategy.scope():
        model = Noting()
    model.compile("sgd", "mse")
    with strategy.scope() if is_inside else contextlib.nullcontext():
        model.evaluate(np.ones((8, 1)), np.ones((8, 1)), verbose=0)
    assert seen == {(False, 1, False)}


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_a_layer_may_add_over_the_replicas_in_and_out_of_the_scope(is_inside):
    class Centred(keras.Model):
        def call(self, x):
            return x - get_replica_context().all_reduce("MEAN", ops.mean(x, axis=0))

    strategy = make()
    with strategy.scope():
        model = Centred()
    model.compile("sgd", "mse")
    with strategy.scope() if is_inside else contextlib.nullcontext():
        model.evaluate(np.ones((4, 1)), np.ones((4, 1)), verbose=0)  # Keras builds it with what evaluate is given.
        found = model.predict(np.array([[0.0], [1.0], [2.0], [5.0]]), verbose=0)
    np.testing.assert_allclose(found.ravel(), [-2, -1, 0, 3])
