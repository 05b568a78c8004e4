"""Who looks at an input: how long steps wait for it, and what somebody above may say about it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

__all__ = ["BOUND", "FitObserver", "WaitMeter", "collect_meters", "describe_waiting"]

BOUND = 0.2  # share of the time that may be spent waiting for data before it is told
_LEAST = 2.0  # seconds of waiting below which nothing is told: it is not worth a sentence

_observed: ContextVar["list[WaitMeter] | None"] = ContextVar("observed", default=None)


@contextmanager
def collect_meters() -> Iterator["list[WaitMeter]"]:
    """Gives a list that each meter joins which is made in this context."""
    made: list[WaitMeter] = []
    token = _observed.set(made)
    try:
        yield made
    finally:
        _observed.reset(token)


class WaitMeter:
    """Measures how much of the time no step could run because the next batch was not there.

    The clock starts with the third step: the first two are compiled.

    Args:
        clock: gives seconds.

    Attributes:
        waited: seconds in all, the first steps included.
        read: seconds for which the data's own code has run, in whatever thread.
        taking: seconds that the thread which starts the steps has spent on getting batches, waiting or reading, in all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps, self._waited = clock, 0, 0.0
        self._begun = clock()
        self.waited = self.read = self.taking = 0.0
        observed = _observed.get()
        if observed is not None:
            observed.append(self)

    @contextmanager
    def getting(self) -> Iterator[None]:
        """Is open while the thread which starts the steps gets the next batch."""
        begun = self._clock()
        try:
            yield
        finally:
            self.taking += self._clock() - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Is open while the next batch is waited for and no step runs."""
        begun = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - begun
            self._waited += seconds
            self.waited += seconds

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps == 3:
            self._begun, self._waited = self._clock(), 0.0

    def sentence(self) -> str | None:
        """What is to be told about it, or None."""
        passed = self._clock() - self._begun
        if self._steps <= 3 or self._waited < _LEAST or self._waited < BOUND * passed:
            return None
        what, cure = describe_waiting(self._waited / passed)
        return f"input-bound: {what}. {cure}"


def describe_waiting(share: float) -> tuple[str, str]:
    """What is found where so large a share of the time is spent waiting, and the cure."""
    return (
        f"{100 * share:.0f} % of the time is spent waiting for data",
        "Do less for each batch, read it with several workers, or keep what does not change with lockstep.InputOptions(cache=…)",
    )


class FitObserver:
    """Is shown each call of ``fit``; this one does not look."""

    def called(
        self, model: keras.Model, data: tuple[Any, Any, Any], arguments: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """See a call.

        Args:
            model: whose it is.
            data: inputs, targets and weights, as given.
            arguments: further ones, by name.

        Returns:
            What wants to see the first batch on the host, if anything.
        """
        return None
