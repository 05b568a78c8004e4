"""Claim: a step with ``NanGuard`` takes little more time than one without.

Two logical CPU devices, two replicas. The guarded and the unguarded step of the same model take turns, each on its own state; the result
is the median of the ratios of their times. Decision 17 and ``docs/nan_guard.md`` are based on this.
"""

import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers
from results_file import write

import lockstep
from lockstep._keras.trainer import variables_of
from lockstep.execution.executors import DeterministicExecutor, SpmdExecutor
from lockstep.execution.step_functions import StepFunctions
from lockstep.fit.fit_hooks import FitContext
from lockstep.fit.nan_guard import NanGuard, StepGuard

ROUNDS, CALLS = 15, 8


def mlp(width):
    hidden = [layers.Dense(width, activation="relu") for _ in range(2)]
    return [keras.Input((784,)), *hidden, layers.Dense(10)], (784,)


def cnn():
    def block(filters):
        normalized = [layers.Conv2D(filters, 3), layers.BatchNormalization(), layers.Activation("relu")]
        return [*normalized, layers.MaxPooling2D()]

    return [keras.Input((32, 32, 3)), *block(16), *block(32), layers.Flatten(), layers.Dense(10)], (32, 32, 3)


NETS = {
    "MNIST MLP, 270,000 parameters": lambda: mlp(256),
    "MLP, 1,900,000 parameters": lambda: mlp(1024),
    "small CNN": cnn,
}


class Steps:
    """One way to train a model, with the state it has come to."""

    def __init__(self, model, strategy, executor, batch, *, is_guarded):
        placement = strategy._placement
        functions = StepFunctions(model, placement, executor, lambda _: None)
        if is_guarded:
            context = FitContext(model, {}, functions, placement, strategy._process_group, {}, print)
            functions.hooks = (StepGuard(NanGuard(), context),)
        self.train, self.batch = functions.make("train"), placement.place(batch)
        self.state = tuple([np.array(variable.value) for variable in kind] for kind in variables_of(model))

    def time(self):
        """Seconds of a step, of several in a row."""
        batches = iter([self.batch] * CALLS)
        start = time.perf_counter()
        for _ in range(CALLS):
            _, self.state = self.train(self.state, batches)
        jax.block_until_ready(tuple(self.state))
        return (time.perf_counter() - start) / CALLS


def compare(build, rows, *, is_deterministic):
    keras.utils.set_random_seed(0)
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    inner, shape = build()
    model = keras.Sequential(inner)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(rows, *shape)).astype("float32"), rng.integers(0, 10, rows)
    model._symbolic_build(data_batch=batch)
    placement = strategy._placement
    executor = (
        DeterministicExecutor(placement) if is_deterministic else SpmdExecutor(placement, strategy.cross_device_ops)
    )
    ways = [Steps(model, strategy, executor, batch, is_guarded=guarded) for guarded in (False, True)]
    for way in ways:
        way.time()
    times = [[way.time() for way in ways] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return *(round(1e3 * median, 2) for median in medians), round(statistics.median(b / a for a, b in times), 2)


def main():
    lockstep.config.set_deterministic()
    lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    lockstep.config.set_deterministic(False)
    rows = [
        (
            name,
            count,
            "deterministic" if is_deterministic else "default",
            *compare(build, count, is_deterministic=is_deterministic),
        )
        for name, build in NETS.items()
        for count in (64, 512)
        for is_deterministic in (False, True)
    ]
    columns = "net", "rows", "executor", "step, ms", "guarded, ms", "ratio"
    write("nan_guard", "A training step with and without NanGuard", columns, rows)


if __name__ == "__main__":
    main()
