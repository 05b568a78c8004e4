"""Which worker does which piece of work: each is with one live worker at most, and is done again where that worker is lost."""

import heapq
from collections.abc import Hashable

from lockstep.parameters.numbers import Done

__all__ = ["WorkQueue"]


class WorkQueue:
    """Pieces of work, by their numbers 0, 1, 2, …; used under its owner's lock.

    A worker that is lost may have done its pieces all the same: what it did is done at least once.

    Attributes:
        added: number of pieces so far.

    Example:
        >>> queue = WorkQueue()
        >>> queue.add(2)
        >>> queue.take("worker 0"), queue.take("worker 1"), queue.take("worker 1")
        (0, 1, None)
        >>> queue.lose("worker 0")
        [0]
        >>> queue.take("worker 1"), queue.finish("worker 1", 0), queue.finish("worker 1", 1), queue.is_idle
        (0, True, True, True)
    """

    def __init__(self) -> None:
        self.added = 0
        self._next = 0
        self._again: list[int] = []
        self._held: dict[int, Hashable] = {}
        self._done = Done()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether all that was added is done."""
        return len(self._done) == self.added

    @property
    def is_over(self) -> bool:
        """Whether all is done, and nothing more will be added."""
        return self._is_closed and self.is_idle

    def add(self, count: int = 1) -> None:
        """So many more pieces."""
        self.added += count

    def close(self) -> None:
        """Nothing more will be added."""
        self._is_closed = True

    def take(self, worker: Hashable) -> int | None:
        """A piece for a worker, those first that another one has lost; None: there is none now, but one may come back."""
        if self._again:
            number = heapq.heappop(self._again)
        elif self._next < self.added:
            number, self._next = self._next, self._next + 1
        else:
            return None
        self._held[number] = worker
        return number

    def finish(self, worker: Hashable, number: int) -> bool:
        """A worker has done a piece; False where that is not with it, as it was taken for lost meanwhile."""
        if self._held.get(number) != worker:
            return False
        del self._held[number]
        return self._done.add(number)

    def lose(self, worker: Hashable) -> list[int]:
        """A worker is lost: others get its pieces, which are given here."""
        lost = sorted(number for number, holder in self._held.items() if holder == worker)
        for number in lost:
            del self._held[number]
            heapq.heappush(self._again, number)
        return lost

    def held(self) -> dict[int, Hashable]:
        """Who has which piece."""
        return dict(self._held)
