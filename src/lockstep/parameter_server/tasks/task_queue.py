"""Task queue: assigns each task to one live worker, and reassigns it if that worker is lost or takes too long."""

import heapq
from collections.abc import Hashable

__all__ = ["CompletedIds", "TaskQueue"]


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


class TaskQueue:
    """Tasks by their numbers 0, 1, 2, …; used under the lock of its owner.

    A lost worker may have done its tasks before it was lost. So a task is done at least once, and counts once.

    Args:
        patience: seconds after which a task is also assigned to a second worker, if no other task is left.

    Attributes:
        added: number of tasks so far.

    Example:
        >>> queue = TaskQueue()
        >>> queue.add(2)
        >>> queue.take("worker 0"), queue.take("worker 1"), queue.take("worker 1")
        (0, 1, None)
        >>> queue.release("worker 0")
        [0]
        >>> queue.take("worker 1"), queue.finish("worker 1", 0), queue.finish("worker 1", 1), queue.is_idle
        (0, True, True, True)
    """

    def __init__(self, patience: float = float("inf")) -> None:
        self.added = 0
        self._patience = patience
        self._next = 0
        self._released: list[int] = []
        self._assigned: dict[int, dict[Hashable, float]] = {}  # by task: its workers, and since when
        self._completed = CompletedIds()

    @property
    def is_idle(self) -> bool:
        """Whether all tasks are complete."""
        return len(self._completed) == self.added

    def add(self, count: int = 1) -> None:
        """Add tasks."""
        self.added += count

    @property
    def below(self) -> int:
        """Number below which all tasks are complete."""
        return self._completed.below

    def take(self, worker: Hashable, now: float = 0.0, known: int | None = None) -> int | None:
        """Assign a task to a worker, first those that were released; return None if there is none now.

        Args:
            worker: that asks.
            now: seconds.
            known: assign only tasks with smaller numbers; None: all.
        """
        known = self.added if known is None else min(known, self.added)
        if self._released and self._released[0] < known:
            number = heapq.heappop(self._released)
        elif self._next < known:
            number, self._next = self._next, self._next + 1
        else:
            overdue = self._overdue(worker, now, known)
            if overdue is None:
                return None
            number = overdue
        self._assigned.setdefault(number, {})[worker] = now
        return number

    def finish(self, worker: Hashable, number: int) -> bool:
        """Mark a task as complete; return False if it is not assigned to the worker, or was already completed by another one."""
        if worker not in self._assigned.get(number, {}):
            return False
        del self._assigned[number]
        return self._completed.add(number)

    def release(self, worker: Hashable) -> list[int]:
        """Release the tasks of a lost worker for reassignment, and return their numbers."""
        released = []
        for number, workers in sorted(self._assigned.items()):
            if workers.pop(worker, None) is not None and not workers:
                released.append(number)
                del self._assigned[number]
                heapq.heappush(self._released, number)
        return released

    def assignments(self) -> dict[int, list[Hashable]]:
        """Return the workers of each assigned task."""
        return {number: list(workers) for number, workers in self._assigned.items()}

    def _overdue(self, worker: Hashable, now: float, known: int) -> int | None:
        """Return a task that one other worker has had for too long."""
        late = [
            number
            for number, workers in self._assigned.items()
            if number < known and len(workers) == 1 and worker not in workers
            if now - min(workers.values()) >= self._patience
        ]
        return min(late, default=None)
