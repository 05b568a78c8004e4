"""Law 1 with variables on servers: ``fit`` gives what Keras gives on one device."""

import jax
import keras
import numpy as np
import pytest

from lockstep import ModelError
from lockstep.parameters.client import Part
from lockstep.parameters.partitioners import FixedShardsPartitioner
from lockstep.parameters.step import RemoteStep, specs_of
from tests.parameters.jobs import Servers

X = np.random.default_rng(0).normal(size=(70, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class OwnStep(keras.Sequential):
    """A train_step as users write it."""

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable, other):
            predicted, other = self.stateless_call(trainable, other, x, training=True)
            return 3 * keras.ops.mean((predicted - y) ** 2), other

        (loss, other), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, other)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, other, optimizer, metrics)


class NoStep(keras.Sequential):
    def train_step(self, state, data):
        return {}, state


def made(kind=keras.Sequential, optimizer=lambda: keras.optimizers.Adam(0.01)):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="relu", name="one"), keras.layers.BatchNormalization(name="two")]
    model = kind([keras.Input((6,)), *layers, keras.layers.Dense(1, name="three")], name="net")
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def values_of(model):
    return {variable.path: variable.numpy() for variable in model.trainable_variables}


def fit_on(client, model):
    """``fit`` with the remote step as its train function."""
    step = RemoteStep(model, client)
    model.make_train_function = lambda force=False: None
    model.train_function = lambda state, iterator: step(state, next(iterator))
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    step.wait()
    return history


@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(2)])
def test_one_worker_trains_as_one_device_does(kind, partitioner):
    plain, model = made(kind), made(kind)
    expected = plain.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    with Servers(
        2, specs=specs_of(model), partitioner=partitioner, optimizer=lambda: keras.optimizers.Adam(0.01)
    ) as servers:
        client = servers.client(0)
        client.fill(values_of(model))
        history = fit_on(client, model)
        found = client.pull()
        assert int(model.optimizer.iterations.numpy()) == 10
        for name, value in values_of(plain).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)  # Ten steps of float32.
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)
        for one, other in zip(model.non_trainable_variables, plain.non_trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_batch_on_several_workers_train_as_the_batch_on_one_device(parts):
    def linear():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "tanh", name="one"), keras.layers.Dense(1, name="two")]
        model = keras.Sequential([keras.Input((6,)), *layers], name="net")
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    plain, model = linear(), linear()
    plain.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    with Servers(2, specs=specs_of(model), optimizer=lambda: keras.optimizers.Adam(0.01), max_staleness=0) as servers:
        clients = [servers.client(index) for index in range(parts)]
        clients[0].fill(values_of(model))
        steps = [RemoteStep(model, client) for client in clients]
        kinds = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        state = tuple([variable.value for variable in kind] for kind in kinds)
        for number, begin in enumerate(range(0, 70, 16)):
            rows = np.array_split(np.arange(begin, min(begin + 16, 70)), parts)
            for index in np.random.default_rng(number).permutation(parts):  # Whoever is first.
                part = Part(number, int(index), parts)
                mine = rows[index]
                _, state = steps[index](state, (X[mine], Y[mine]), weight=len(mine), part=part)
                steps[index].wait()
        found = clients[0].pull(at_least=5)
        assert clients[0].versions == [5, 5]
        for name, value in values_of(plain).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)  # Five steps of float32.


def test_a_train_step_that_applies_no_optimizer_is_refused_and_the_optimizer_stays_whole():
    model = made(NoStep)
    with Servers(1, specs=specs_of(model)) as servers:
        client = servers.client(0)
        client.fill(values_of(model))
        with pytest.raises(ModelError, match=r"NoStep.train_step called optimizer.stateless_apply 0 times"):
            fit_on(client, model)
        assert "stateless_apply" not in vars(model.optimizer)
