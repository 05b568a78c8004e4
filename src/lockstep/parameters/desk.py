"""Where the chief hands out work and workers bring back results, without sockets; what a worker that is lost had is handed out again.

A piece of work is a message and arrays that worker and chief understand; no code travels.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np

from lockstep._errors import ClusterError
from lockstep._logging import announce as announce_line
from lockstep.cluster import exit_codes
from lockstep.cluster.waiting import listed
from lockstep.parameters.requests import whole
from lockstep.parameters.shards import Spec
from lockstep.parameters.visits import Answer, Visit, seconds_of
from lockstep.parameters.wire import MalformedError, Message, payload_bytes
from lockstep.parameters.work import WorkQueue

__all__ = ["Desk"]

_LOOK_SECONDS = 0.25  # How often a waiting worker is looked after: it may have gone.

Result = tuple[Message, Mapping[str, np.ndarray]]


class Desk:
    """The chief's desk.

    Args:
        result_bytes: limit of the arrays of one result.
        announce: takes a line where work is done again.
        clock: gives seconds, and is not set back.

    Example:
        >>> desk = Desk()
        >>> result = desk.schedule({"batch": 3})
        >>> desk.is_idle, result.done()
        (False, False)
    """

    def __init__(
        self,
        *,
        result_bytes: int = 64 * 2**20,
        announce: Callable[[str], None] = announce_line,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._result_bytes, self._announce, self._clock = result_bytes, announce, clock
        self._queue = WorkQueue()
        self._pieces: dict[int, tuple[Message, Mapping[str, np.ndarray], Future[Result]]] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._moved = clock()
        self._kinds = {"take": self._take, "finish": self._finish, "fail": self._fail}

    # The chief's side.

    @property
    def is_idle(self) -> bool:
        """Whether all that was scheduled is done."""
        with self._changed:
            return self._queue.is_idle

    def schedule(self, what: Message, arrays: Mapping[str, np.ndarray] | None = None) -> "Future[Result]":
        """Have something done by the next worker that is free, at least once.

        Args:
            what: values of JSON that say what.
            arrays: that go with it, and must not change.

        Returns:
            Its result, later.

        Raises:
            ClusterError: something that was scheduled before has failed.
        """
        result: Future[Result] = Future()
        with self._changed:
            self._raise_failure()
            self._moved = self._clock() if self._queue.is_idle else self._moved
            self._pieces[self._queue.added] = (what, arrays or {}, result)
            self._queue.add()
            self._changed.notify_all()
        return result

    def join(self, timeout_seconds: float) -> None:
        """Wait until all that was scheduled is done.

        Args:
            timeout_seconds: limit of the time in which no piece of work is finished.

        Raises:
            ClusterError: something has failed, or nothing was finished for so long; who has it is named.
        """
        with self._changed:
            while not self._queue.is_idle:
                self._raise_failure()
                left = timeout_seconds - (self._clock() - self._moved)
                if left <= 0:
                    raise ClusterError(self._stuck(timeout_seconds), exit_codes.NO_PROGRESS)
                self._changed.wait(left)
            self._raise_failure()

    def close(self) -> None:
        """Nothing more will be scheduled: workers may go when all is done."""
        with self._changed:
            self._queue.close()
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ClusterError(self._failure, exit_codes.USER_ERROR)

    def _stuck(self, seconds: float) -> str:
        held = [f"{worker} has piece {number}" for number, worker in sorted(self._queue.held().items())]
        who = listed(held) if held else "no worker has asked for any"
        return f"No piece of work was finished for {seconds:g} s, of {self._queue.added}: {who}. Are the workers started, or stuck?"

    # The workers' side.

    def judge(self, message: Message, given: tuple[Spec, ...]) -> None:
        """Refuse a message by MalformedError, before its arrays are received."""
        if message["kind"] not in self._kinds:
            raise MalformedError(f"there is no {message['kind']!r}")
        limit = self._result_bytes if message["kind"] == "finish" else 0
        if payload_bytes(given) > limit or (given and not limit):
            raise MalformedError(f"{payload_bytes(given):,} bytes follow a {message['kind']!r}: at most {limit:,} may")

    def answer(self, visit: Visit, message: Message, arrays: Mapping[str, np.ndarray]) -> Answer:
        """Do what a worker asks; MalformedError where that cannot be asked."""
        return self._kinds[message["kind"]](visit, message, arrays)

    def leave(self, visit: Visit) -> None:
        """A worker has gone: others do what it had."""
        with self._changed:
            lost = self._queue.lose(visit)
            self._changed.notify_all()
        if lost:
            pieces = f"piece{'s' if lost[1:] else ''} {listed(map(str, lost))}"
            self._announce(f"{visit} has gone: others do {pieces} of the work again")

    def _take(self, visit: Visit, message: Message, arrays: Mapping[str, np.ndarray]) -> Answer:
        deadline = self._clock() + seconds_of(message)
        with self._changed:
            while not (self._queue.is_over or self._failure):
                number = self._queue.take(visit)
                if number is not None:
                    what, given, _ = self._pieces[number]
                    return {"kind": "task", "task": number, "what": what}, given
                left = deadline - self._clock()
                if left <= 0 or visit.is_gone():
                    return {"kind": "nothing"}, {}
                self._changed.wait(min(left, _LOOK_SECONDS))
        return {"kind": "over"}, {}

    def _finish(self, visit: Visit, message: Message, arrays: Mapping[str, np.ndarray]) -> Answer:
        number, found = whole(message, "task"), message.get("result")
        if not isinstance(found, dict):
            raise MalformedError("a 'finish' has no result")
        with self._changed:
            counts = self._queue.finish(visit, number)
            if counts:
                self._moved = self._clock()
                self._pieces.pop(number)[2].set_result((found, arrays))
            self._changed.notify_all()
        return {"kind": "noted", "counts": counts}, {}

    def _fail(self, visit: Visit, message: Message, arrays: Mapping[str, np.ndarray]) -> Answer:
        with self._changed:
            if self._failure is None:
                self._failure = (
                    f"{visit} failed in piece {whole(message, 'task')} of the work: {message.get('summary')}"
                )
            for _, _, result in self._pieces.values():
                if not result.done():
                    result.set_exception(ClusterError(self._failure, exit_codes.USER_ERROR))
            self._changed.notify_all()
        return {"kind": "noted", "counts": True}, {}
