"""Staleness of gradients: its bound, which says which workers may run ahead of others, and its figures in the logs of ``fit``.

For stale-synchronous training (SSP; Ho et al., NIPS 2013). A worker's clock is the number of gradients that it has pushed. With a bound
``s`` a worker may continue while the slowest active worker is at most ``s`` behind; ``variable_server`` lets the others wait in their pull.
The slowest worker may always continue, so there is no deadlock. Workers that are lost or idle are not active.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import keras

from lockstep._errors import whole_number


class StalenessBound:
    """Clocks of all workers, as one server sees them; used under the lock of its owner.

    Args:
        max_staleness: by how many gradients a worker may be ahead of the slowest; None: no limit.

    Raises:
        OptionError: ``max_staleness`` is not a whole number of at least 0.

    Example:
        >>> bound = StalenessBound(max_staleness=1)
        >>> for name in ("worker 0", "worker 1"):
        ...     bound.join(name)
        >>> bound.tick("worker 0")
        >>> bound.blocking_workers("worker 0")
        []
        >>> bound.tick("worker 0")
        >>> bound.blocking_workers("worker 0")
        ['worker 1']
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.max_staleness = max_staleness
        if max_staleness is not None:
            self.max_staleness = whole_number("max_staleness", max_staleness, minimum=0)
        self._clocks: dict[object, int] = {}
        self._paused: dict[object, int] = {}
        self._newest = 0

    def join(self, worker: object) -> None:
        """Make a worker active, with the clock of the slowest one, or with its own clock before a pause if that is larger."""
        slowest = min(self._clocks.values(), default=self._newest)
        self._clocks[worker] = max(slowest, self._paused.pop(worker, 0))

    def pause(self, worker: object) -> None:
        """Make a worker inactive while it has no task: no other worker waits for it until it joins again."""
        if worker in self._clocks:
            self._paused[worker] = self._clocks.pop(worker)

    def leave(self, worker: object) -> None:
        """Forget a worker that does not come back."""
        self._clocks.pop(worker, None)
        self._paused.pop(worker, None)

    def tick(self, worker: object) -> None:
        """Count a gradient that a worker has pushed."""
        if worker not in self._clocks:
            self.join(worker)
        self._clocks[worker] += 1
        self._newest = max(self._newest, self._clocks[worker])

    def blocking_workers(self, worker: object) -> list[str]:
        """Return the names of the workers that a worker has to wait for; if there are none, it may continue."""
        if worker not in self._clocks:
            self.join(worker)
        if self.max_staleness is None:
            return []
        least = self._clocks[worker] - self.max_staleness
        return [str(other) for other, clock in self._clocks.items() if clock < least]


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
        """Count a finished batch, with a report for each of its parts."""
        self.batches += 1
        self.traffic += sum(report["bytes"] for report in reports)

    def set_staleness(self, statistics: list[dict[str, Any]]) -> None:
        """Take over what the servers have counted."""
        self.staleness = Counter(dict(statistics[0]["staleness"]))


class StalenessMetrics(keras.callbacks.Callback):
    """Adds ``updates_per_sec``, ``bytes_per_sec`` and ``staleness`` (its mean) to the logs of each epoch, and logs its distribution."""

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
        self._before, self._begun, self._ended = deepcopy(self._count()), self._clock(), None

    def on_test_begin(self, logs: Any = None) -> None:
        """Take the counters when validation begins: the training of this epoch has ended."""
        self._ended = deepcopy(self._count()), self._clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
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
            f"gradients by staleness: {shown or 'none'}"
        )
