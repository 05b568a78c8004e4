"""Where the chief hands out work and workers bring back results, without sockets; what a worker that is lost had is handed out again.

All processes make the same calls, ``fit`` say, in the same order, and count them. The chief opens a call, schedules its pieces and
closes it with a result; whoever comes late finds the call where it stands, or its result. A piece of work is a message and arrays
that both sides understand; no code travels.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from lockstep._errors import ClusterError
from lockstep._logging import log_info
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.wait_logger import WaitLogger, listed
from lockstep.parameter_server.tasks.sync_point_log import SyncPointLog
from lockstep.parameter_server.tasks.task_queue import TaskQueue
from lockstep.parameter_server.variables.array_transport import Arrays, Message, ProtocolError, payload_bytes
from lockstep.parameter_server.variables.messages import whole
from lockstep.parameter_server.variables.sharding import VariableSpec
from lockstep.parameter_server.variables.tcp_server import ClientSession, Response, seconds_of

__all__ = ["Result", "TaskDispatcher"]

_HEAR_SECONDS = 3.0
_NOTED: Response = {"kind": "noted", "counts": True}, {}
_LOOK_SECONDS = 0.25  # How often a waiting worker is looked after: it may have gone.

WhenDone = Callable[["Future[Result]"], object]
Result = tuple[Message, Arrays]


class TaskDispatcher:
    """The chief's desk.

    Args:
        timeout_seconds: how long to wait for a first worker, and for the last one to leave; a piece that one worker has had for so
            long is given to another one, too, where nothing else is to be done.
        long_seconds: limit of the time in which no piece is finished, while somebody works.
        result_bytes: limit of the arrays of one result.
        announce: takes a line where work is done again.
        clock: gives seconds, and is not set back.

    Example:
        >>> desk = TaskDispatcher()
        >>> desk.open(1)
        >>> result = desk.schedule({"batch": 3})
        >>> desk.is_idle, result.done()
        (False, False)
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = 60.0,
        long_seconds: float = 1800.0,
        result_bytes: int = 2**30,
        announce: Callable[[str], None] = log_info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._long, self._result_bytes = timeout_seconds, long_seconds, result_bytes
        self._announce, self._clock = announce, clock
        self._changed = threading.Condition()
        self._call, self._is_open, self._queue = 0, False, TaskQueue()
        self._attached: Callable[[], Arrays] = dict
        self._pieces: dict[int, tuple[Message, Arrays, Future[Result]]] = {}
        self._results: dict[int, Result] = {}
        self._facts: dict[str, Result] = {}
        self._points = SyncPointLog()
        self._present: set[ClientSession] = set()  # who is in the call that is open, or has not left it yet
        self._failure: tuple[str, int] | None = None
        self._moved = clock()
        self._kinds = {"enter": self._enter, "ask": self._ask, "leave": self._leave_call}
        self._kinds |= {"take": self._take, "finish": self._finish, "fail": self._fail}

    @property
    def is_idle(self) -> bool:
        """Whether all that was scheduled is done."""
        with self._changed:
            return self._queue.is_idle

    @property
    def has_failed(self) -> bool:
        """Whether nothing goes on any more."""
        with self._changed:
            return self._failure is not None

    @property
    def workers(self) -> int:
        """Number of workers in the call."""
        with self._changed:
            return sum(visit.peer.job == "worker" for visit in self._present)

    def open(self, call: int, attached: Callable[[], Arrays] = dict) -> None:
        """Begin a call.

        Args:
            call: its number, from 1.
            attached: gives what goes with each piece besides its own arrays, when it is taken.
        """
        with self._changed:
            self._raise_failure()
            self._call, self._is_open, self._queue, self._attached = call, True, TaskQueue(self._timeout), attached
            self._pieces, self._facts, self._moved = {}, {}, self._clock()
            self._changed.notify_all()

    def tell(self, key: str, what: Message, arrays: Arrays | None = None) -> None:
        """Have something ready for whoever asks for it in this call; a later one of that key takes its place."""
        with self._changed:
            self._facts[key] = (what, arrays or {})
            self._changed.notify_all()

    def tell_point(self, what: Message, arrays: Arrays | None = None, weights: Arrays | None = None) -> None:
        """Have this ready for whoever comes to the next point of the script, in this call or later: see :meth:`SyncPointLog.add`."""
        with self._changed:
            self._points.add(what, arrays or {}, weights)
            self._changed.notify_all()

    def schedule(
        self, what: Message, arrays: Arrays | None = None, when_done: WhenDone | None = None
    ) -> "Future[Result]":
        """Have something done by the next worker that is free, at least once.

        Args:
            what: values of JSON that say what.
            arrays: that go with it, and must not change.
            when_done: gets the result, under the lock of the desk: before whoever has done it takes another piece.

        Returns:
            Its result, later.

        Raises:
            ClusterError: something that was scheduled before has failed.
        """
        result: Future[Result] = Future()
        if when_done:
            result.add_done_callback(when_done)
        with self._changed:
            self._raise_failure()
            self._moved = self._clock() if self._queue.is_idle else self._moved
            self._pieces[self._queue.added] = (what, arrays or {}, result)
            self._queue.add()
            self._changed.notify_all()
        return result

    def join(self) -> None:
        """Wait until all that was scheduled is done; errors as for :meth:`wait`."""
        self.wait(lambda: self._queue.is_idle)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so, which is looked at whenever a piece is done.

        Raises:
            ClusterError: something has failed, no worker has come, or no piece was finished for too long; who has it is named.
        """
        notice = WaitLogger(self._announce, self._clock)
        with self._changed:
            while not until():
                self._raise_failure()
                self._raise_if_stuck(notice)
                self._changed.wait(_LOOK_SECONDS)
            self._raise_failure()

    def close(self, result: Message, arrays: Arrays | None = None) -> None:
        """End the call, and wait until everybody has its result or is gone.

        Args:
            result: for all, also for those who come later.
            arrays: that go with it, until the next call ends.
        """
        with self._changed:
            self._results = {call: (found, {}) for call, (found, _) in self._results.items()}
            self._results[self._call] = (result, arrays or {})
            self._is_open = False
            self._changed.notify_all()
            self._wait_until_gone(self._timeout)
            late, self._present = sorted(map(str, self._present)), set()
        if late:
            self._announce(f"{listed(late)} did not come for the end within {self._timeout:g} s; the chief goes on")

    def abort(self, sentence: str, exit_code: int = exit_codes.USER_ERROR) -> None:
        """Nothing goes on: everybody who asks hears why, and has a moment to hear it and to go."""
        with self._changed:
            self._break(sentence, exit_code)
            self._wait_until_gone(_HEAR_SECONDS)

    def _wait_until_gone(self, seconds: float) -> None:
        self._changed.wait_for(lambda: not self._present, seconds)

    def _break(self, sentence: str, exit_code: int) -> None:
        if self._failure is None:
            self._failure = (sentence, exit_code)
        for _, _, result in self._pieces.values():
            if not result.done():
                result.set_exception(ClusterError(*self._failure))
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ClusterError(*self._failure)

    def _raise_if_stuck(self, notice: WaitLogger) -> None:
        limit = self._long if self.workers else self._timeout
        if not self.workers:
            notice.log("a worker")
        if self._clock() - self._moved < limit:
            return
        held = [f"{listed(map(str, who))} has piece {number}" for number, who in sorted(self._queue.held().items())]
        who = listed(held) if held else "no worker has asked for any"
        raise ClusterError(
            f"No piece of work was finished for {limit:g} s, of {self._queue.added}: {who}. Are the workers started, or stuck?",
            exit_codes.NO_PROGRESS,
        )

    # The side of the others.

    def judge(self, message: Message, given: tuple[VariableSpec, ...]) -> None:
        """Refuse a message by ProtocolError, before its arrays are received."""
        if message["kind"] not in self._kinds:
            raise ProtocolError(f"there is no {message['kind']!r}")
        limit = self._result_bytes if message["kind"] == "finish" else 0
        if payload_bytes(given) > limit or (given and not limit):
            raise ProtocolError(f"{payload_bytes(given):,} bytes follow a {message['kind']!r}: at most {limit:,} may")

    def answer(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        """Do what somebody asks; ProtocolError where that cannot be asked."""
        return self._kinds[message["kind"]](visit, message, arrays)

    def leave(self, visit: ClientSession) -> None:
        """Somebody has gone: others do what a worker had; without a server nothing goes on."""
        with self._changed:
            was_present = visit in self._present
            self._present.discard(visit)
            lost = self._queue.lose(visit)
            if was_present and self._is_open:
                if visit.peer.job == "ps":
                    self._break(f"{visit} was lost, and with it the variables that it holds.", exit_codes.PEER_LOST)
                self._moved = self._clock()
            self._changed.notify_all()
        if lost and not self.has_failed:
            pieces = f"piece{'s' if lost[1:] else ''} {listed(map(str, lost))}"
            self._announce(f"{visit} has gone: others do {pieces} of the work again")

    def _answered(self, visit: ClientSession, message: Message, ready: Callable[[], Response | None]) -> Response:
        """What is ready, or what has become of the call, or nothing within the time that was asked for."""
        call, deadline = whole(message, "call"), self._clock() + seconds_of(message)
        with self._changed:
            while True:
                if self._failure:  # It stays present until it has gone: its answer is not on the way yet.
                    return {"kind": "failed", "sentence": self._failure[0], "code": self._failure[1]}, {}
                found = ready() if call == self._call and self._is_open else None
                if found := found or self._points.answer_to(message):
                    return found
                if call in self._results:
                    return {"kind": "over", "result": self._results[call][0]}, self._results[call][1]
                left = deadline - self._clock()
                if left <= 0 or visit.is_gone():
                    return {"kind": "nothing"}, {}
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _enter(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        def enter() -> Response:
            if visit not in self._present:
                self._moved = self._clock()
            self._present.add(visit)
            self._changed.notify_all()
            return {"kind": "entered"}, {}

        return self._answered(visit, message, enter)

    def _take(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        known = whole(message, "known") if "known" in message else None

        def take() -> Response | None:
            number = self._queue.take(visit, self._clock(), known)
            if number is None:
                return None
            what, given, _ = self._pieces[number]
            about = {"kind": "task", "task": number, "what": what}
            about |= {} if known is None else {"below": self._queue.below}
            return about, {**given, **self._attached()}

        return self._answered(visit, message, take)

    def _ask(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        def ask() -> Response | None:
            found = self._facts.get(str(message.get("key")))
            return None if found is None else ({"kind": "fact", "what": found[0]}, found[1])

        return self._answered(visit, message, ask)

    def _finish(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        number, found = whole(message, "task"), message.get("result")
        if not isinstance(found, dict):
            raise ProtocolError("a 'finish' has no result")
        with self._changed:
            counts = whole(message, "call") == self._call and self._queue.finish(visit, number)
            if counts:
                self._moved = self._clock()
                result = self._pieces.pop(number)[2]
                if not result.done():  # Else nothing goes on.
                    result.set_result((found, arrays))
            self._changed.notify_all()
        return {"kind": "noted", "counts": counts}, {}

    def _fail(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        with self._changed:
            where = f" in piece {whole(message, 'task')} of the work" if "task" in message else ""
            code = exit_codes.NO_PROGRESS if message.get("is_stuck") is True else exit_codes.USER_ERROR
            self._break(f"{visit} failed{where}: {message.get('summary')}", code)
        return _NOTED

    def _leave_call(self, visit: ClientSession, message: Message, arrays: Arrays) -> Response:
        with self._changed:
            self._present.discard(visit)
            self._changed.notify_all()
        return _NOTED
