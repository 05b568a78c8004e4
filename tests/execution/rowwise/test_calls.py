"""Number of calls of a model: one for each replica if the model depends on the replica, otherwise one for each device."""

import contextlib
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.execution import executors, spmd

ROWS = 12


class Own(layers.Layer):
    """Has a variable with an aggregation."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x):
        self.calls.assign_add(1)
        return x


class Mean(layers.Layer):
    """Has a variable without an aggregation."""

    def build(self, shape):
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.level.assign(ops.mean(x))
        return x


def calls(inner, method, replicas, devices, monkeypatch):
    """Return the number of rows of each call of a step, for all devices."""
    seen = []
    partition_calls = executors.SpmdExecutor.partition_calls

    def noted(executor, layout, split):
        seen.append(partition_calls(executor, layout, split))
        return seen[-1]

    monkeypatch.setattr(executors.SpmdExecutor, "partition_calls", noted)
    monkeypatch.setattr(executors, "usable_cores", lambda: 4)
    with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=replicas).scope():
        model = keras.Sequential([keras.Input((6, 2)), *inner, layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((ROWS, 6, 2), "float32"), np.ones((ROWS, 1), "float32")
    (model.predict_on_batch(x) if method == "predict" else getattr(model, f"{method}_on_batch")(x, y))
    (found,) = set(seen)
    return found


APART = [layers.BatchNormalization, lambda: layers.Dropout(0.1), Own]
ALIKE = [lambda: layers.Dense(2), layers.LayerNormalization, Mean, lambda: layers.ActivityRegularization(0.1)]


@pytest.mark.parametrize("make", APART)
def test_model_that_depends_on_replica_is_called_for_each_replica_in_training(make, monkeypatch):
    assert calls([make()], "train", 4, 1, monkeypatch) == ((3, 3, 3, 3),)


@pytest.mark.parametrize("make", ALIKE)
@pytest.mark.parametrize(("devices", "expected"), [(1, ((12,),)), (2, ((6,), (6,))), (3, ((3,), (3,), (6,)))])
def test_model_that_does_not_depend_on_replica_is_called_once_on_each_device(make, devices, expected, monkeypatch):
    assert calls([make()], "train", 4, devices, monkeypatch) == expected


@pytest.mark.parametrize("make", APART[:2])
@pytest.mark.parametrize("method", ["test", "predict"])
def test_model_that_depends_on_replica_in_training_only_is_called_once_on_each_device_in_evaluation(
    make, method, monkeypatch
):
    assert calls([make()], method, 4, 2, monkeypatch) == ((6,), (6,))


@pytest.mark.parametrize(
    ("replicas", "devices", "expected"),
    [(2, 1, ((6, 6),)), (6, 1, ((3, 3, 3, 3),)), (6, 2, ((3, 3), (3, 3))), (2, 2, ((6,), (6,)))],
)
def test_convolutions_on_cpus_have_as_many_calls_as_cores(replicas, devices, expected, monkeypatch):
    assert calls([layers.Conv1D(2, 3)], "train", replicas, devices, monkeypatch) == expected


def trained():
    keras.utils.set_random_seed(1)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=5).scope():
        inner = [layers.BatchNormalization(), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(3 * ROWS, 6)).astype("float32")
    model.fit(x, x[:, :1], batch_size=ROWS, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.slow
def test_large_model_compiles_equal_replicas_of_a_cpu_once_with_the_same_results(monkeypatch):
    are_one, run_replicas = [], spmd.run_replicas

    def noted(*args, vectorize, **kwargs):
        are_one.append(vectorize)
        return run_replicas(*args, vectorize=vectorize, **kwargs)

    monkeypatch.setattr(spmd, "run_replicas", noted)
    small = trained()
    assert set(are_one) == {False}
    are_one.clear()
    monkeypatch.setattr(spmd, "UNROLLED_OPERATIONS", 20)
    large = trained()
    assert set(are_one) == {True}
    for one, other in zip(small, large, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_warnings_appear_as_often_as_with_plain_keras(replicas):
    def warnings_of(scope):
        with scope:
            first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second")
            model = keras.Model({"first": first, "second": second}, layers.Dense(1)(first + second))
            model.compile("sgd", "mse")
        x = np.ones((8, 3), "float32")
        with warnings.catch_warnings(record=True, action="always") as found:
            model.fit([x, x], np.ones((8, 1)), batch_size=8, verbose=0)
        return [str(warning.message) for warning in found if "structure of `inputs`" in str(warning.message)]

    expected = warnings_of(contextlib.nullcontext())
    assert expected
    assert warnings_of(lockstep.MirroredStrategy(["cpu:0"], replicas=replicas).scope()) == expected


class WarnsWhereItIsTraced(layers.Layer):
    """Warns like JAX's functions that convert a tracer to a NumPy array."""

    def call(self, x):
        if isinstance(x, jax.core.Tracer):
            warnings.warn("it is traced", stacklevel=1)
        return x


@pytest.mark.slow
def test_tracing_an_eager_model_does_not_warn():
    """Warnings as errors, as in many test suites, must not make the model run on the global batch."""

    def trained(action):
        keras.utils.set_random_seed(2)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope(), warnings.catch_warnings(action="ignore"):
            inner = WarnsWhereItIsTraced(), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)
            model = keras.Sequential([keras.Input((3,)), *inner, layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        begun = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: warnings.simplefilter(action))
        with warnings.catch_warnings(action="ignore"):
            model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[begun])
        return model.get_weights()

    for found, expected in zip(trained("error"), trained("ignore"), strict=True):
        np.testing.assert_array_equal(found, expected)
