"""Performance regression test: the ratio of a Lockstep step to a plain Keras step, and the parts of a step; run by CI.

Only ratios of times measured in turns in this process count, and numbers of programs and collectives, so the limits do not depend on the
machine. A time above its limit is measured again, up to three times in all; the best one counts. Limits of times are about 1.5 times the
values on two shared cores; limits of counts are exact. If you speed up a step, lower its limit; if you raise a limit, give the reason.

Exits with code 1 if a limit is exceeded. Takes less than a minute.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from keras import layers
from steps import Steps, scalars

import lockstep

TURNS, ATTEMPTS = 5, 3
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of one compiled program


@dataclass(frozen=True)
class Check:
    """Something to measure, the less the better, and how much of it is allowed."""

    what: str
    limit: float
    measure: Callable[[], float]
    attempts: int = 1

    def best(self) -> float:
        """The least of so many measurements as it takes to stay within the limit, up to ``attempts``."""
        found = [self.measure()]
        while min(found) > self.limit and len(found) < self.attempts:
            found.append(self.measure())
        return min(found)


def judge(checks: list[Check], tell: Callable[[str], None] = print) -> int:
    """Tell of each check; the number of limits that were exceeded."""
    exceeded = 0
    tell("| what | measured | limit | |\n| --- | --- | --- | --- |")
    for check in checks:
        measured = check.best()
        is_exceeded = not measured <= check.limit  # NaN is no pass.
        exceeded += is_exceeded
        tell(f"| {check.what} | {measured:.3g} | {check.limit:g} | {'EXCEEDED' if is_exceeded else ''} |")
    return exceeded


# --- nets -----------------------------------------------------------------------------------------------------------------


def mlp():
    hidden = [layers.Dense(256, activation="relu") for _ in range(2)]
    return classifier(keras.Input((784,)), *hidden), classes(64 * 60, 784), 64


def cnn():
    parts = [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.Conv2D(32, 1, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
    ]
    return classifier(keras.Input((24, 24, 3)), *parts), classes(32 * 8, 24, 24, 3), 32


def tiny():
    model = scalars(20)
    model.compile("sgd", "mse")
    zeros = np.zeros((64 * 300, 1), "float32")
    return model, (zeros, zeros), 64


def classifier(*parts):
    model = keras.Sequential([*parts, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def classes(rows, *shape):
    random = np.random.default_rng(0)
    return random.random((rows, *shape), "float32"), random.integers(0, 10, rows)


def steps_of(build, strategy):
    if strategy is None:
        model, data, rows = build()
    else:
        with strategy.scope():
            model, data, rows = build()
    return Steps(model, strategy, *data, rows)


# --- measurements ---------------------------------------------------------------------------------------------------------


class Pair:
    """A net under Lockstep, two replicas on one device, and in plain Keras, in turns."""

    def __init__(self, build):
        self._build = build

    @functools.cached_property
    def _both(self):
        return [steps_of(self._build, lockstep.MirroredStrategy(["cpu:0"], replicas=2)), steps_of(self._build, None)]

    def step(self):
        """Ratio of the times of a step of ``fit``."""
        ours, plain = self._fastest(Steps.in_fit)
        return ours / plain

    def host(self):
        """Ratio of the host's times of a step."""
        fits, bare = self._fastest(Steps.in_fit), self._fastest(Steps.bare)
        return (fits[0] - bare[0]) / (fits[1] - bare[1])

    def _fastest(self, seconds):
        """Ours and Keras's, each the fastest of its turns: what others do on the machine only adds."""
        return [
            min(each) for each in zip(*([seconds(steps) for steps in self._both] for _ in range(TURNS)), strict=True)
        ]


class OnTwoDevices:
    """A net under Lockstep on two devices: what its step consists of."""

    def __init__(self, build):
        self._build, self.compiled = build, 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event, seconds, **about):
        self.compiled += event == COMPILED

    @functools.cached_property
    def _steps(self):
        return steps_of(self._build, lockstep.MirroredStrategy(["cpu:0", "cpu:1"]))

    def all_reduces(self):
        """Of the compiled step."""
        return self._collectives().count("all-reduce")

    def others(self):
        """Collectives besides all-reduces."""
        return len(self._collectives()) - self.all_reduces()

    def programs_of_a_later_fit(self):
        """How many programs are compiled once ``fit`` has run."""
        self._steps.in_fit()
        before = self.compiled
        self._steps.in_fit()
        return self.compiled - before

    @functools.cache  # noqa: B019  # there is one, until the process ends
    def _collectives(self):
        return COLLECTIVE.findall(self._steps.compiled_text())


def checks():
    on_two = OnTwoDevices(mlp)
    return [
        Check("step of an MLP, 64 rows / Keras's", 1.7, Pair(mlp).step, ATTEMPTS),
        Check("step of a CNN with depthwise convolution and pooling / Keras's", 0.5, Pair(cnn).step, ATTEMPTS),
        Check("host's time of a step, 20 variables / Keras's", 2.5, Pair(tiny).host, ATTEMPTS),
        Check("all-reduces in a step of the MLP on two devices", 1, on_two.all_reduces),
        Check("other collectives in it", 1, on_two.others),
        Check("programs that a second fit compiles", 0, on_two.programs_of_a_later_fit),
    ]


def main():
    lockstep.config.set_logical_cpu_devices(2)
    sys.exit(1 if judge(checks()) else 0)


if __name__ == "__main__":
    main()
