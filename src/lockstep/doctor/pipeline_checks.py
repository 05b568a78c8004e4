"""Checks of the input pipeline: the order of ``shuffle``, ``cache`` and ``prefetch``, and whether the step waits for data."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import keras
import numpy as np

from lockstep._keras import adapters, trainer
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.wait_meter import BOUND, describe_waiting
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.step_probe import StrategyProbes, copies, median_step_seconds
from lockstep.execution.train_functions import StepFunctions

__all__ = [
    "BATCHES",
    "ProbedBatches",
    "StepTimings",
    "check_cached_order",
    "check_input_speed",
    "check_tf_data_order",
    "measure_steps",
    "read_batches",
    "waiting_share",
]

BATCHES = 6  # to read and train on; the first step compiles and is not counted
_LEAST = 0.002  # seconds that a step waits; less is not reported
Clock = Callable[[], float]


def check_cached_order(call: FitCall) -> Iterator[Finding]:
    """Find a cache of ``InputOptions`` that fixes an order which should change in each epoch."""
    cache, shuffle = call.settings.input_options.cache, call.arguments.get("shuffle", True)
    if cache and shuffle and isinstance(call.x, keras.utils.PyDataset):
        yield Finding(
            "cache-freezes-order",
            "the cache keeps the batches of its PyDataset in the order of the first epoch, though shuffle=True",
            f"InputOptions(cache={str(cache)!r}), {call.at_fit}",
            "from the second epoch on the order is the same",
            "Use shuffle=False if that is meant, or leave out the cache",
        )


def check_tf_data_order(call: FitCall) -> Iterator[Finding]:
    """Find ``shuffle``, ``cache`` and ``prefetch`` of a ``tf.data.Dataset`` in an order in which they have no effect."""
    if not adapters.is_tf_dataset(call.x):
        return
    try:  # tf.data's debug text: one line for each transformation, from the last to the first; it may be missing.
        shown = call.x.__debug_string__()
    except AttributeError:
        return
    chain = [line.lstrip("-<_").partition("Dataset")[0] for line in shown.splitlines()]
    shuffles = [number for number, name in enumerate(chain) if name == "Shuffle"]
    if "Cache" in chain and shuffles and shuffles[0] > chain.index("Cache"):  # No shuffle after the cache.
        yield Finding(
            "shuffle-before-cache",
            "its tf.data.Dataset caches what it has shuffled",
            call.at_fit,
            "every epoch has the order of the first",
            "Put cache() before shuffle()",
        )
    if ("Cache", "Prefetch") in pairwise(chain):
        yield Finding(
            "prefetch-before-cache",
            "its tf.data.Dataset caches what it has prefetched",
            call.at_fit,
            "nothing is read ahead of the step",
            "Put prefetch() last",
        )


@dataclass(frozen=True)
class ProbedBatches:
    """The first batches of an input.

    Args:
        batches: on the host.
        seconds: median time to read one, without the first; None if there is only one.
        is_prefetched: whether batches are read while steps run.
        name: of the input.
        batches_per_pass: number of batches of a pass; None if unknown.
    """

    batches: Sequence[Any]
    seconds: float | None
    is_prefetched: bool
    name: str
    batches_per_pass: int | None


@dataclass(frozen=True)
class StepTimings:
    """Time and memory of training steps.

    Args:
        seconds: median time of a step.
        bytes: memory that the program needs on a device; None if the step is several programs.
    """

    seconds: float
    bytes: int | None


def read_batches(made: KerasInput, clock: Clock = time.perf_counter) -> ProbedBatches:
    """Read the first batches of an input and give them back.

    The global random state is restored afterwards, except for a generator: it has used the numbers for rows that it will yield.

    Args:
        made: the input; it is closed.
        clock: returns seconds.
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


def measure_steps(functions: StepFunctions, probed: ProbedBatches) -> StepTimings:
    """Measure training steps on the first batch, with copies of all variables."""
    random, steps = capture_random_state(), max(1, len(probed.batches) - 1)
    try:
        if (
            isinstance(functions.executor, SpmdExecutor)
            and functions.model.jit_compile
            and not functions.model.run_eagerly
        ):
            probes = StrategyProbes(functions.model, functions.placement, functions.executor, functions.executor)
            probe = probes.compile(probed.batches[0])
            return StepTimings(probe.seconds(steps), probe.memory)
        train, state = functions.make("train"), copies(trainer.training_state(functions.model, probed.batches[0]))
        step = lambda state, batch: train(state, iter([batch]))  # noqa: E731
        return StepTimings(median_step_seconds(step, state, probed.batches[0], steps), None)
    finally:
        restore_random_state(random)


def waiting_share(probed: ProbedBatches, steps: StepTimings) -> float:
    """Return the share of the time in which the step waits for its batch."""
    if probed.seconds is None or not probed.is_prefetched:
        return 0.0
    return max(0.0, 1 - steps.seconds / probed.seconds)


def check_input_speed(probed: ProbedBatches, steps: StepTimings, where: str) -> list[Finding]:
    """Find an input that is slower than the step."""
    share = waiting_share(probed, steps)
    if share < BOUND or (probed.seconds or 0) - steps.seconds < _LEAST:
        return []
    what, cure = describe_waiting(share)
    reads, runs = 1000 * (probed.seconds or 0), 1000 * steps.seconds
    why = f"a batch of {probed.name} is read in {reads:.1f} ms, and a step takes {runs:.1f} ms"
    return [Finding("input-bound", what, where, why, cure)]
