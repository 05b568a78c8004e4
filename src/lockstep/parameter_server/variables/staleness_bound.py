"""Staleness bound of stale-synchronous training (SSP; Ho et al., NIPS 2013): which workers may run ahead of others, without sockets.

A worker's clock is the number of gradients that it has pushed. With a bound ``s`` a worker may continue while the slowest active worker is at
most ``s`` behind. The slowest worker may always continue, so there is no deadlock. Workers that are lost or idle are not active.
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
            self.max_staleness = whole_number("max_staleness", max_staleness, least=0)
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


class CompletedIds:
    """Set of the completed ones of the numbers 0, 1, 2, …; small while they complete nearly in order.

    Args:
        below: all smaller numbers are complete from the beginning.

    Attributes:
        below: all smaller numbers are complete; this one is not.

    Example:
        >>> completed = CompletedIds()
        >>> completed.add(0), completed.add(2), completed.add(2), completed.below, 2 in completed
        (True, True, False, 1, True)
        >>> completed.add(1), completed.below
        (True, 3)
        >>> completed.raise_to(7), completed.below, completed.add(6)
        (None, 7, False)
    """

    def __init__(self, below: int = 0) -> None:
        self.below = below
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above

    def __len__(self) -> int:
        return self.below + len(self._above)

    def raise_to(self, below: int) -> None:
        """Mark all smaller numbers as complete, including those that were never added."""
        if below > self.below:
            self.below = below
            self._above = {number for number in self._above if number >= below}
            self._compact()

    def add(self, number: int) -> bool:
        """Mark a number as complete; return False if it already was."""
        if number in self:
            return False
        self._above.add(number)
        self._compact()
        return True

    def _compact(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1
