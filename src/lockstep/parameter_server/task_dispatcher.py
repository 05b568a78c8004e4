"""Tasks at the chief: their queue, and the dispatcher that hands them to workers and reassigns those of lost ones.

All processes make the same calls, such as ``fit``, in the same order, and count them. The chief opens a call, schedules its tasks and
closes it with a result; a process that comes late finds the open call, or its result. A task is a message and arrays that both sides
understand; code is never transferred.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future

from lockstep._array_encoding import ArraySpec
from lockstep._errors import NO_PROGRESS, PEER_LOST, USER_ERROR, ClusterError
from lockstep._logging import WaitLogger, listed, log_info
from lockstep.distributed.control.heartbeat import LONG_SECONDS
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.array_transport import Arrays, Message, payload_bytes
from lockstep.parameter_server.rpc import POLL_SECONDS, ClientSession, Response, read_whole_number, seconds_of
from lockstep.parameter_server.variable_store import CompletedIds


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


_ABORT_SECONDS = 3.0  # How long an abort waits until all processes have received it.
_ENTRY_BYTES = 256  # Least size of an entry in the log of sync points.
_ACKNOWLEDGED: Response = {"kind": "noted"}, {}

Result = tuple[Message, Arrays]
WhenDone = Callable[["Future[Result]"], object]


class SyncPointLog:
    """What the chief has published at the sync points 0, 1, 2, … of the script, for processes that reach them later.

    The oldest entries are dropped if all together are too large. Weights are dropped before: without them a late worker only computes with
    older values. Used under the lock of its owner.

    Args:
        limit_bytes: limit of the arrays of all entries, with a minimum for each; weights have the same limit once more. The newest of
            both are kept, whatever their size.

    Example:
        >>> log = SyncPointLog()
        >>> log.add({"done": False}, {})
        >>> log.response_to({"kind": "ask", "point": 0})
        ({'kind': 'published', 'what': {'done': False}}, {})
        >>> log.response_to({"kind": "ask", "point": 1}) is None
        True
    """

    def __init__(self, limit_bytes: int = 2**26) -> None:
        self._limit, self._bytes, self._first = limit_bytes, 0, 0
        self._entries: deque[Result] = deque()
        self._weights: dict[int, Arrays] = {}  # by number of the point, rising

    @property
    def count(self) -> int:
        """Number of points that were added."""
        return self._first + len(self._entries)

    def add(self, what: Message, arrays: Arrays, weights: Arrays | None = None) -> None:
        """Add the next point, which is kept, whatever its size.

        Args:
            what: description, as JSON values.
            arrays: that belong to it.
            weights: further arrays, which may be dropped earlier.
        """
        if weights is not None:
            self._weights[self.count] = weights
            while len(self._weights) > 1 and sum(map(_size_of, self._weights.values())) > self._limit:
                del self._weights[next(iter(self._weights))]
        self._entries.append((what, arrays))
        self._bytes += _size_of(arrays)
        while self._bytes > self._limit and len(self._entries) > 1:
            self._bytes -= _size_of(self._entries.popleft()[1])
            self._first += 1

    def response_to(self, message: Message) -> Response | None:
        """Return the entry of the ``"point"`` of a request; None if the request has none, or the chief has not reached it."""
        if "point" not in message:
            return None
        number = read_whole_number(message, "point")
        if number >= self.count:
            return None
        if number < self._first:
            return {"kind": "published", "what": {"is_forgotten": True}}, {}
        what, arrays = self._entries[number - self._first]
        return {"kind": "published", "what": what}, {**arrays, **self._weights.get(number, {})}


def missing_schedule(process: str, known: int) -> str:
    """Return the error of a process whose script has scheduled fewer functions than that of the chief before the same sync point."""
    return (
        f"The script of {process} has scheduled {known} function{'' if known == 1 else 's'} before it waits, and that of the chief more. "
        "Fix: make the same calls of schedule, join, done, fetch and evaluate on all processes, also where strategy.is_chief is false."
    )


def _size_of(arrays: Arrays) -> int:
    return _ENTRY_BYTES + sum(array.nbytes for array in arrays.values())


class TaskDispatcher:
    """Task queue of the chief with its request handler.

    Args:
        timeout_seconds: how long to wait for a first worker, and for the last process to leave a call; a task that one worker has had for
            so long is also assigned to a second one, if no other task is left.
        long_seconds: limit of the time in which no task is finished, while there are workers.
        result_bytes: limit of the arrays of one result.
        log: takes a line if a task is reassigned.
        clock: gives seconds, and is not set back.

    Example:
        >>> dispatcher = TaskDispatcher()
        >>> dispatcher.open(1)
        >>> result = dispatcher.schedule({"batch": 3})
        >>> dispatcher.is_idle, result.done()
        (False, False)
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = 60.0,
        long_seconds: float = LONG_SECONDS,
        result_bytes: int = 2**30,
        log: Callable[[str], None] = log_info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._long, self._result_bytes = timeout_seconds, long_seconds, result_bytes
        self._log, self._clock = log, clock
        self._changed = threading.Condition()
        self._call, self._is_open, self._queue = 0, False, TaskQueue()
        self._attached: Callable[[], Arrays] = dict
        self._tasks: dict[int, tuple[Message, Arrays, Future[Result]]] = {}
        self._results: dict[int, tuple[Message, Arrays, Arrays]] = {}  # with the arrays that are kept for longer
        self._published: dict[str, Result] = {}
        self._sync_points = SyncPointLog()
        self._present: set[ClientSession] = set()  # that have entered the open call, or have not left the last one yet
        self._connected: dict[ClientSession, int] = {}  # with the number of the last call that each has left
        self._seen: set[tuple[str, int]] = set()  # job and index of each process that has been connected
        self._began = clock()
        self._failure: tuple[str, int] | None = None
        self._loss = ""  # Which process a worker has lost since the last progress.
        self._last_progress = self._acted_at = self._waits_since = clock()  # Of the workers, and of the chief.
        self._handlers = {"enter": self._enter, "ask": self._ask, "leave": self._leave_call}
        self._handlers |= {"take": self._take, "finish": self._finish, "fail": self._fail}

    @property
    def is_idle(self) -> bool:
        """Whether all scheduled tasks are done."""
        with self._changed:
            return self._queue.is_idle

    @property
    def has_failed(self) -> bool:
        """Whether a failure has ended all calls."""
        with self._changed:
            return self._failure is not None

    @property
    def worker_count(self) -> int:
        """Number of workers in the call."""
        with self._changed:
            return sum(session.peer.job == "worker" for session in self._present)

    # Methods for the chief.

    def note_progress(self) -> None:
        """Note that the chief's program does something; its requests to this object count, too."""
        self._acted_at = self._clock()

    def open(self, call: int, attached: Callable[[], Arrays] = dict) -> None:
        """Begin a call.

        Args:
            call: its number, from 1.
            attached: gives further arrays for each task when a worker takes it; called under the lock.
        """
        self.note_progress()
        with self._changed:
            self.raise_failure()
            self._call, self._is_open, self._queue, self._attached = call, True, TaskQueue(self._timeout), attached
            self._tasks, self._published, self._last_progress, self._loss = {}, {}, self._clock(), ""
            self._changed.notify_all()

    def publish(self, key: str, what: Message, arrays: Arrays | None = None) -> None:
        """Make a message available under a key during this call; replaces an earlier one."""
        self.note_progress()
        with self._changed:
            self._published[key] = (what, arrays or {})
            self._changed.notify_all()

    def publish_sync_point(self, what: Message, arrays: Arrays | None = None, weights: Arrays | None = None) -> None:
        """Publish a message at the next sync point of the script, in this call or later: see :meth:`SyncPointLog.add`."""
        self.note_progress()
        with self._changed:
            self._sync_points.add(what, arrays or {}, weights)
            self._changed.notify_all()

    def schedule(
        self, what: Message, arrays: Arrays | None = None, when_done: WhenDone | None = None
    ) -> "Future[Result]":
        """Schedule a task for the next free worker; it is run at least once.

        Args:
            what: description, as JSON values.
            arrays: that belong to it, and must not change.
            when_done: gets the result under the lock of the dispatcher, before the worker takes another task.

        Returns:
            Its result, later.

        Raises:
            ClusterError: a task that was scheduled before has failed.
        """
        self.note_progress()
        result: Future[Result] = Future()
        if when_done:
            result.add_done_callback(when_done)
        with self._changed:
            self.raise_failure()
            self._last_progress = self._clock() if self._queue.is_idle else self._last_progress
            self._tasks[self._queue.added] = (what, arrays or {}, result)
            self._queue.add()
            self._changed.notify_all()
        return result

    def join(self) -> None:
        """Wait until all scheduled tasks are done; errors as for :meth:`wait_until`."""
        self.wait_until(lambda: self._queue.is_idle)

    def wait_until(self, condition: Callable[[], bool], is_poll: bool = False) -> None:
        """Wait until a condition holds, which is evaluated under the lock whenever a task is done.

        Args:
            condition: returns whether to stop.
            is_poll: whether this is one of many short waits, whose time limit begins with the first one after the last finished task.

        Raises:
            ClusterError: a task has failed, no worker has come, or no task was finished for too long; the message names its worker.
        """
        wait_logger, is_met = WaitLogger(self._log, self._clock), False
        if not is_poll or self._waits_since <= self._last_progress:
            self._waits_since = self._clock()  # Before it, the scripts may have done something else.
        while not is_met:
            self.note_progress()
            with self._changed:
                is_met = condition()
                self.raise_failure()
                has_workers = self.worker_count > 0
                if not is_met:
                    self._raise_if_stuck()
                    self._changed.wait(POLL_SECONDS)
            if not is_met and not has_workers:
                wait_logger.log("a worker")

    def close(self, result: Message, arrays: Arrays | None = None, kept_arrays: Arrays | None = None) -> None:
        """End the call, and wait until all processes have its result or are gone.

        Args:
            result: for all processes, including those that come later.
            arrays: that belong to it, until the next call with arrays ends.
            kept_arrays: further arrays, which are kept as long as the result.
        """
        self.note_progress()
        with self._changed:
            if arrays:
                self._results = {call: (found, {}, kept) for call, (found, _, kept) in self._results.items()}
            self._results[self._call] = (result, arrays or {}, kept_arrays or {})
            self._is_open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._present, self._timeout)
            late, self._present = sorted(map(str, self._present)), set()
        if late:
            self._log(
                f"{listed(late)} did not fetch the result of the call within {self._timeout:g} s; the chief continues"
            )

    def raise_failure(self) -> None:
        """Raise the ClusterError that has ended all calls, if there is one."""
        if (failure := self._failure) is not None:
            raise ClusterError(*failure)

    def wait_for_stragglers(self, expected: Collection[tuple[str, int]]) -> None:
        """Wait, before the chief ends, until each connected process has left the last call, for at most the time limit.

        If there was a call, a process that has never been connected is waited for until the time limit has passed since this object was
        made: it may have started with the chief, which had nothing left to train. After a failure, processes only have a moment to
        receive it.

        Args:
            expected: job and index of each process.
        """
        wait_logger = WaitLogger(self._log, self._clock)
        with self._changed:
            while not self._failure and (missing := self._stragglers(expected, wait_logger.seconds)):
                wait_logger.log(listed(missing))
                self._changed.wait(POLL_SECONDS)
            if self._failure:
                self._wait_until_disconnected()

    def _stragglers(self, expected: Collection[tuple[str, int]], waited: float) -> list[str]:
        late = [
            str(session) for session, call in self._connected.items() if call < self._call and waited < self._timeout
        ]
        if self._call and self._clock() - self._began < self._timeout:
            late += [f"{job} {index}" for job, index in expected if (job, index) not in self._seen]
        return sorted(late)

    def fail_calls(self, sentence: str, exit_code: int = USER_ERROR) -> None:
        """Fail all calls: every request gets this error; its code is not 0, also after an exit with that."""
        with self._changed:
            if self._failure is None:
                self._failure = (sentence, exit_code or USER_ERROR)
            for _, _, result in self._tasks.values():
                if not result.done():
                    result.set_exception(ClusterError(*self._failure))
            self._changed.notify_all()

    def abort(self, sentence: str, exit_code: int = USER_ERROR) -> None:
        """Fail all calls before the chief ends: processes have a moment to receive the error and to leave."""
        with self._changed:
            self.fail_calls(sentence, exit_code)
            self._wait_until_disconnected()

    def _wait_until_disconnected(self) -> None:
        """Give each connected process a moment to receive the failure, also one that is between two calls."""
        self._changed.wait_for(lambda: not self._connected, _ABORT_SECONDS)

    def _raise_if_stuck(self) -> None:
        limit = self._long if self.worker_count else self._timeout
        if self._clock() - max(self._last_progress, self._waits_since) < limit:
            return
        if self._loss:
            raise ClusterError(
                f"{self._loss} Since then no task was finished for {limit:g} s. Fix: see what that process prints.",
                PEER_LOST,
            )
        assignments = sorted(self._queue.assignments().items())
        held = [f"{listed(map(str, workers))} has task {number}" for number, workers in assignments]
        who = listed(held) if held else "no worker has requested one"
        raise ClusterError(
            f"No task was finished for {limit:g} s, of {self._queue.added}: {who}. Fix: check whether the workers are started, or stuck.",
            NO_PROGRESS,
        )

    # Request handler, called by the thread of each connection.

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Raise ProtocolError if a request is invalid, before its arrays are received."""
        if message["kind"] not in self._handlers:
            raise ProtocolError(f"there is no {message['kind']!r}")
        limit = self._result_bytes if message["kind"] == "finish" else 0
        if payload_bytes(given) > limit or (given and not limit):
            raise ProtocolError(f"{payload_bytes(given):,} bytes follow a {message['kind']!r}: at most {limit:,} may")

    def handle(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        """Return the response to a request; raise ProtocolError if the request is invalid."""
        with self._changed:
            self._connected.setdefault(session, 0)
            self._seen.add((session.peer.job, session.peer.index))
        return self._handlers[message["kind"]](session, message, arrays)

    def leave(self, session: ClientSession) -> None:
        """Release the tasks of a process whose connection has ended; the loss of a server fails the call."""
        with self._changed:
            was_present = session in self._present
            self._present.discard(session)
            self._connected.pop(session, None)
            released = self._queue.release(session)
            if was_present and self._is_open:
                if session.peer.job == "ps":
                    self.fail_calls(f"{session} was lost, and with it the variables that it holds.", PEER_LOST)
                self._last_progress = self._clock()
            self._changed.notify_all()
        if released and not self.has_failed:
            numbers = f"task{'s' if released[1:] else ''} {listed(map(str, released))}"
            self._log(f"{session} has disconnected: {numbers} will be reassigned to other workers")

    def _poll_until(self, session: ClientSession, message: Message, ready: Callable[[], Response | None]) -> Response:
        """Return what ``ready`` gives, or the result or failure of the call, or nothing after the time that the request allows."""
        call, deadline = read_whole_number(message, "call"), self._clock() + seconds_of(message)
        with self._changed:
            while True:
                if self._failure:  # The session stays present until it leaves: this response is not sent yet.
                    return {"kind": "failed", "sentence": self._failure[0], "code": self._failure[1]}, {}
                found = ready() if call == self._call and self._is_open else None
                if found := found or self._sync_points.response_to(message):
                    return found
                if call in self._results:
                    result, arrays, kept = self._results[call]
                    return {"kind": "over", "result": result}, {**arrays, **kept}
                left = deadline - self._clock()
                if left <= 0 or session.is_gone():
                    return {"kind": "nothing", "idle": max(0.0, self._clock() - self._acted_at)}, {}
                self._changed.wait(min(left, POLL_SECONDS))

    def _enter(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        def enter() -> Response:
            if session not in self._present:
                self._last_progress = self._clock()
            self._present.add(session)
            self._changed.notify_all()
            return {"kind": "entered"}, {}

        return self._poll_until(session, message, enter)

    def _take(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        known = read_whole_number(message, "known") if "known" in message else None

        def take() -> Response | None:
            if known is not None and known < self._queue.added and message.get("point") == self._sync_points.count:
                self.fail_calls(missing_schedule(str(session), known))
                return None
            number = self._queue.take(session, self._clock(), known)
            if number is None:
                return None
            what, given, _ = self._tasks[number]
            response = {"kind": "task", "task": number, "what": what}
            response |= {} if known is None else {"below": self._queue.below}
            return response, {**given, **self._attached()}

        return self._poll_until(session, message, take)

    def _ask(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        def look_up() -> Response | None:
            found = self._published.get(str(message.get("key")))
            return None if found is None else ({"kind": "published", "what": found[0]}, found[1])

        return self._poll_until(session, message, look_up)

    def _finish(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        number, found = read_whole_number(message, "task"), message.get("result")
        if not isinstance(found, dict):
            raise ProtocolError("a 'finish' has no result")
        with self._changed:
            counts = read_whole_number(message, "call") == self._call and self._queue.finish(session, number)
            if counts:
                self._last_progress, self._loss = self._clock(), ""
                result = self._tasks.pop(number)[2]
                if not result.done():  # Otherwise the call has failed.
                    result.set_result((found, arrays))
            self._changed.notify_all()
        return {"kind": "noted", "counts": counts}, {}

    def _fail(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        with self._changed:
            where = f" in task {read_whole_number(message, 'task')}" if "task" in message else ""
            code = read_whole_number(message, "code")
            if code == PEER_LOST:  # Other workers may still reach the process that this one has lost.
                self._loss = f"{session} ended{where}: {message.get('summary')}".partition(" Fix: ")[0]
            else:
                code = code if code == NO_PROGRESS else USER_ERROR
                self.fail_calls(f"{session} failed{where}: {message.get('summary')}", code)
        return _ACKNOWLEDGED

    def _leave_call(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        call = read_whole_number(message, "call")
        with self._changed:
            self._present.discard(session)
            self._connected[session] = call
            self._changed.notify_all()
        return _ACKNOWLEDGED
