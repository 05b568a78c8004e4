"""What slows an input down or freezes it, and the cure: one sentence each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from lockstep import _keras
from lockstep.data.cache import CachedSource
from lockstep.data.sources import DatasetSource, Source

__all__ = ["Meter", "about_kept_order", "about_order", "about_rows", "meters_observed"]

_BOUND = 0.2  # share of the time that may be spent waiting for data before it is told
_LEAST = 2.0  # seconds of waiting below which nothing is told: it is not worth a sentence

_observed: ContextVar["list[Meter] | None"] = ContextVar("observed", default=None)


@contextmanager
def meters_observed() -> Iterator["list[Meter]"]:
    """Gives a list that each meter joins which is made in this context."""
    made: list[Meter] = []
    token = _observed.set(made)
    try:
        yield made
    finally:
        _observed.reset(token)


class Meter:
    """Measures how much of the time no step could run because the next batch was not there.

    The clock starts with the third step: the first two are compiled.

    Args:
        clock: gives seconds.

    Attributes:
        taking: seconds that the thread which starts the steps has spent on getting batches, waiting or reading, in all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps, self._waited = clock, 0, 0.0
        self._begun = clock()
        self.taking = 0.0
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
            self._waited += self._clock() - begun

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps == 3:
            self._begun, self._waited = self._clock(), 0.0

    def sentence(self) -> str | None:
        """What is to be told about it, or None."""
        passed = self._clock() - self._begun
        if self._steps <= 3 or self._waited < _LEAST or self._waited < _BOUND * passed:
            return None
        return (
            f"input-bound: {100 * self._waited / passed:.0f} % of the time is spent waiting for data. Do less for each batch, read it "
            "with several workers, or keep what does not change with lockstep.InputOptions(cache=…)"
        )


def about_rows(rows: int, replicas: int) -> str | None:
    """About a batch with fewer rows than there are replicas."""
    if rows >= replicas:
        return None
    return (
        f"a batch of {rows} rows leaves {replicas - rows} of {replicas} replicas idle; the batch size is that of the global "
        f"batch: make it {replicas} or more"
    )


def about_kept_order(source: Source, shuffle: bool | str) -> list[str]:
    """About a cache that keeps batches whose order should change."""
    if not shuffle or not isinstance(source, CachedSource) or not isinstance(source.source, DatasetSource):
        return []
    return [
        "the cache keeps the batches of its PyDataset in the order of the first epoch, though shuffle=True; say shuffle=False "
        "where that is meant, or leave out the cache"
    ]


def about_order(x: Any) -> list[str]:
    """About ``shuffle``, ``cache`` and ``prefetch`` of a ``tf.data.Dataset`` in an order that defeats them."""
    if not _keras.is_tf_dataset(x):
        return []
    try:  # The tree that tf.data shows for debugging, one line each, from the last step to the first; it may be missing.
        shown = x.__debug_string__()
    except AttributeError:
        return []
    chain = [line.lstrip("-<_").partition("Dataset")[0] for line in shown.splitlines()]
    found = []
    if "Cache" in chain and "Shuffle" in chain[chain.index("Cache") :]:
        found.append(
            "its tf.data.Dataset caches what it has shuffled, so every epoch has the order of the first; put cache() before "
            "shuffle()"
        )
    if ("Cache", "Prefetch") in pairwise(chain):
        found.append(
            "its tf.data.Dataset caches what it has prefetched, so nothing is read ahead of the step; put prefetch() last"
        )
    return found
