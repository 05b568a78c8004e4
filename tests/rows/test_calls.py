"""In how many calls a model is called: one for each replica where something tells them apart, else one on each device."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.step import plans

ROWS = 12


class Own(layers.Layer):
    """A variable that says how replicas meet."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x):
        self.calls.assign_add(1)
        return x


class Mean(layers.Layer):
    """One that does not."""

    def build(self, shape):
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.level.assign(ops.mean(x))
        return x


def calls(inner, method, replicas, devices, monkeypatch):
    """The rows of each call that a step is made in, on all devices."""
    seen = []
    calls_of = plans.FastPlan.calls_of

    def noted(plan, layout, split):
        seen.append(calls_of(plan, layout, split))
        return seen[-1]

    monkeypatch.setattr(plans.FastPlan, "calls_of", noted)
    monkeypatch.setattr(plans, "usable_cores", lambda: 4)
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
def test_what_tells_replicas_apart_in_training_is_called_for_each(make, monkeypatch):
    assert calls([make()], "train", 4, 1, monkeypatch) == ((3, 3, 3, 3),)


@pytest.mark.parametrize("make", ALIKE)
@pytest.mark.parametrize(("devices", "expected"), [(1, ((12,),)), (2, ((6,), (6,))), (3, ((3,), (3,), (6,)))])
def test_what_tells_no_replicas_apart_is_called_once_on_each_device(make, devices, expected, monkeypatch):
    assert calls([make()], "train", 4, devices, monkeypatch) == expected


@pytest.mark.parametrize("make", APART[:2])
@pytest.mark.parametrize("method", ["test", "predict"])
def test_what_tells_replicas_apart_in_training_alone_is_called_once_elsewhere(make, method, monkeypatch):
    assert calls([make()], method, 4, 2, monkeypatch) == ((6,), (6,))


@pytest.mark.parametrize(
    ("replicas", "devices", "expected"),
    [(2, 1, ((6, 6),)), (6, 1, ((3, 3, 3, 3),)), (6, 2, ((3, 3), (3, 3))), (2, 2, ((6,), (6,)))],
)
def test_convolutions_on_cpus_are_called_as_often_as_there_are_cores(replicas, devices, expected, monkeypatch):
    assert calls([layers.Conv1D(2, 3)], "train", replicas, devices, monkeypatch) == expected
