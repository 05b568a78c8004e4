"""Measurement of how long steps wait for batches, and the advice for input-bound training."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["BOUND", "WaitMeter", "collect_meters", "describe_waiting"]

BOUND = 0.2  # share of the time spent waiting for data from which on advice is given
_LEAST = 2.0  # seconds of waiting below which no advice is given

_collected: ContextVar["list[WaitMeter] | None"] = ContextVar("collected", default=None)


@contextmanager
def collect_meters() -> Iterator["list[WaitMeter]"]:
    """Yield a list to which each meter is added that is made in this context."""
    made: list[WaitMeter] = []
    token = _collected.set(made)
    try:
        yield made
    finally:
        _collected.reset(token)


class WaitMeter:
    """Measures how much of the time no step could run because the next batch was missing.

    The clock starts with the third step: the first two are compiled.

    Args:
        clock: returns seconds.

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
    def waiting(self) -> Iterator[None]:
        """Measure while no step runs and the next batch is waited for."""
        begun = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - begun
            self._waited += seconds
            self.waited += seconds

    def step(self) -> None:
        """Count a step, which begins now."""
        self._steps += 1
        if self._steps == 3:
            self._begun, self._waited = self._clock(), 0.0

    def advice(self) -> str | None:
        """Return the advice for the user, or None if the training is not input-bound."""
        passed = self._clock() - self._begun
        if self._steps <= 3 or self._waited < _LEAST or self._waited < BOUND * passed:
            return None
        problem, fix = describe_waiting(self._waited / passed)
        return f"input-bound: {problem}. {fix}"


def describe_waiting(share: float) -> tuple[str, str]:
    """Return the problem and the fix if so large a share of the time is spent waiting."""
    return (
        f"{100 * share:.0f} % of the time is spent waiting for data",
        "Do less for each batch, read it with several workers, or keep what does not change with lockstep.InputOptions(cache=…)",
    )
