"""Claim: CPU devices deadlock on a thread pool that is too small; four threads per device are enough.

Trains a small CNN with two BatchNormalization layers, two outputs and four metrics, in a separate process for each number of devices and
threads, with a deadline. Decision 3 is based on this. A pass only shows that no deadlock happened in this run.
"""

import os
import subprocess
import sys

from results_file import write

DEADLINE = 60  # seconds; a run takes about ten
PROGRAM = """
import os, sys
import lockstep.devices.names as devices
devices.check_thread_pool = lambda *_: None  # the check that this experiment is about
import keras, lockstep, numpy as np
from keras import layers
with lockstep.MirroredStrategy([f"cpu:{i}" for i in range(int(sys.argv[1]))]).scope():
    x = keras.Input((16, 16, 3))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3)(x))
    y = layers.Flatten()(layers.BatchNormalization()(layers.Conv2D(8, 3)(y)))
    model = keras.Model(x, [layers.Dense(3)(y), layers.Dense(2)(y)])
    model.compile("adam", ["mse", "mse"], metrics=[["mae", "mse"], ["mae", "mse"]])
rng = np.random.default_rng(0)
x, a, b = (rng.normal(size=(640, *shape)).astype("float32") for shape in ((16, 16, 3), (3,), (2,)))
model.fit(x, [a, b], batch_size=32, epochs=8, verbose=0)
"""


def outcome(devices: int, threads: int) -> str:
    environment = os.environ | {"KERAS_BACKEND": "jax", "PJRT_NPROC": str(threads)}
    command = [sys.executable, "-c", PROGRAM, str(devices)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return f"no end in {DEADLINE} s"
    return "ran" if done.returncode == 0 else f"ended with {done.returncode}"


def main():
    rows = [
        (devices, threads, outcome(devices, threads))
        for devices in (2, 3, 4)
        for threads in sorted({devices, devices + 1, 2 * devices, 4 * devices})
    ]
    write("thread_pool", "Thread pool", ("devices", "threads", "outcome"), rows)


main()
