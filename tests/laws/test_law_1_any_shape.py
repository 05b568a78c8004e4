"""Law 1 for random shapes: hypothesis draws rows, batch size, replicas and devices."""

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .compare import Topology, assert_close, state_of


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def results(model, x, y, weight, batch):
    history = model.fit(x, y, sample_weight=weight, batch_size=batch, shuffle=False, verbose=0).history
    evaluation = model.evaluate(x, y, sample_weight=weight, batch_size=batch, verbose=0)
    return {"history": np.asarray(list(history.values())), "evaluation": np.asarray(evaluation)} | {
        "predictions": model.predict(x, batch_size=batch, verbose=0),
        **state_of(model),
    }


@pytest.mark.slow
@pytest.mark.parametrize("examples", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_any_number_of_rows_in_any_batches_on_any_topology(examples):
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        rows=st.integers(1, 20),
        batch=st.integers(1, 12),
        replicas=st.integers(1, 9),
        devices=st.integers(1, 4),
        weighted=st.booleans(),
    )
    def check(rows, batch, replicas, devices, weighted):
        rng = np.random.default_rng(rows)
        x, y = rng.normal(size=(rows, 3)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")
        weight = rng.uniform(0, 2, rows).astype("float32") if weighted else None
        with Topology(replicas, devices).strategy().scope():
            model = build()
        ours, plain = results(model, x, y, weight, batch), results(build(), x, y, weight, batch)
        for (name, value), theirs in zip(ours.items(), plain.values(), strict=True):
            # At most 20 steps, at 1e-6 a step.
            assert_close(np.asarray(value, "float32"), np.asarray(theirs, "float32"), 2e-5, name)

    check()
