"""Trains nets with and without determinism, each under a strategy of its own, and writes down all that came out.

With ``plain`` on plain Keras, without any strategy.
"""

import contextlib
import os

import keras
import numpy as np
from keras import layers

from tests.distributed.jobs.program import config, make_strategy, tell

# Each batch has 7 rows, so that one of 8 replicas has none. Another size of batch would be compiled anew.
ROWS, BATCH = 21, 7
SHAPES = {"mlp": (5,), "cnn": (6, 6, 2), "cnn_normalized": (6, 6, 2)}


def net(name):
    """The normalized one has statistics and noise by replica, and so no counterpart in plain Keras."""
    if name == "mlp":
        inner = [layers.Dense(6, activation="tanh")]
    elif name == "cnn":
        inner = [layers.Conv2D(3, 3, activation="tanh"), layers.Flatten()]
    else:
        normalized = [layers.BatchNormalization(), layers.Activation("relu")]
        inner = [layers.Conv2D(3, 3), *normalized, layers.Flatten(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input(SHAPES[name]), *inner, layers.Dense(3)])


def trained(name, scope):
    """Everything that is left of a net after training, evaluation and prediction: name to array."""
    keras.backend.clear_session(free_memory=False)  # Names of layers begin anew.
    keras.utils.set_random_seed(3)
    with scope:
        model = net(name)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, *SHAPES[name])).astype("float32"), rng.integers(0, 3, ROWS)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:BATCH], y[:BATCH]), verbose=0).history
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    found = {f"{number} {variable.path}": np.asarray(variable) for number, variable in enumerate(variables)}
    found |= {f"history {key}": np.asarray(values) for key, values in history.items()}
    # The second batch has 3 rows, so that the second of two workers has none.
    evaluation = model.evaluate(x[:10], y[:10], batch_size=BATCH, verbose=0, return_dict=True)
    found |= {f"evaluation {key}": value for key, value in evaluation.items()}
    return found | {"predictions": model.predict(x[: 2 * BATCH], batch_size=BATCH, verbose=0)}


def scope_of(deterministic):
    if config.get("plain"):
        return contextlib.nullcontext()
    return make_strategy(replicas=config["replicas"], deterministic=deterministic).scope()


for name, deterministic in config["nets"]:
    found = trained(name, scope_of(deterministic))
    np.savez(os.path.join(config["folder"], f"{name}{'_deterministic' * deterministic}.npz"), **found)
tell(done=True)
