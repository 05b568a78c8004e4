"""Claim: monitoring costs some microseconds per step.

A small step of ``fit`` shows it best: an MLP with 32 rows on one CPU device. The kinds of monitoring take turns in one process; the result
is the median of the ratios to the turn without monitoring.
"""

import os
import statistics
import tempfile
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from results_file import write

import lockstep

ROUNDS, STEPS, ROWS = 12, 2000, 32


def ways(folder):
    callbacks = lockstep.callbacks
    return {
        "none": list,
        "ThroughputMonitor()": lambda: [callbacks.ThroughputMonitor()],
        "TensorBoard(folder)": lambda: [callbacks.TensorBoard(folder)],
        "TensorBoard(folder, update_freq=10)": lambda: [callbacks.TensorBoard(folder, update_freq=10)],
    }


def main():
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS * STEPS, 20)).astype("float32"), rng.normal(size=(ROWS * STEPS, 1)).astype("float32")

    def seconds_a_step(callbacks):
        begun = time.perf_counter()
        model.fit(x, y, batch_size=ROWS, verbose=0, shuffle=False, callbacks=callbacks)
        return (time.perf_counter() - begun) / STEPS

    with tempfile.TemporaryDirectory() as folder:
        watched = ways(folder)
        seconds_a_step([])
        times = [[seconds_a_step(make()) for make in watched.values()] for _ in range(ROUNDS)]
    rows = []
    for name, column in zip(watched, zip(*times, strict=True), strict=True):
        ratio = statistics.median(took / line[0] for took, line in zip(column, times, strict=True))
        rows.append((name, round(1e6 * statistics.median(column)), round(ratio, 2)))
    write("monitoring", "What watching a run costs", ("callbacks", "a step, µs", "ratio"), rows)


if __name__ == "__main__":
    main()
