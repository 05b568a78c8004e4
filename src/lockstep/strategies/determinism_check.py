"""One step, run several times from the same state: every bit must be the same."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import initializers, layers

from lockstep._errors import DeterminismError
from lockstep._keras import trainer
from lockstep.data.device_placement import Placement
from lockstep.devices.names import device_name
from lockstep.execution.executors import Executor
from lockstep.execution.train_functions import StepFunctions

__all__ = ["compare_steps", "reference_batch", "reference_model"]

Values = dict[str, np.ndarray]


def compare_steps(model: keras.Model, batch: Any, ways: Sequence[tuple[Placement, Executor]]) -> str:
    """Run one training step in each of the ``ways``, from the state that the model is in.

    Returns:
        SHA-256 of all that came out.

    Raises:
        DeterminismError: two ways differ.
    """
    state = trainer.training_state(model, batch)
    outcomes = []
    for placement, executor in ways:
        step = StepFunctions(model, placement, executor, lambda _: None).make("train")
        logs, new = step(jax.tree.map(jax.numpy.copy, state), iter([batch]))
        outcomes.append(_named(model, logs, new))
    for (placement, _), outcome in zip(ways[1:], outcomes[1:], strict=True):
        _compare(outcomes[0], outcome, [device_name(device) for device in placement.devices])
    digest = hashlib.sha256()
    for value in outcomes[0].values():
        digest.update(value.tobytes())
    return digest.hexdigest()


def _named(model: keras.Model, logs: dict[str, Any], state: Sequence[Sequence[Any]]) -> Values:
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    found = {f"log {name!r}": np.asarray(value) for name, value in keras.tree.flatten_with_path(logs)}
    for variables, values in zip(kinds, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            found[f"variable {variable.path!r} ({len(found)})"] = np.asarray(value)
    return found


def _compare(expected: Values, found: Values, devices: list[str]) -> None:
    for name, value in expected.items():
        different = np.frombuffer(value.tobytes(), "uint8") != np.frombuffer(found[name].tobytes(), "uint8")
        if different.any():
            raise DeterminismError(
                f"self_check: a step that was repeated from the same state on {', '.join(devices)} gave another {name}: "
                f"{different.sum()} of {different.size} bytes differ. The compiled program depends on more than its inputs; try "
                "another version of jaxlib or, on CPU, lockstep.config.set_deterministic(cpu_threads=1) on one device."
            )


def reference_model() -> keras.Model:
    """A small net with what tends to differ: convolution, statistics, randomness, reductions.

    Its seeds and names are given, so that making it leaves the process's own as they are.
    """

    def start(seed: int) -> initializers.Initializer:
        return initializers.GlorotUniform(seed=seed)

    model = keras.Sequential(
        [
            layers.Input((8, 8, 3), name="self_check_input"),
            layers.Conv2D(8, 3, kernel_initializer=start(0), name="self_check_convolution"),
            layers.BatchNormalization(name="self_check_normalization"),
            layers.Flatten(name="self_check_flatten"),
            layers.Dropout(0.2, seed=1, name="self_check_dropout"),
            layers.Dense(10, kernel_initializer=start(2), name="self_check_dense"),
        ],
        name="self_check",
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def reference_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures ``(rows, 8, 8, 3)`` and classes ``(rows,)`` for :func:`reference_model`."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 8, 8, 3)).astype("float32"), rng.integers(0, 10, rows)
