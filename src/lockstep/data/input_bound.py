"""How long steps wait for batches, and the advice if training is input-bound."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import jax

from lockstep._keras.patches import value_in_context

BOUND = 0.2  # share of the time spent waiting for data from which on advice is given
_MIN_WAITED_SECONDS = 2.0  # of waiting, below which no advice is given
_collected: ContextVar["list[WaitMeter] | None"] = ContextVar("collected", default=None)


@contextmanager
def collect_meters() -> Iterator["list[WaitMeter]"]:
    """Yield a list to which each meter is added that is made in this context."""
    made: list[WaitMeter] = []
    with value_in_context(_collected, made):
        yield made


class WaitMeter:
    """Measures how much of the time no step could run because the next batch was missing.

    The clock starts with the third step: the first two are compiled.

    Attributes:
        waited: seconds in all, the first steps included.
        read: seconds for which the data's code has run, in any thread.
        taking: seconds that the thread which starts the steps has spent on getting batches, waiting or reading, in all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps, self._waited = clock, 0, 0.0
        self._begun = clock()
        self.waited = self.read = self.taking = 0.0
        collected = _collected.get()
        if collected is not None:
            collected.append(self)

    @contextmanager
    def getting(self) -> Iterator[None]:
        """Measure while the thread which starts the steps gets the next batch."""
        begun = self._clock()
        try:
            yield
        finally:
            self.taking += self._clock() - begun

    @contextmanager
    def waiting(self, after: Any = None) -> Iterator[None]:
        """Measure while the next batch is waited for and no step runs; until ``after``, the result of the last step, is there, the devices are
        at work.
        """
        begun, idle_from = self._clock(), self._time_of(after)
        try:
            yield
        finally:
            seconds = self._clock() - max(begun, idle_from[0]) if idle_from else 0.0
            self._waited += seconds
            self.waited += seconds

    def _time_of(self, result: Any) -> list[float]:
        """Return a list to which a thread adds the time at which a result is there."""
        if result is None:
            return [self._clock()]
        times: list[float] = []

        def wait() -> None:
            with suppress(RuntimeError):  # The code that reads the result gets its error.
                jax.block_until_ready(result)
            times.append(self._clock())

        threading.Thread(target=wait, name="lockstep-step-end", daemon=True).start()
        return times

    def step(self) -> None:
        """Count a step, which begins now."""
        self._steps += 1
        if self._steps == 3:
            self._begun, self._waited = self._clock(), 0.0

    def advice(self) -> str | None:
        """Return the advice for the user, or None if the training is not input-bound."""
        passed = self._clock() - self._begun
        if self._steps <= 3 or self._waited < _MIN_WAITED_SECONDS or self._waited < BOUND * passed:
            return None
        problem, fix = describe_waiting(self._waited / passed)
        return f"input-bound: {problem}. {fix}"


def describe_waiting(share: float) -> tuple[str, str]:
    """Return the problem and the fix if so large a share of the time is spent waiting."""
    return (
        f"{100 * share:.0f} % of the time is spent waiting for data",
        "Do less for each batch, read it with several workers, or keep what does not change with lockstep.InputOptions(cache=…)",
    )
