"""How far workers may run ahead of each other: the clocks of stale-synchronous training (Ho et al., NIPS 2013), without sockets.

A worker's clock is the number of gradients that it has pushed. With a bound ``s`` it may go on while the slowest worker that takes part
is at most ``s`` behind. The slowest one may always go on, so somebody always can. Who dies or has nothing to do takes no part.
"""

from collections.abc import Callable

from lockstep._errors import whole_number

__all__ = ["StalenessBound"]


class StalenessBound:
    """The clocks of all workers, as one server sees them; used under its lock.

    Args:
        max_staleness: by how many gradients a worker may be ahead of the slowest; None: by any number.

    Raises:
        OptionError: it is no whole number of at least 0.

    Example:
        >>> clocks = StalenessBound(max_staleness=1)
        >>> for name in ("worker 0", "worker 1"):
        ...     clocks.join(name)
        >>> clocks.tick("worker 0")
        >>> clocks.holds_up("worker 0")
        []
        >>> clocks.tick("worker 0")
        >>> clocks.holds_up("worker 0")
        ['worker 1']
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.max_staleness = max_staleness
        if max_staleness is not None:
            self.max_staleness = whole_number("max_staleness", max_staleness, least=0)
        self._clocks: dict[object, int] = {}
        self._resting: dict[object, int] = {}
        self._newest = 0

    def join(self, worker: object) -> None:
        """A worker takes part, from where the slowest one is; one that has rested, from where it was if that is further."""
        slowest = min(self._clocks.values(), default=self._newest)
        self._clocks[worker] = max(slowest, self._resting.pop(worker, 0))

    def rest(self, worker: object) -> None:
        """A worker has nothing to do for a while: nobody waits for it, until it joins again."""
        if worker in self._clocks:
            self._resting[worker] = self._clocks.pop(worker)

    def leave(self, worker: object) -> None:
        """A worker does not come back: nobody waits for it."""
        self._clocks.pop(worker, None)
        self._resting.pop(worker, None)

    def tick(self, worker: object) -> None:
        """A worker has pushed a gradient."""
        if worker not in self._clocks:
            self.join(worker)
        self._clocks[worker] += 1
        self._newest = max(self._newest, self._clocks[worker])

    def holds_up(self, worker: object, name: Callable[[object], str] = str) -> list[str]:
        """Names of those for whom a worker has to wait before it goes on; none: it may."""
        if worker not in self._clocks:
            self.join(worker)
        if self.max_staleness is None:
            return []
        least = self._clocks[worker] - self.max_staleness
        return [name(other) for other, clock in self._clocks.items() if clock < least]
