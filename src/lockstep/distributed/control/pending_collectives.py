"""Calls in which all workers meet, as the chief keeps them: who has come, who is missing, who asks something else."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.control.wait_logger import listed

__all__ = ["BARRIER", "BROADCAST", "GATHER", "CollectiveReply", "PendingCollectives"]

GATHER, BROADCAST, BARRIER = "gather", "broadcast", "barrier"


@dataclass(frozen=True)
class CollectiveReply:
    """What some workers are answered.

    Args:
        to: the workers.
        lane: of the call.
        values: what they have asked for; empty after an error.
        error: why there is none.
    """

    to: tuple[int, ...]
    lane: str
    values: list[Any] = field(default_factory=list)
    error: str | None = None


@dataclass
class _PendingCollective:
    """The n-th call on a lane, whose workers are still coming."""

    lane: str
    first: int
    asks: tuple[str, str]
    values: dict[int, Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # Those that have come and were not answered yet.
    error: str | None = None


class PendingCollectives:
    """All calls that are under way.

    Args:
        workers: number of workers that must come.

    Example:
        >>> calls = PendingCollectives(2)
        >>> calls.put(0, "main", 0, "gather", "rows", 7)
        []
        >>> calls.put(1, "main", 0, "gather", "rows", 9)
        [CollectiveReply(to=(0, 1), lane='main', values=[7, 9], error=None)]
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._calls: dict[tuple[str, int], _PendingCollective] = {}
        self._left: dict[int, str] = {}

    def put(self, worker: int, lane: str, number: int, operation: str, topic: str, value: Any) -> list[CollectiveReply]:
        """A worker has come to its call ``number`` on a lane; gives what can be answered now."""
        call = self._calls.setdefault((lane, number), _PendingCollective(lane, worker, (operation, topic)))
        call.values[worker] = value
        call.waiting.add(worker)
        if (operation, topic) != call.asks and call.error is None:
            call.error = (
                f"worker {call.first} is at {_named(*call.asks)} where worker {worker} is at {_named(operation, topic)} "
                f"(call {number + 1} on lane {lane!r}): all workers must make the same calls in the same order."
            )
        if len(call.values) == self._workers:
            del self._calls[lane, number]
        return self._answered([call])

    def leave(self, worker: int, name: str) -> list[CollectiveReply]:
        """A worker will make no more calls; gives what is answered to those that wait for it."""
        self._left[worker] = name
        return self._answered(self._calls.values())

    def abandon(self, worker: int, lane: str) -> None:
        """A worker waits no longer on a lane, and will make no more calls there."""
        for key, call in list(self._calls.items()):
            if call.lane == lane:
                call.waiting.discard(worker)
                if not call.waiting:
                    del self._calls[key]

    def missing(self, worker: int) -> dict[str, list[int]]:
        """For each lane on which ``worker`` waits, the workers that have not come."""
        return {
            call.lane: [other for other in range(self._workers) if other not in call.values]
            for call in self._calls.values()
            if worker in call.waiting
        }

    def _answered(self, calls: Iterable[_PendingCollective]) -> list[CollectiveReply]:
        replies = []
        for call in calls:
            gone = [name for worker, name in self._left.items() if worker not in call.values]
            if gone and call.error is None:
                call.error = (
                    f"{listed(gone)} came to the end before {_named(*call.asks)}, where others wait: all workers must make the same "
                    "calls, such as fit and evaluate, in the same order."
                )
            if call.error is not None or len(call.values) == self._workers:
                values = [] if call.error else _result(call)
                replies.append(CollectiveReply(tuple(sorted(call.waiting)), call.lane, values, call.error))
                call.waiting.clear()
        return [reply for reply in replies if reply.to]


def _result(call: _PendingCollective) -> list[Any]:
    operation, _ = call.asks
    if operation == BARRIER:
        return []
    return [call.values[worker] for worker in sorted(call.values)][: 1 if operation == BROADCAST else None]


def _named(operation: str, topic: str) -> str:
    return f"{operation} {topic!r}"
