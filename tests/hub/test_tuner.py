"""A search of KerasTuner in which each trial trains under a strategy finds what it finds with plain Keras."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import lockstep

from .kit import mirrored

keras_tuner = pytest.importorskip("keras_tuner", reason="Not installed beside KerasHub: ./scripts/test-hub runs this")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:keras_tuner"),
    pytest.mark.filterwarnings(
        "ignore:Skipping variable loading for optimizer"
    ),  # It loads models that were not trained.
]

X = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")
Y = (np.arange(21) % 3).astype("int32")


def search(folder, make_strategy):
    """Search the whole grid, with a strategy for each trial, or with plain Keras."""

    def build(parameters):
        keras.utils.set_random_seed(3)
        with make_strategy().scope() if make_strategy else contextlib.nullcontext():
            hidden = layers.Dense(parameters.Int("units", 4, 8, step=4), "relu")
            model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3)])
            rate = parameters.Choice("rate", [0.1, 0.01])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
        return model

    objective = keras_tuner.Objective("val_loss", "min")
    tuner = keras_tuner.GridSearch(build, objective, directory=folder, project_name="search")
    tuner.search(X, Y, batch_size=8, epochs=3, validation_data=(X, Y), shuffle=False, verbose=0)
    return tuner


def test_a_search_has_the_scores_of_plain_keras(tmp_path):
    ours = search(tmp_path / "ours", lambda: mirrored(shard="variables"))
    plain = search(tmp_path / "plain", None)
    trials, expected = (tuner.oracle.get_best_trials(4) for tuner in (ours, plain))
    assert len(trials) == 4
    assert [one.hyperparameters.values for one in trials] == [one.hyperparameters.values for one in expected]
    np.testing.assert_allclose([one.score for one in trials], [one.score for one in expected], rtol=1e-5)
    best, plain_best = (tuner.get_best_models()[0] for tuner in (ours, plain))
    np.testing.assert_allclose(best.predict(X, verbose=0), plain_best.predict(X, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_strategy_is_given_to_the_builder_and_not_to_the_tuner(tmp_path):
    """``distribution_strategy`` is for those of TensorFlow: KerasTuner reads their ``extended``."""
    with pytest.raises(AttributeError, match="extended"):
        keras_tuner.GridSearch(
            lambda parameters: None, "val_loss", distribution_strategy=lockstep.MirroredStrategy(), directory=tmp_path
        )
