"""Cost and gain of prefetching on CPU devices: time per step, relative to placing each batch when its step is due.

All variants take turns in one process, several times, on a tiny net that makes the input dominant; the fastest run of each counts,
as other programs may use the machine. "ready" returns arrays in memory; "reading" waits 2 ms per batch, like a disk; "working"
computes 2 ms per batch.
"""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from results_file import write

import lockstep

STEPS, ROUNDS, ROWS = 150, 7, 64
DEPTHS = {"when due": 0, "2 ahead": 2, "4 ahead": 4}


def ready(step):
    return X[:ROWS], Y[:ROWS]


def reading(step):
    time.sleep(0.002)
    return X[:ROWS], Y[:ROWS]


def working(step):
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    return X[:ROWS], Y[:ROWS]


X, Y = np.random.default_rng(0).random((ROWS, 784), "float32"), np.zeros((ROWS, 10), "float32")


def model_of(depth):
    options = lockstep.InputOptions(prefetch=depth)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2, input_options=options).scope():
        model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    return model


def seconds(model, source):
    begun = time.perf_counter()
    model.fit(source, steps_per_epoch=STEPS, verbose=0)
    return (time.perf_counter() - begun) / STEPS


def of_arrays(model):
    x, y = np.tile(X, (STEPS, 1)), np.tile(Y, (STEPS, 1))
    times = {"class": [], "model": []}
    for _ in range(ROUNDS):
        for name, fit in (
            ("class", lambda *data, **options: type(model).fit(model, *data, **options)),
            ("model", model.fit),
        ):
            begun = time.perf_counter()
            fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
            times[name].append((time.perf_counter() - begun) / STEPS)
    before, after = (min(each) for each in times.values())
    return f"{1000 * before:.2f}", "1.00", f"{after / before:.2f}"


def main():
    models = {name: model_of(depth) for name, depth in DEPTHS.items()}
    rows = []
    for source in (ready, reading, working):
        times = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():
                times[name].append(seconds(model, source))
        due = min(times["when due"])
        ratios = [f"{min(each) / due:.2f}" for each in times.values()]
        rows.append((source.__name__, f"{1000 * due:.2f}", *ratios))
    rows.append(("arrays", *of_arrays(models["2 ahead"]), "-"))
    columns = ("input", "ms a step when due", *DEPTHS)
    note = "Ratios of the time of a step; below 1 is faster than when due. For arrays: fit of the class, which no input of ours "
    note += "takes part in, against fit of the model, where they are placed without a thread whatever the options say."
    write("feed", "Reading ahead", columns, rows, note)


main()
