"""What a worker holds of the control channel: it agrees with the others, says how far it is, and learns who is lost."""

import atexit
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep._errors import ClusterError
from lockstep.cluster import exit_codes
from lockstep.cluster.agreement import disagreement
from lockstep.cluster.calls import BARRIER, BROADCAST, GATHER
from lockstep.cluster.connection import Connection
from lockstep.cluster.failure import Failure, Kind
from lockstep.cluster.group import WorkerGroup
from lockstep.cluster.loop import Loop
from lockstep.cluster.peer import Peer
from lockstep.cluster.server import LEAVE, Server
from lockstep.cluster.waiting import Notice, listed
from lockstep.cluster.watch import BEAT_SECONDS, START, WAITING, Awake, Limits, failure
from lockstep.cluster.wire import encode

__all__ = ["Session"]

MAIN = "main"

_POLL_SECONDS = 0.2
_GOODBYE_SECONDS = 2.0  # For the chief to note an end or a failure.
_LONGEST_SUMMARY = 4000  # characters


@dataclass
class _Lane:
    """One sequence of calls, and the call that waits on it."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    values: list[Any] = field(default_factory=list)
    error: str | None = None


class Session:
    """One worker's end of the control channel; :func:`lockstep.cluster.joining.join` makes it.

    All methods may be called from any thread. Calls that meet the other workers are counted by lane: on each lane all workers
    make the same calls in the same order, and a lane serves one thread at a time.

    Attributes:
        group: who takes part.
        peers: all workers, in order.
        failure: why the job cannot go on; None as long as it can.
        departed: workers that came to their end.

    Example:
        >>> from lockstep.cluster.group import WorkerGroup
        >>> from lockstep.cluster.joining import join
        >>> with join(WorkerGroup(workers=1, index=0, coordinator="localhost:12421"), {"jax": "0.10.2"}) as session:
        ...     session.report(1, "step")
        ...     session.gather("rows", 7)
        [7]
    """

    def __init__(
        self,
        group: WorkerGroup,
        peers: tuple[Peer, ...],
        connection: Connection,
        server: Server | None,
        limits: Limits,
        on_failure: Callable[[Failure], None],
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group, self.peers = group, peers
        self.failure: Failure | None = None
        self.departed: set[int] = set()
        self._connection, self._server, self.limits = connection, server, limits
        self._on_failure, self._announce, self._clock = on_failure, announce, clock
        self._process = os.getpid()
        self._progress: tuple[int, str, float] = (0, START, clock())
        self._awake = Awake(clock)
        self._heard = clock()
        self._missing: dict[str, dict[str, Any]] = {}
        self._lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        self._ending = threading.Lock()
        self._noted = threading.Event()
        self._failing = self._left = False
        self._loop = Loop("lockstep-cluster", clock)
        self._loop.add(connection, self._received, self._closed)
        self._loop.later(0.0, self._beat)
        self._loop.start()
        atexit.register(self.leave)
        _forget_in_children(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.leave()

    @property
    def generation(self) -> int:
        """How many times this job was started again."""
        return self.peers[0].generation

    def report(self, step: int, activity: str) -> None:
        """Say how far this worker is; costs less than a microsecond, so call it in each step.

        Args:
            step: a number that never falls and counts the same on all workers, over the life of the session.
            activity: ``"step"`` while the others are needed to go on. ``"start"`` and ``"compiling"`` may take long. Any other
                word names work of this worker alone: ``"data"``, ``"callback"``, ``"save"``, ``"idle"``.
        """
        self._progress = (step, activity, self._clock())

    def gather(
        self, topic: str, value: Any = None, *, lane: str = MAIN, timeout_seconds: float | None = None
    ) -> list[Any]:
        """The values of all workers, in their order.

        Args:
            topic: what is asked; another worker that asks something else at this point is an error that names both.
            value: of JSON, and given as it comes back from there: a tuple as a list.
            lane: which sequence of calls this belongs to.
            timeout_seconds: limit of the wait; None: the session's. Where a missing worker starts or compiles, the limit for
                what may take long holds.

        Raises:
            ClusterError: somebody is missing, has left, or asks something else; or the job has failed.
            OptionError: the value is not of JSON, or too large.
        """
        return self._meet(GATHER, topic, value, lane, timeout_seconds)

    def agree(self, topic: str, value: Any, *, lane: str = MAIN, timeout_seconds: float | None = None) -> None:
        """See that all workers have an equal value; the same ClusterError on all says who differs in what.

        Args and errors are those of :meth:`gather`.
        """
        values = self.gather(topic, value, lane=lane, timeout_seconds=timeout_seconds)
        sentence = disagreement(topic, values, [str(peer) for peer in self.peers])
        if sentence is not None:
            raise ClusterError(sentence)

    def broadcast(
        self, topic: str, value: Any = None, *, lane: str = MAIN, timeout_seconds: float | None = None
    ) -> Any:
        """The chief's value; what the others give is not looked at. Args and errors are those of :meth:`gather`."""
        given = value if self.group.is_chief else None
        return self._meet(BROADCAST, topic, given, lane, timeout_seconds)[0]

    def barrier(self, topic: str, *, lane: str = MAIN, timeout_seconds: float | None = None) -> None:
        """Wait until all workers are here. Args and errors are those of :meth:`gather`."""
        self._meet(BARRIER, topic, None, lane, timeout_seconds)

    def check(self) -> None:
        """Raise ClusterError if the job has failed; cheap."""
        if self.failure is not None:
            raise ClusterError(self.failure.sentence, self.failure.exit_code)
        if self._left:
            raise ClusterError("This worker has left the job: its session is closed.")

    def fail(self, summary: str) -> None:
        """Tell the others that this worker's program has failed; they end with that sentence.

        It returns when the chief has noted it, after two seconds at the latest. Then :attr:`failure` is the cause that all were
        told, which may be another: the death of a worker that has made this one fail.

        Args:
            summary: ``"ValueError: …"``.
        """
        if self.failure is None and not self._left and self._is_mine():
            self._failing = True
            self._send({"kind": "fail", "summary": summary[:_LONGEST_SUMMARY]})
            self._noted.wait(_GOODBYE_SECONDS)

    def leave(self) -> None:
        """End in order, and close the session; where the program ends, this is done by itself.

        The chief waits for the others first, for ``timeout_seconds`` at most, as they hear of each other through it.
        """
        with self._ending:
            if self._left or not self._is_mine():
                return
            self._left = True
        atexit.unregister(self.leave)
        if self.failure is None:
            self._say_goodbye()
        self._loop.stop()
        if self._server is not None:
            self._server.stop()

    # Calls, in the thread that makes them.

    def _meet(self, operation: str, topic: str, value: Any, lane: str, timeout_seconds: float | None) -> list[Any]:
        call = self._lanes[lane]
        if not call.turn.acquire(blocking=False):
            raise ClusterError(
                f"{operation} {topic!r}: another thread waits on lane {lane!r}; give this thread its own."
            )
        step, activity, _ = self._progress
        try:
            asked = {"lane": lane, "number": call.calls, "operation": operation, "topic": topic, "value": value}
            frame = encode({"kind": "call", **asked})
            call.calls, call.error = call.calls + 1, None
            call.done.clear()
            self.check()  # After the line before: whatever ends the session from here on ends this wait.
            self._loop.call(lambda: self._connection.send(frame))
            if lane == MAIN:
                self.report(step, f"{WAITING}{operation} {topic!r}")
            self._await(call, lane, f"{operation} {topic!r}", timeout_seconds or self.limits.timeout)
            return call.values
        finally:
            if lane == MAIN:
                self.report(step, activity)
            call.turn.release()

    def _await(self, call: _Lane, lane: str, what: str, seconds: float) -> None:
        notice = Notice(self._announce, self._clock)
        while not call.done.wait(_POLL_SECONDS):
            missing = self._missing.get(lane)
            names = listed(missing["names"]) if missing else str(self.peers[0])
            limit = max(seconds, self.limits.long) if missing and missing["long"] else seconds
            if notice.seconds > limit:
                raise ClusterError(f"{names}: did not come to {what} within {limit:.0f} s.", exit_codes.NO_PROGRESS)
            notice.tell(f"{names}, at {what}")
        self.check()
        if call.error is not None:
            raise ClusterError(call.error)

    def _say_goodbye(self) -> None:
        self._send({"kind": "leave"})
        notice = Notice(self._announce, self._clock)
        seconds = self.limits.timeout if self.group.is_chief else _GOODBYE_SECONDS
        while not self._noted.wait(_POLL_SECONDS):
            missing = self._missing.get(LEAVE)
            if notice.seconds > seconds:
                if missing:
                    self._announce(
                        f"leaves while others go on, whom nobody watches from now: {listed(missing['names'])}"
                    )
                return
            if missing:
                notice.tell(f"the end of {listed(missing['names'])}")

    def _send(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        self._loop.call(lambda: self._connection.send(frame))

    def _is_mine(self) -> bool:
        return os.getpid() == self._process  # Not so in a child that was forked: it must not speak for its parent.

    # What happens in the session's thread.

    def _received(self, connection: Connection, message: dict[str, Any]) -> None:
        self._heard = self._clock()
        if message["kind"] == "beat":
            self._missing = message["missing"]
        elif message["kind"] == "result":
            self._finish(self._lanes[message["lane"]], message["values"], message["error"])
        elif message["kind"] == "departed":
            self.departed.add(message["worker"])
        elif message["kind"] == "noted":
            self._noted.set()
        elif message["kind"] == "failure":
            self._lose(Failure.from_message(message["failure"]))

    def _closed(self, connection: Connection) -> None:
        if 0 not in self.departed and not self._left:
            self._lose(
                failure(Kind.DIED, self.peers[0], f"died: {connection.ended} without a goodbye. It was the chief.")
            )
        for lane in tuple(self._lanes.values()):
            self._finish(lane, [], f"{self.peers[0]}, the chief, came to the end before.")
        self._noted.set()

    def _beat(self) -> None:
        now = self._awake.tick()
        step, activity, since = self._progress
        age = max(0.0, now - max(since, self._awake.since))
        self._connection.send(encode({"kind": "beat", "step": step, "activity": activity, "seconds": age}))
        silent = now - max(self._heard, self._awake.since)
        if silent > self.limits.timeout and self._connection.ended is None:
            what = f"does not answer: no sign of life for {silent:.0f} s (stopped, or cut off from the network)."
            self._lose(failure(Kind.SILENT, self.peers[0], f"{what} It was the chief."))
        self._loop.later(BEAT_SECONDS, self._beat)

    def _lose(self, found: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = found
        for lane in tuple(self._lanes.values()):
            lane.done.set()
        self._noted.set()
        if not (self._failing and found.worker == self.group.index):
            self._on_failure(found)

    def _finish(self, lane: _Lane, values: list[Any], error: str | None) -> None:
        lane.values, lane.error = values, error
        lane.done.set()


def _forget_in_children(session: Session) -> None:
    """A forked child holds copies of our sockets, which would hide this process's death: it closes them at once."""
    reference = weakref.ref(session)

    def forget() -> None:
        held = reference()
        if held is not None:
            held._loop.forget()
            if held._server is not None:
                held._server.forget()

    os.register_at_fork(after_in_child=forget)
