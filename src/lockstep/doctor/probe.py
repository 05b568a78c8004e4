"""What is read and run to look at a program: a few batches, and a training step for each of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lockstep._keras import trainer
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.wait_meter import BOUND, describe_waiting
from lockstep.doctor.finding import Finding
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.step_probe import StrategyProbes, copies, median_step_seconds
from lockstep.execution.train_functions import StepFunctions

__all__ = ["BATCHES", "ProbedBatches", "StepTimings", "about_input", "measure", "read_some", "waiting_share"]

BATCHES = 6  # that are read and trained on; the first step is compiled, and not counted
_LEAST = 0.002  # seconds that a step waits; less is not worth a sentence
Clock = Callable[[], float]


@dataclass(frozen=True)
class ProbedBatches:
    """Batches of an input.

    Args:
        batches: on the host.
        seconds: that the usual one took, without the first; None where there was one only.
        is_ahead: whether such batches are read while steps run.
        name: of the input.
        in_all: number of batches of a pass, where it is known.
    """

    batches: Sequence[Any]
    seconds: float | None
    is_ahead: bool
    name: str
    in_all: int | None


@dataclass(frozen=True)
class StepTimings:
    """What training steps took.

    Args:
        seconds: of the usual one.
        bytes: that the program needs on a device; None where it is several programs.
    """

    seconds: float
    bytes: int | None


def read_some(made: KerasInput, clock: Clock = time.perf_counter) -> ProbedBatches:
    """Read the first batches of an input and give them back.

    The global random numbers are then what they were, but for a generator: what it has drawn belongs to the rows that it will give.

    Args:
        made: the input, which is closed then.
        clock: gives seconds.
    """
    before, begun = capture_random_state(), clock()
    batches, seconds = [], []
    try:
        for batch in islice(made.get_jax_iterator(), BATCHES):
            batches.append(batch)
            seconds.append(clock() - begun)
            begun = clock()
    finally:
        made.close()
        if made.restarts:
            restore_random_state(before)
    usual = float(np.median(seconds[1:])) if len(seconds) > 1 else None
    return ProbedBatches(batches, usual, made.depth > 0, made.name, made.num_batches)


def measure(functions: StepFunctions, read: ProbedBatches) -> StepTimings:
    """Train on the first batch that was read, with copies of all values."""
    random, steps = capture_random_state(), max(1, len(read.batches) - 1)
    try:
        if (
            isinstance(functions.executor, SpmdExecutor)
            and functions.model.jit_compile
            and not functions.model.run_eagerly
        ):
            trials = StrategyProbes(functions.model, functions.placement, functions.executor, functions.executor)
            trial = trials.compile(read.batches[0])
            return StepTimings(trial.seconds(steps), trial.memory)
        train, state = functions.make("train"), copies(trainer.training_state(functions.model, read.batches[0]))
        step = lambda state, batch: train(state, iter([batch]))  # noqa: E731
        return StepTimings(median_step_seconds(step, state, read.batches[0], steps), None)
    finally:
        restore_random_state(random)


def waiting_share(read: ProbedBatches, steps: StepTimings) -> float:
    """The part of the time in which no step can run, as its batch is not there yet."""
    if read.seconds is None or not read.is_ahead:
        return 0.0
    return max(0.0, 1 - steps.seconds / read.seconds)


def about_input(read: ProbedBatches, steps: StepTimings, where: str) -> list[Finding]:
    """About an input that is slower than the step."""
    share = waiting_share(read, steps)
    if share < BOUND or (read.seconds or 0) - steps.seconds < _LEAST:
        return []
    what, cure = describe_waiting(share)
    reads, runs = 1000 * (read.seconds or 0), 1000 * steps.seconds
    why = f"a batch of {read.name} is read in {reads:.1f} ms, and a step takes {runs:.1f} ms"
    return [Finding("input-bound", what, where, why, cure)]
