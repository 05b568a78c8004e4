"""The bound on staleness: which workers may run ahead of others.

For stale-synchronous training (SSP; Ho et al., NIPS 2013). A worker's clock is the number of gradients that it has pushed. With a bound
``s`` a worker may continue while the slowest active worker is at most ``s`` behind; ``variable_server`` lets the others wait in their pull.
The slowest worker may always continue, so there is no deadlock. Workers that are lost or idle are not active.
"""

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
