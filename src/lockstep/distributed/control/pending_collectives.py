"""Collective calls that are under way, as the chief tracks them: which workers have called, which are missing, which disagree."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.control.wait_logger import listed

__all__ = ["BARRIER", "BROADCAST", "GATHER", "CollectiveReply", "PendingCollectives"]

GATHER, BROADCAST, BARRIER = "gather", "broadcast", "barrier"


@dataclass(frozen=True)
class CollectiveReply:
    """The result of a collective call for some workers.

    Args:
        to: the workers.
        channel: of the call.
        values: the result; empty after an error.
        error: why there is none.
    """

    to: tuple[int, ...]
    channel: str
    values: list[Any] = field(default_factory=list)
    error: str | None = None


@dataclass
class _PendingCollective:
    """The n-th call on a channel, which not all workers have made yet."""

    channel: str
    first: int
    call: tuple[str, str]  # Operation and topic.
    values: dict[int, Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # Workers that have called and have no result yet.
    error: str | None = None


class PendingCollectives:
    """All collective calls that are under way.

    Args:
        workers: number of workers that make each call.

    Example:
        >>> calls = PendingCollectives(2)
        >>> calls.put(0, "main", 0, "gather", "rows", 7)
        []
        >>> calls.put(1, "main", 0, "gather", "rows", 9)
        [CollectiveReply(to=(0, 1), channel='main', values=[7, 9], error=None)]
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._calls: dict[tuple[str, int], _PendingCollective] = {}
        self._left: dict[int, str] = {}

    def put(
        self, worker: int, channel: str, number: int, operation: str, topic: str, value: Any
    ) -> list[CollectiveReply]:
        """Add a worker's call ``number`` on a channel; returns the results that are complete."""
        pending = self._calls.setdefault((channel, number), _PendingCollective(channel, worker, (operation, topic)))
        pending.values[worker] = value
        pending.waiting.add(worker)
        if (operation, topic) != pending.call and pending.error is None:
            pending.error = (
                f"worker {pending.first} is at {_named(*pending.call)} where worker {worker} is at {_named(operation, topic)} "
                f"(call {number + 1} on channel {channel!r}): all workers must make the same calls in the same order."
            )
        if len(pending.values) == self._workers:
            del self._calls[channel, number]
        return self._complete([pending])

    def leave(self, worker: int, name: str) -> list[CollectiveReply]:
        """Note that a worker will make no more calls; returns the errors for those that wait for it."""
        self._left[worker] = name
        return self._complete(self._calls.values())

    def abandon(self, worker: int, channel: str) -> None:
        """Note that a worker waits no longer on a channel, and will make no more calls there."""
        for key, pending in list(self._calls.items()):
            if pending.channel == channel:
                pending.waiting.discard(worker)
                if not pending.waiting:
                    del self._calls[key]

    def missing(self, worker: int) -> dict[str, list[int]]:
        """Return the workers that have not called, for each channel on which ``worker`` waits."""
        return {
            pending.channel: [other for other in range(self._workers) if other not in pending.values]
            for pending in self._calls.values()
            if worker in pending.waiting
        }

    def _complete(self, calls: Iterable[_PendingCollective]) -> list[CollectiveReply]:
        replies = []
        for pending in calls:
            gone = [name for worker, name in self._left.items() if worker not in pending.values]
            if gone and pending.error is None:
                pending.error = (
                    f"{listed(gone)} came to the end before {_named(*pending.call)}, where others wait: all workers must make the same "
                    "calls, such as fit and evaluate, in the same order."
                )
            if pending.error is not None or len(pending.values) == self._workers:
                values = [] if pending.error else _result(pending)
                replies.append(CollectiveReply(tuple(sorted(pending.waiting)), pending.channel, values, pending.error))
                pending.waiting.clear()
        return [reply for reply in replies if reply.to]


def _result(pending: _PendingCollective) -> list[Any]:
    operation, _ = pending.call
    if operation == BARRIER:
        return []
    return [pending.values[worker] for worker in sorted(pending.values)][: 1 if operation == BROADCAST else None]


def _named(operation: str, topic: str) -> str:
    return f"{operation} {topic!r}"
