"""Ctrl-C in ``fit`` leaves the weights of the last step, wherever it comes; a second one ends the step that was begun."""

import signal

import keras
import numpy as np
import pytest

import lockstep
from lockstep.execution.compiled_step import CompiledTrainStep
from lockstep.execution.deterministic_step import ProgramPartition
from lockstep.execution.step_loop import StepLoop

pytestmark = pytest.mark.usefixtures("default_handler")
STEPS, LAST = 8, 5
X = np.random.default_rng(0).normal(size=(STEPS * 8, 4)).astype("float32")
Y = X[:, :1] + 1


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(monkeypatch, place, after=True, times=1):
    """Send SIGINT before or after ``place`` has run its program, in the step ``LAST``; return a list of the calls that have returned."""
    original, begun, returned = place.__call__, [], []

    def call(self, *args):
        begun.append(self)
        if len(begun) == LAST and not after:
            signal.raise_signal(signal.SIGINT)
        found = original(self, *args)
        for _ in range(times if len(begun) == LAST and after else 0):
            signal.raise_signal(signal.SIGINT)
        returned.append(self)
        return found

    monkeypatch.setattr(place, "__call__", call)
    return returned


def made(deterministic=False):
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=deterministic).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def fit(model, steps=STEPS, epochs=1):
    return model.fit(X[: steps * 8], Y[: steps * 8], batch_size=8, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("place", "after", "steps"),
    [
        (CompiledTrainStep, True, LAST),  # The program has taken the old values, and nobody has the new ones.
        (ProgramPartition, True, LAST),
        (StepLoop, True, LAST),  # Keras does not have them yet.
        (CompiledTrainStep, False, LAST - 1),
    ],
)
def test_an_interrupted_fit_leaves_the_weights_of_its_last_step(place, after, steps, monkeypatch):
    deterministic = place is ProgramPartition
    expected = made(deterministic)
    fit(expected, steps)
    model = made(deterministic)
    with monkeypatch.context() as patch:
        interrupt(patch, place, after)
        with pytest.raises(KeyboardInterrupt):
            fit(model, epochs=3)
    for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert int(model.optimizer.iterations) == steps
    assert fit(model).history["loss"] == fit(expected).history["loss"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Ending(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_test_batch_end(self, batch, logs=None):
        raise self.error

    on_predict_batch_end = on_test_batch_end


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, None])
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_an_evaluation_that_ends_early_leaves_the_weights(name, error, monkeypatch):
    """``error`` is that of a callback; None: an interrupt before Keras has the state of a step."""
    model = made()
    fit(model)
    before = model.get_weights()
    with monkeypatch.context() as patch:
        if error is None:
            interrupt(patch, StepLoop)
        callbacks = [Ending(error)] if error else []
        with pytest.raises(error or KeyboardInterrupt):
            getattr(model, name)(
                X, batch_size=8, verbose=0, callbacks=callbacks, **({"y": Y} if name == "evaluate" else {})
            )
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_second_interrupt_ends_a_step_that_was_begun(monkeypatch):
    model = made()
    with monkeypatch.context() as patch:
        returned = interrupt(patch, CompiledTrainStep, times=2)
        with pytest.raises(KeyboardInterrupt):
            fit(model)
    assert len(returned) == LAST - 1


def test_a_handler_of_the_user_is_called_after_the_step(monkeypatch):
    called = []
    signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    model = made()
    returned = interrupt(monkeypatch, CompiledTrainStep)
    fit(model)
    assert called == [signal.SIGINT]
    assert len(returned) == STEPS
