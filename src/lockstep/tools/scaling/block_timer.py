"""The clock of one training: blocks of steps with the devices at rest at both ends, and the metric between them.

It stands around the function that runs a step, in the thread of Keras's loop. A callback would not do: Keras reads the logs of each
step for it, and so waits for each step.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import keras

from lockstep._keras import trainer
from lockstep.execution.train_functions import STATE
from lockstep.tools.scaling.results import CurvePoint

__all__ = ["WARM", "BlockTimer", "block_ends", "clocked"]

WARM = 3  # steps that are not timed: they compile
POINTS = 8  # of a curve, and blocks

StepFunction = Callable[[Any, Any], tuple[Any, Any]]


def block_ends(steps: int | None) -> list[int]:
    """After which steps a block ends.

    Args:
        steps: in all; None where nobody knows, and blocks become longer and longer.
    """
    if steps is None:
        return [WARM + 10 * 2**power for power in range(30)]
    timed = max(0, steps - WARM)
    return sorted({WARM + -(-timed * part // POINTS) for part in range(1, POINTS + 1)} - {WARM})


class BlockTimer:
    """Counts and times the steps of one training.

    Args:
        steps: of the whole training, or None.
        limit: seconds after which the training ends.
        evaluate: gives the metric, with the clock stopped.
        taking: gives the seconds that were spent on getting batches, so far.
        before: the metric before the first step.
        of_epoch: steps of an epoch, or None.
    """

    def __init__(
        self,
        steps: int | None,
        limit: float,
        evaluate: Callable[[], float] | None,
        taking: Callable[[], float],
        before: float | None = None,
        of_epoch: int | None = None,
    ) -> None:
        self._ends, self._limit, self._evaluate, self._taking = block_ends(steps), limit, evaluate, taking
        self._born, self._of_epoch = time.perf_counter(), of_epoch
        self.steps, self.lengths = 0, list[int]()
        self.seconds, self.taken = list[float](), list[float]()
        self.values = [] if before is None else [(0, before)]  # steps, metric
        self.is_cut = False

    def begin(self) -> None:
        """A block begins now."""
        self._first, self._taken_before, self._begun = self.steps, self._taking(), time.perf_counter()

    def stepped(self, result: Any, count: int) -> bool:
        """``count`` steps, or those left of the epoch, were started, and gave ``result``; returns whether a block has ended with them."""
        if self._of_epoch:
            count = min(count, self._of_epoch - self.steps % self._of_epoch)
        before, self.steps = self.steps, self.steps + count
        self.is_cut = time.perf_counter() - self._born > self._limit
        if before < WARM <= self.steps:
            jax.block_until_ready(result)
            self.begin()
            return False
        if not (self._ends and self.steps >= self._ends[0]) and not (self.is_cut and self.steps > WARM):
            return False
        jax.block_until_ready(result)
        seconds, count = time.perf_counter() - self._begun, self.steps - self._first
        self._ends = [end for end in self._ends if end > self.steps]
        self.seconds.append(seconds)
        self.lengths.append(count)
        self.taken.append(self._taking() - self._taken_before)
        return True

    def look(self) -> None:
        """Evaluate, between two blocks."""
        if self._evaluate:
            self.values.append((self.steps, self._evaluate()))

    def curve(self, batch: int) -> tuple[CurvePoint, ...]:
        """The metric by rows and by time; the first steps, which compile, count as much as the others."""
        usual = sum(self.seconds) / max(1, sum(self.lengths))
        times = dict[int, float]()
        steps, seconds = WARM, WARM * usual
        for length, block in zip(self.lengths, self.seconds, strict=True):
            steps, seconds = steps + length, seconds + block
            times[steps] = seconds
        return tuple(CurvePoint(at * batch, times.get(at, at * usual), value) for at, value in self.values)


def clocked(model: keras.Model, function: StepFunction, clock: BlockTimer) -> StepFunction:
    """The training function of a model, with a clock around it."""

    def timed(state: Any, iterator: Any) -> tuple[Any, Any]:
        logs, state = function(state, iterator)
        if clock.stepped((logs, state), model.steps_per_execution):
            trainer.keep_values(model, STATE["train"], state)
            clock.look()
            model.stop_training = model.stop_training or clock.is_cut
            clock.begin()
        return logs, state

    return timed
