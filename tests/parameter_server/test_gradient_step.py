"""A worker's step gives the gradients that plain Keras would apply, and with servers ``fit`` is that of one device."""

import functools
import json

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep import ModelError
from lockstep._keras import trainer
from lockstep._keras.trainer import variables_of
from lockstep.parameter_server.gradient_step import GradientStep, iterations_of, names_of, specs_of
from lockstep.parameter_server.sharding import FixedShardsPartitioner
from lockstep.parameter_server.variable_client import BatchPart
from tests.parameter_server.own_step import OwnStep
from tests.parameter_server.threaded_servers import Servers

pytestmark = pytest.mark.xdist_group(__name__)  # They share steps.
X = np.random.default_rng(0).normal(size=(70, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BATCHES = [(X[at : at + 16], Y[at : at + 16]) for at in range(0, 70, 16)]


class NestedLogs(OwnStep):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {"nested": logs}, state


class NoStep(keras.Sequential):
    def train_step(self, state, data):
        return {}, state


class TwoSteps(OwnStep):
    def train_step(self, state, data):
        return super().train_step(super().train_step(state, data)[1], data)


def made(kind=keras.Sequential, optimizer=lambda: keras.optimizers.Adam(0.01), normalized=True):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh", name="one")]
    layers += [keras.layers.BatchNormalization(name="two")] if normalized else []
    model = kind([keras.Input((6,)), *layers, keras.layers.Dense(1, name="three")], name="net")
    model.compile(optimizer(), "mse", metrics=["mae"])
    trainer.training_state(model, BATCHES[0])  # Makes all variables.
    return model


@functools.cache
def step_of(kind=keras.Sequential, replicas=1, devices=1, **options):
    """A model under a strategy, and its step on these devices, once for each; a step changes nothing, as a test says."""
    strategy = lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=replicas)
    with strategy.scope():
        model = made(kind, **options)
        model.make_train_function()
    return model, GradientStep(model, strategy._functions_of(model), strategy._placement)


def state_of(model):
    return [[np.array(variable.value) for variable in group] for group in variables_of(model)]


def values_of(model):
    return dict(zip(names_of(model), state_of(model)[0], strict=True))


def assert_close(found, expected, **options):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one, other, **({"rtol": 1e-5, "atol": 1e-6} | options)
        )  # float32, compiled two ways.


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (3, 2)])
def test_gradients_are_those_of_the_plain_loss(replicas, devices):
    model, step = step_of(replicas=replicas, devices=devices, normalized=False)
    found = step(values_of(model), *state_of(model)[1::2], BATCHES[0], 0)
    plain = made(normalized=False)

    def loss_of(trainable):
        predicted, _ = plain.stateless_call(trainable, [], BATCHES[0][0], training=True)
        return jax.numpy.mean((predicted - BATCHES[0][1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)([variable.value for variable in plain.trainable_variables])
    assert list(found.gradients) == ["net/one/kernel", "net/one/bias", "net/three/kernel", "net/three/bias"]
    assert_close(found.gradients.values(), gradients)
    np.testing.assert_allclose(found.logs["loss"], loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
def test_all_that_a_step_gives_is_what_the_step_of_keras_gives_and_nothing_changes(kind):
    model, step = step_of(kind)
    before = state_of(model)
    found = step(values_of(model), before[1], before[3], BATCHES[0], 0)
    plain = made(kind)
    logs, (trainable, others, _, metrics) = jax.jit(plain.train_step)(tuple(state_of(plain)), BATCHES[0])
    optimizer = [variable.value for variable in plain.optimizer.variables]
    applied, _ = plain.optimizer.stateless_apply(optimizer, list(found.gradients.values()), state_of(plain)[0])
    assert_close(applied, trainable, atol=1e-5)
    assert_close(found.non_trainable, others)
    assert_close(found.metrics, metrics)
    assert found.logs.keys() == logs.keys()
    assert_close(found.logs.values(), logs.values())
    for group, unchanged in zip(state_of(model), before, strict=True):
        assert_close(group, unchanged, rtol=0, atol=0)


def test_logs_that_no_metric_gives_differ_from_what_is_measured():
    for kind, own in ((keras.Sequential, set()), (OwnStep, {"loss", "step", "rate"})):
        model, step = step_of(kind)
        found = step(values_of(model), *state_of(model)[1::2], BATCHES[0], 0)
        assert {name for name, value in found.logs.items() if found.metric_logs.get(name) != value} == own
        assert all(isinstance(value, (int, float)) for value in found.logs.values())


def test_a_gradient_step_gives_nested_logs_as_json():
    model, step = step_of(NestedLogs)
    found = step(values_of(model), *state_of(model)[1::2], BATCHES[0], 7)
    assert json.loads(json.dumps(found.logs))["nested"]["step"] == 7


def test_a_step_sees_how_many_updates_were_made():
    model, step = step_of(OwnStep)
    for version in (0, 7, 1000):
        found = step(values_of(model), *state_of(model)[1::2], BATCHES[0], version)
        assert found.logs["step"] == version


def test_a_step_sees_the_learning_rate_of_the_chief():
    model, step = step_of(OwnStep)
    number = [one is model.optimizer._learning_rate for one in model.optimizer.variables].index(True)
    for rate in (0.5, 0.001, 0.01):
        step.set_optimizer({str(number): rate})
        found = step(values_of(model), *state_of(model)[1::2], BATCHES[0], 3)
        assert (found.logs["rate"], found.logs["step"]) == (np.float32(rate), 3)


@pytest.mark.parametrize(("kind", "times"), [(NoStep, 0), (TwoSteps, 2)])
def test_a_train_step_that_does_not_apply_its_optimizer_once_is_refused_and_the_optimizer_stays_whole(kind, times):
    model, step = step_of(kind)
    with pytest.raises(ModelError, match=rf"{kind.__name__}.train_step calls optimizer.stateless_apply {times} times"):
        step(values_of(model), *state_of(model)[1::2], BATCHES[0], 0)
    assert "stateless_apply" not in vars(model.optimizer)


class Twins(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.parts = [keras.layers.Dense(2, name="same", use_bias=number < 2) for number in range(3)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_variables_of_one_path_have_unique_names():
    model = Twins()
    model(np.zeros((1, 2), "float32"))
    assert len({variable.path for variable in model.trainable_variables}) == 2
    kernel, bias = "net/same/kernel", "net/same/bias"
    assert names_of(model) == [kernel, bias, f"{kernel}#2", f"{bias}#2", f"{kernel}#3"]
    assert [(spec.name, spec.shape, spec.dtype) for spec in specs_of(model)[1:3]] == [
        (bias, (2,), "float32"),
        (f"{kernel}#2", (2, 2), "float32"),
    ]


# --- with servers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "partitioner"), [(keras.Sequential, FixedShardsPartitioner(2)), (OwnStep, None)])
def test_one_worker_trains_as_one_device_does(kind, partitioner):
    plain = made(kind)
    plain.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    model, step = step_of(kind)
    _, others, _, metrics = state_of(model)
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    with Servers(2, specs=specs_of(model), partitioner=partitioner, optimizer=adam) as servers:
        client = servers.client(0)
        client.fill(values_of(model))
        for batch in BATCHES * 2:
            found = step(client.pull(), others, metrics, batch, max(client.versions))
            others = found.non_trainable
            client.push(found.gradients)
        assert_close(client.pull().values(), values_of(plain).values())  # Ten steps of float32.
        assert_close(others, state_of(plain)[1])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [3])
def test_parts_of_a_batch_on_several_workers_train_as_the_batch_on_one_device(parts):
    plain = made(normalized=False)
    plain.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    model, step = step_of(normalized=False)
    _, others, _, metrics = state_of(model)
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    with Servers(2, specs=specs_of(model), optimizer=adam, max_staleness=0) as servers:
        clients = [servers.client(index) for index in range(parts)]
        clients[0].fill(values_of(model))
        for number, (x, y) in enumerate(BATCHES):
            rows = np.array_split(np.arange(len(x)), parts)
            for index in np.random.default_rng(number).permutation(parts):  # Whoever is first.
                mine = rows[index]
                part = BatchPart(number, int(index), parts)
                values = clients[index].pull(part=part, will_push=False)
                found = step(values, others, metrics, (x[mine], y[mine]), number)
                clients[index].push(found.gradients, weight=len(mine), part=part)
        assert_close(clients[0].pull().values(), values_of(plain).values())  # Five steps of float32.


def test_accumulated_gradients_have_no_number_of_iterations_also_while_fit_has_taken_the_values_out():
    model = made(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    for variable in model.optimizer.variables:
        variable._value = None
    assert iterations_of(model) is None
