"""Metrics of asynchronous training: updates and bytes per second, and the staleness of the values that gradients were computed with."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import keras


class UpdateCounters:
    """Counters of one call of ``fit``; they only grow.

    Attributes:
        batches: number of finished batches.
        traffic: bytes that workers have sent to servers and received from them.
        staleness: by number of updates between a pull and its push, the number of gradients at server 0.
    """

    def __init__(self) -> None:
        self.batches = self.traffic = 0
        self.staleness: Counter[int] = Counter()

    def add(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Count a finished batch.

        Args:
            reports: of the workers, one for each part of the batch.
        """
        self.batches += 1
        self.traffic += sum(report["bytes"] for report in reports)

    def set_staleness(self, statistics: list[dict[str, Any]]) -> None:
        """Take over what the servers have counted."""
        self.staleness = Counter(dict(statistics[0]["staleness"]))


class StalenessMetrics(keras.callbacks.Callback):
    """Adds ``updates_per_sec``, ``bytes_per_sec`` and ``staleness`` (its mean) to the logs of each epoch, and logs its distribution.

    Args:
        count: gives the current counters.
        log: takes a line.
        clock: gives seconds, and is not set back.
    """

    def __init__(
        self,
        count: Callable[[], UpdateCounters],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._count, self._log, self._clock = count, log, clock
        self._before, self._begun = UpdateCounters(), 0.0
        self._ended: tuple[UpdateCounters, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        self._before, self._begun, self._ended = deepcopy(self._count()), self._clock(), None

    def on_test_begin(self, logs: Any = None) -> None:
        """Take the counters when validation begins: the training of this epoch has ended."""
        self._ended = deepcopy(self._count()), self._clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        now, end = self._ended or (deepcopy(self._count()), self._clock())
        batches, seconds = now.batches - self._before.batches, end - self._begun
        distribution = now.staleness - self._before.staleness
        if logs is None or not batches:
            return
        logs["updates_per_sec"] = batches / seconds
        logs["bytes_per_sec"] = (now.traffic - self._before.traffic) / seconds
        if distribution:
            logs["staleness"] = sum(age * count for age, count in distribution.items()) / distribution.total()
        shown = ", ".join(f"{age}: {count}" for age, count in sorted(distribution.items()))
        self._log(
            f"epoch {epoch + 1}: {batches} updates, {logs['updates_per_sec']:.1f} a second, {logs['bytes_per_sec'] / 1e6:.3g} MB/s; "
            f"gradients by the number of updates that they missed: {shown or 'none'}"
        )
