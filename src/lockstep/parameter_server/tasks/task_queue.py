"""Which worker does which piece of work: one live worker, and another one where that is lost or takes too long."""

import heapq
from collections.abc import Hashable

from lockstep.parameter_server.tasks.completed_ids import CompletedIds

__all__ = ["TaskQueue"]


class TaskQueue:
    """Pieces of work, by their numbers 0, 1, 2, …; used under its owner's lock.

    A worker that is lost may have done its pieces all the same: what it did is done at least once, and counts once.

    Args:
        patience: seconds after which a piece is given to a second worker, where nothing else is to be done.

    Attributes:
        added: number of pieces so far.

    Example:
        >>> queue = TaskQueue()
        >>> queue.add(2)
        >>> queue.take("worker 0"), queue.take("worker 1"), queue.take("worker 1")
        (0, 1, None)
        >>> queue.lose("worker 0")
        [0]
        >>> queue.take("worker 1"), queue.finish("worker 1", 0), queue.finish("worker 1", 1), queue.is_idle
        (0, True, True, True)
    """

    def __init__(self, patience: float = float("inf")) -> None:
        self.added = 0
        self._patience = patience
        self._next = 0
        self._again: list[int] = []
        self._held: dict[int, dict[Hashable, float]] = {}  # who has it, since when
        self._done = CompletedIds()

    @property
    def is_idle(self) -> bool:
        """Whether all that was added is done."""
        return len(self._done) == self.added

    def add(self, count: int = 1) -> None:
        """So many more pieces."""
        self.added += count

    @property
    def below(self) -> int:
        """All pieces with smaller numbers are done."""
        return self._done.below

    def take(self, worker: Hashable, now: float = 0.0, known: int | None = None) -> int | None:
        """A piece for a worker, those first that another one has lost; None: there is none now, but one may come back.

        Args:
            worker: who it is for.
            now: seconds.
            known: only pieces with smaller numbers are for this worker; None: all are.
        """
        known = self.added if known is None else min(known, self.added)
        if self._again and self._again[0] < known:
            number = heapq.heappop(self._again)
        elif self._next < known:
            number, self._next = self._next, self._next + 1
        else:
            overdue = self._overdue(worker, now, known)
            if overdue is None:
                return None
            number = overdue
        self._held.setdefault(number, {})[worker] = now
        return number

    def finish(self, worker: Hashable, number: int) -> bool:
        """A worker has done a piece; False where that is not with it, or was done by another one meanwhile."""
        if worker not in self._held.get(number, {}):
            return False
        del self._held[number]
        return self._done.add(number)

    def lose(self, worker: Hashable) -> list[int]:
        """A worker is lost: others get its pieces, which are given here."""
        lost = []
        for number, holders in sorted(self._held.items()):
            if holders.pop(worker, None) is not None and not holders:
                lost.append(number)
                del self._held[number]
                heapq.heappush(self._again, number)
        return lost

    def held(self) -> dict[int, list[Hashable]]:
        """Who has which piece."""
        return {number: list(holders) for number, holders in self._held.items()}

    def _overdue(self, worker: Hashable, now: float, known: int) -> int | None:
        """A piece that one other worker has had for too long."""
        late = [
            number
            for number, holders in self._held.items()
            if number < known and len(holders) == 1 and worker not in holders
            if now - min(holders.values()) >= self._patience
        ]
        return min(late, default=None)
