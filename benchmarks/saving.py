"""Claim: saving in the background delays a step by less than half of the time of saving.

A dense net with Adam, 101 MB of state, trains on two CPU devices: without checkpoints, with a checkpoint every ten steps in the background,
and with one every ten steps that the step waits for. The three take turns, for three rounds. The time of a step is the time between two
callbacks; the result is the median over all rounds.
"""

import os
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from results_file import write

import lockstep

ROUNDS, STEPS, EVERY, ROWS, WIDTH = 3, 60, 10, 256, 1450
WAYS = {"no checkpoints": None, "in the background": True, "waited for": False}


class Clock(keras.callbacks.Callback):
    """When each step had been started, and the one before it had ended."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        """Wait for the step, and look at the clock."""
        float(logs["loss"])
        self.times.append(time.perf_counter())


def build(strategy):
    with strategy.scope():
        dense = [keras.layers.Dense(WIDTH, "relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    return model


def durations(model, data, is_async):
    """Seconds of each step."""
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        backup = [lockstep.callbacks.BackupAndRestore(folder, save_freq=EVERY, async_=is_async)]
        callbacks = [clock] if is_async is None else [clock, *backup]
        model.fit(*data, batch_size=ROWS, callbacks=callbacks, verbose=0, shuffle=False)
    return np.diff(clock.times)


def main() -> None:
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    model, rng = build(strategy), np.random.default_rng(0)
    data = rng.normal(size=(STEPS * ROWS, WIDTH)).astype("float32"), rng.integers(0, 10, STEPS * ROWS)
    durations(model, data, None)
    found = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, is_async in WAYS.items():
            found[way].append(durations(model, data, is_async))
    step = np.median(found["no checkpoints"])
    rows = []
    for way, rounds in found.items():
        after = [seconds for one in rounds for seconds in one[EVERY - 1 :: EVERY]]  # the steps that follow a save
        ratio = np.median([np.mean(one) for one in rounds]) / np.median(
            [np.mean(one) for one in found["no checkpoints"]]
        )
        held_up = np.median(after) - step
        rows.append((way, f"{1e3 * held_up:.0f}", f"{held_up / step:.2f}", f"{ratio:.2f}"))
    title = f"Saving 101 MB each {EVERY} steps of {1e3 * step:.0f} ms"
    write("saving", title, ("checkpoints", "held up, ms", "share of a step", "all steps, ratio"), rows)


main()
