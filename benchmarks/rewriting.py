"""Slow CPU operations and their rewrites: forward and forward-and-backward time of XLA's form and of ours, as ratios.

Each pair takes turns in one process, a few calls per turn. A time is the median of the turns, a ratio the median of the ratios of the turns,
above 1 if the rewrite is faster. "With backward" includes the gradients of all arguments; "compiling" is the first call. The last rows are
small Keras nets on one device: a whole step of SGD, with and without rewriting of the forward pass.
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import layers
from results_file import write

from lockstep.execution.cpu_rewrites import rewrite_for_cpu

TURNS, SECONDS = 9, 0.05  # of a turn, for each of the two
SPECS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}
COLUMNS = (
    "what",
    "rows",
    "forward, ms",
    "forward, ratio",
    "with backward, ms",
    "with backward, ratio",
    "compiling that, s",
)


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape, "float32")


# --- operations -----------------------------------------------------------------------------------------------------------


def convolution(rows, kernel, stride=1, padding="SAME"):
    rank, groups = len(rows) - 2, rows[-1] // kernel[-2]

    def convolve(x, weights):
        shapes = {"dimension_numbers": SPECS[rank], "feature_group_count": groups}
        return lax.conv_general_dilated(x, weights, (stride,) * rank, padding, **shapes)

    return convolve, (numbers(*rows), numbers(*kernel))


def pooling(rows, *window):
    def pool(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, *window, 1), (1, *window, 1), "VALID")

    return pool, (np.maximum(numbers(*rows), 0),)  # After a ReLU: many ties.


OPERATIONS = {
    "depthwise 3x3, 24x24x144": convolution((32, 24, 24, 144), (3, 3, 1, 144)),
    "depthwise 3x3, 24x24x144, stride 2": convolution((32, 24, 24, 144), (3, 3, 1, 144), 2),
    "depthwise 7x7, 24x24x64": convolution((8, 24, 24, 64), (7, 7, 1, 64)),
    "convolution 3x3, 32x32, 3 to 32": convolution((64, 32, 32, 3), (3, 3, 3, 32)),
    "convolution of width 5, 300, 7 to 64": convolution((128, 300, 7), (5, 7, 64), 1, "VALID"),
    "convolution 3x3, 32x32, 32 to 32": convolution((64, 32, 32, 32), (3, 3, 32, 32)),
    "convolution 3x3, 16x16, 64 to 64": convolution((64, 16, 16, 64), (3, 3, 64, 64)),
    "convolution 3x3, 56x56, 64 to 64": convolution((16, 56, 56, 64), (3, 3, 64, 64)),
    "convolution 1x1, 48x48, 32 to 16": convolution((32, 48, 48, 32), (1, 1, 32, 16)),
    "max pooling 2x2, 30x30x32": pooling((64, 30, 30, 32), 2, 2),
    "max pooling 4x4, 32x32x32": pooling((64, 32, 32, 32), 4, 4),
    "max pooling 2, 296x64": pooling((128, 296, 64), 2),
}


def with_gradients(function):
    def run(*arguments):
        values, back = jax.vjp(function, *arguments)
        return values, back(values)

    return run


# --- nets -----------------------------------------------------------------------------------------------------------------


def cnn():
    parts = [
        keras.Input((32, 32, 3)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.Conv2D(32, 1, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10),
    ]
    return keras.Sequential(parts), numbers(64, 32, 32, 3)


def text_cnn():
    parts = [
        keras.Input((300,), dtype="int32"),
        layers.Embedding(5000, 7),
        layers.Conv1D(64, 5, activation="relu"),
        layers.MaxPool1D(2),
        layers.Conv1D(32, 3, activation="relu"),
        layers.MaxPool1D(2),
        layers.Flatten(),
        layers.Dense(10),
    ]
    return keras.Sequential(parts), np.random.default_rng(0).integers(0, 5000, (64, 300), "int32")


def training_step(build):
    """The net's forward pass, a function that makes a step of SGD from one, and the arguments of both."""
    model, x = build()
    y = np.random.default_rng(1).integers(0, 10, len(x))
    values, others = ([v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables))

    def call(values, x):
        return model.stateless_call(values, others, x)[0]

    def step_with(forward):
        def loss(values, x):
            return keras.losses.sparse_categorical_crossentropy(y, forward(values, x), from_logits=True).mean()

        def step(values, x):
            gradients = jax.grad(loss)(values, x)
            return [value - 0.01 * gradient for value, gradient in zip(values, gradients, strict=True)]

        return step

    return call, step_with, (values, jnp.asarray(x))


# --- measuring ------------------------------------------------------------------------------------------------------------


class Timed:
    """A compiled function; a turn is as many calls as take ``SECONDS``."""

    def __init__(self, function, arguments):
        self.run, self.arguments = jax.jit(function), jax.device_put(arguments)
        self.first = self._seconds(1)
        self.calls = max(1, int(SECONDS / self._seconds(1)))

    def turn(self):
        """Seconds of a call."""
        return self._seconds(self.calls) / self.calls

    def _seconds(self, calls):
        begun = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(self.run(*self.arguments))
        return time.perf_counter() - begun


def compared(before, after):
    """Texts: both times, their ratio, and what the first calls took."""
    times = [(before.turn(), after.turn()) for _ in range(TURNS)]
    middle = [f"{1000 * statistics.median(each):.3g}" for each in zip(*times, strict=True)]
    ratio = statistics.median(one / other for one, other in times)
    return " → ".join(middle), f"{ratio:.1f}", f"{before.first:.2f} → {after.first:.2f}"


def main():
    lines = []
    for name, (function, arguments) in OPERATIONS.items():
        ways = function, rewrite_for_cpu(function)
        forward = compared(*(Timed(way, arguments) for way in ways))
        backward = compared(*(Timed(with_gradients(way), arguments) for way in ways))
        lines.append((name, len(arguments[0]), *forward[:2], *backward))
    for build in (cnn, text_cnn):
        call, step_with, arguments = training_step(build)
        ways = call, rewrite_for_cpu(call)
        forward = compared(*(Timed(way, arguments) for way in ways))
        step = compared(*(Timed(step_with(way), arguments) for way in ways))
        lines.append((f"training step, {build.__name__}", len(arguments[1]), *forward[:2], *step))
    note = "XLA's own → ours; a ratio above 1: ours is faster. With backward: a whole step in the last two rows."
    write("rewriting", "Slow operations in other words", COLUMNS, lines, note)


if __name__ == "__main__":
    main()
