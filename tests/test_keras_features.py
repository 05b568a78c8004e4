"""What Keras does around the step works as ever: callbacks, printing, saving, loading, recompiling."""

import csv
import functools
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers

from tests.laws.compare import Topology, assert_close, state_of

X = np.random.default_rng(0).normal(size=(29, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def network(optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu"), layers.BatchNormalization(), layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def mirrored(replicas=3, devices=2, **options):
    with Topology(replicas, devices).strategy().scope():
        return network(**options)


@functools.cache
def fitted():
    """A model that has trained, once in each process; nothing may change it, and tests of it have one ``xdist_group``."""
    model = mirrored()
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


in_one_process = pytest.mark.xdist_group(__name__)


@pytest.mark.slow
def test_verbose_2_prints_the_steps_of_the_global_batch(capsys):
    mirrored().fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=2)
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    assert "4/4 - " in printed
    assert "val_accuracy" in printed


@pytest.mark.slow
def test_callbacks_see_batches_logs_and_weights(tmp_path):
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, sorted(logs), float(logs["loss"])))

        def on_epoch_end(self, epoch, logs=None):
            seen.append([value.shape for value in self.model.get_weights()])

    log, saved = tmp_path / "log.csv", tmp_path / "best.keras"
    callbacks = [
        Watch(),
        keras.callbacks.CSVLogger(log),
        keras.callbacks.ModelCheckpoint(saved, save_best_only=True, monitor="loss"),
        keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    ]
    model = mirrored()
    history = model.fit(X, Y, batch_size=8, epochs=9, callbacks=callbacks, verbose=0)
    assert [batch for batch, *_ in (entry for entry in seen if isinstance(entry, tuple))] == [0, 1, 2, 3] * 2
    assert all(names == ["accuracy", "loss"] for _, names, _ in (entry for entry in seen if isinstance(entry, tuple)))
    assert len(history.epoch) == 2, "EarlyStopping did not stop"
    assert history.history["learning_rate"] == pytest.approx([5e-4, 2.5e-4])
    with log.open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]
    assert saved.exists()


@pytest.mark.slow
@in_one_process
def test_a_saved_model_is_plain_keras_and_loads_without_lockstep(tmp_path):
    model = fitted()
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "expected.npy", model.predict(X, verbose=0))
    program = f"""
import sys
sys.modules["lockstep"] = None
import keras, numpy as np
folder = {str(tmp_path)!r}
model = keras.models.load_model(folder + "/model.keras")
found = model.predict(np.load(folder + "/x.npy"), verbose=0)
np.testing.assert_allclose(found, np.load(folder + "/expected.npy"), rtol=1e-5, atol=1e-6)
model.fit(np.load(folder + "/x.npy"), np.zeros(29), verbose=0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_load_model_in_a_scope_continues_the_training(tmp_path):
    model = mirrored()
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    with Topology(3, 3).strategy().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 4
    for going_on in (model, loaded):
        going_on.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert len(loaded.trainable_variables[0].value.sharding.device_set) == 3
    for (name, value), theirs in zip(state_of(loaded).items(), state_of(model).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


@pytest.mark.slow
@in_one_process
def test_weights_saved_and_loaded(tmp_path):
    first, second = fitted(), mirrored(2, 1)
    second.fit(X[:4], Y[:4], verbose=0)
    first.save_weights(tmp_path / "w.weights.h5")
    second.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_allclose(first.predict(X, verbose=0), second.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_freezing_a_layer_and_recompiling_trains_the_rest():
    model = mirrored()
    model.fit(X, Y, verbose=0)
    model.layers[0].trainable = False
    model.compile(optimizer="sgd", loss=model.loss, metrics=["accuracy"])
    before = [value.copy() for value in model.get_weights()]
    model.fit(X, Y, verbose=0)
    after = model.get_weights()
    np.testing.assert_array_equal(before[0], after[0])
    assert not np.array_equal(before[-1], after[-1])


@in_one_process
def test_the_model_can_be_called_and_cloned_after_fit():
    model = fitted()
    np.testing.assert_allclose(np.asarray(model(X)), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(clone.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def trained_as_plain_keras(build, options):
    """Return a model trained by three replicas on two devices, and one trained by plain Keras, with the same state."""
    with Topology(3, 2, options=options).strategy().scope():
        ours = build()
    plain = build()
    for model in (ours, plain):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)
    return ours, plain


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_a_model_that_keras_rematerializes_trains_by_replicas(options):
    """JAX keeps what it has traced of a function, and Keras makes a new one for each call of a layer."""

    def build():
        keras.utils.set_random_seed(0)
        with keras.RematScope("full"):
            model = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    ours, plain = trained_as_plain_keras(build, options)
    losses = [model.evaluate(X, Y, batch_size=8, verbose=0) for model in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_custom_step_may_differentiate_a_rematerialized_model_that_it_calls_directly():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            with keras.RematScope("full"):
                self.inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])

        def call(self, x):
            return self.inner(x)

        def train_step(self, state, data):
            def loss(values, power):
                with keras.StatelessScope(state_mapping=zip(self.trainable_variables, values, strict=True)):
                    return keras.ops.mean((self.inner(data[0]) - 1) ** power)

            values, others, optimizer, metrics = state
            (loss_2, of_2), (loss_4, of_4) = (jax.value_and_grad(loss)(values, power) for power in (2, 4))
            gradients = [one + other for one, other in zip(of_2, of_4, strict=True)]
            values, optimizer = self.optimizer.stateless_apply(optimizer, gradients, values)
            return {"loss": loss_2 + loss_4}, (values, others, optimizer, metrics)

    def build():
        keras.utils.set_random_seed(0)
        model = Twice()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    trained_as_plain_keras(build, {})


@pytest.mark.slow
def test_a_custom_step_may_change_its_inputs_before_the_forward_pass():
    class Doubling(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            return super().train_step(state, (2 * x, y, weight))

    def build():
        keras.utils.set_random_seed(0)
        model = Doubling()
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(True))
        return model

    with Topology(4, 3).strategy().scope():
        ours = build()
    plain = build()
    for model in (ours, plain):
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


@pytest.mark.slow
def test_large_outputs_stay_cut_over_the_devices():
    """Above REPLICATE_BELOW bytes outputs and targets are not copied to every device; the numbers are the same."""

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(40_000)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
        return model

    y = np.random.default_rng(0).normal(size=(15, 40_000)).astype("float32")
    with Topology(4, 3).strategy().scope():
        ours = build()
    plain = build()
    logs = [model.fit(X[:15], y, batch_size=8, shuffle=False, verbose=0).history for model in (ours, plain)]
    for name, value in logs[1].items():
        np.testing.assert_allclose(logs[0][name], value, rtol=1e-5)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)
