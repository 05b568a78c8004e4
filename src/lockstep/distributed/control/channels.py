"""Sequences of calls: on each, the workers make the same calls in the same order."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep._errors import ClusterError
from lockstep.distributed.control.wait_logger import CancelledError, is_given_up

__all__ = ["Channel", "Channels"]


@dataclass
class Channel:
    """One sequence, and the call that waits on it.

    Attributes:
        name: of the sequence.
        done: is set when the call has its answer, or will get none.
        calls: number of calls that were made.
        values: the answer.
        error: why there is none.
    """

    name: str
    done: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    values: list[Any] = field(default_factory=list)
    error: str | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, values: list[Any], error: str | None) -> None:
        """Give the waiting call its answer."""
        self.values, self.error = values, error
        self.done.set()

    def wait(self, seconds: float) -> bool:
        """Whether the answer is here; CancelledError where nobody wants it any more."""
        if self.done.wait(seconds):
            return True
        if is_given_up.get()():
            raise CancelledError(self.name)
        return False

    def begin(self) -> None:
        """One more call."""
        self.calls, self.error = self.calls + 1, None
        self.done.clear()


class Channels:
    """All lanes of a session; one is made when it is first named."""

    def __init__(self) -> None:
        self._lanes: dict[str, Channel] = {}

    def __getitem__(self, name: str) -> Channel:
        return self._lanes.setdefault(name, Channel(name))

    def forget(self, name: str) -> None:
        """Nobody will name that lane again."""
        self._lanes.pop(name, None)

    def answer(self, name: str, values: list[Any], error: str | None) -> None:
        """Give the call that waits on a lane its answer, if it still does."""
        if name in self._lanes:
            self._lanes[name].finish(values, error)

    def finish(self, error: str | None) -> None:
        """Give all calls that wait no answer but this one."""
        for lane in tuple(self._lanes.values()):
            lane.finish([], error)

    @contextmanager
    def only_here(self, name: str, what: str) -> Iterator[Channel]:
        """The lane, which serves one thread at a time; ``what`` names the call in the error of a second one."""
        lane = self[name]
        if not lane.turn.acquire(blocking=False):
            raise ClusterError(f"{what}: another thread waits on lane {name!r}; give this thread a lane of its own.")
        try:
            yield lane
        finally:
            lane.turn.release()
