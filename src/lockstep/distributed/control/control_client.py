"""What a worker holds of the control channel: it agrees with the others, says how far it is, and learns who is lost."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep._errors import ClusterError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.control.channels import Channel, Channels
from lockstep.distributed.control.consistency import digest, split
from lockstep.distributed.control.coordinator import LEAVE, Coordinator
from lockstep.distributed.control.event_loop import EventLoop
from lockstep.distributed.control.failure_detector import (
    BEAT_SECONDS,
    QUIET,
    WAITING,
    Limits,
    SuspendDetector,
    WorkerStatus,
    failure,
)
from lockstep.distributed.control.failures import Failure, FailureKind, summary_of
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.heartbeat import HeartbeatState
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.pending_collectives import BARRIER, BROADCAST, GATHER
from lockstep.distributed.control.protocol import encode, plain
from lockstep.distributed.control.wait_logger import CancelledError, WaitLogger, listed

__all__ = ["ControlClient"]

MAIN = "main"
_POLL_SECONDS = 0.2
_GOODBYE_SECONDS = 2.0  # For the chief to note an end or a failure.
_LONGEST_SUMMARY = 4000  # characters


class ControlClient:
    """One worker's end of the control channel; :func:`lockstep.distributed.control.join.join` makes it.

    All methods may be called from any thread. Calls that meet the other workers are counted by lane: on each lane all workers
    make the same calls in the same order, and a lane serves one thread at a time.

    Attributes:
        group: who takes part.
        peers: all workers, in order.
        failure: why the job cannot go on; None as long as it can.
        departed: workers that came to their end in order.
        facts: gives numbers that the chief may know of this worker, for each heartbeat.

    Example:
        >>> from lockstep.distributed.cluster.worker_group import WorkerGroup
        >>> from lockstep.distributed.control.join import join
        >>> with join(WorkerGroup(workers=1, index=0, coordinator="localhost:12421"), {"jax": "0.10.2"}) as session:
        ...     session.report(1, "step")
        ...     session.gather("rows", 7)
        [7]
    """

    def __init__(
        self,
        group: WorkerGroup,
        peers: tuple[Peer, ...],
        connection: FramedSocket,
        server: Coordinator | None,
        limits: Limits,
        on_failure: Callable[[Failure], None],
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group, self.peers = group, peers
        self.failure: Failure | None = None
        self.departed: set[int] = set()
        self.facts: Callable[[], dict[str, float]] = dict
        self._connection, self._server, self._limits = connection, server, limits
        self._on_failure, self._announce, self._clock = on_failure, announce, clock
        self._process = os.getpid()
        self._pulse = HeartbeatState(peers[0], clock)
        self._missing: dict[str, dict[str, Any]] = {}
        self._lanes = Channels()
        self._ending = threading.Lock()
        self._noted = threading.Event()
        self._failing = self._left = self._is_alone = False
        self._loop = EventLoop("lockstep-cluster", clock)
        self._loop.add(connection, self._received, self._closed)
        self._loop.later(0.0, self._beat)
        self._loop.start()
        atexit.register(self.leave)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.fail(summary_of(error))
        self.leave()

    def report(self, step: int, activity: str) -> None:
        """Say how far this worker is; costs less than a microsecond, so call it in each step.

        Args:
            step: a number that never falls and counts the same on all workers, over the life of the session.
            activity: ``"step"`` in the step itself, where the others are needed to go on. ``"start"`` and ``"compiling"`` may take long. Any other
                word names work of this worker alone: ``"data"``, ``"callback"``, ``"save"``, ``"idle"``.
        """
        self._pulse.report(step, activity)

    def beats(self) -> list[WorkerStatus]:
        """What the chief, where this is one, has last heard of all workers."""
        return self._server.beats() if self._server else []

    def gather(
        self, topic: str, value: Any = None, *, lane: str = MAIN, timeout_seconds: float | None = None
    ) -> list[Any]:
        """The values of all workers, in their order.

        Args:
            topic: what is asked; another worker that asks something else at this point is an error that names both.
            value: of JSON, and given as it comes back from there: a tuple as a list.
            lane: which sequence of calls this belongs to.
            timeout_seconds: limit of the wait, after which the job has failed; None: the session's. Where a missing worker starts
                or compiles, the limit for what may take long holds.

        Raises:
            ClusterError: somebody is missing, has left, or asks something else; or the job has failed.
            CancelledError: nobody wants the answer any more (:data:`~lockstep.distributed.control.wait_logger.is_given_up`): forget the lane.
            OptionError: the value is not of JSON, or too large.
        """
        return self._meet(GATHER, topic, value, lane, timeout_seconds)

    def agree(
        self, topic: str, value: Any, *, cure: str = "", lane: str = MAIN, timeout_seconds: float | None = None
    ) -> None:
        """See that all workers have an equal value; the same ClusterError on all says who differs in what.

        Args and errors are those of :meth:`gather`; ``cure`` is a sentence that follows.
        """
        mine = plain(value)
        found = split(self.gather(topic, digest(mine), lane=lane, timeout_seconds=timeout_seconds))
        if found is not None:  # Values can be long: only two of them travel, and only now.
            shown = mine if self.group.index in found.pair else None
            values = self.gather(topic, shown, lane=lane, timeout_seconds=timeout_seconds)
            sentence = found.sentence(topic, values, [str(peer) for peer in self.peers])
            raise ClusterError(f"{sentence} {cure}".strip())

    def broadcast(
        self, topic: str, value: Any = None, *, lane: str = MAIN, timeout_seconds: float | None = None
    ) -> Any:
        """The chief's value; what the others give is not looked at. Args and errors are those of :meth:`gather`."""
        given = value if self.group.is_chief else None
        return self._meet(BROADCAST, topic, given, lane, timeout_seconds)[0]

    def barrier(self, topic: str, *, lane: str = MAIN, timeout_seconds: float | None = None) -> None:
        """Wait until all workers are here. Args and errors are those of :meth:`gather`."""
        self._meet(BARRIER, topic, None, lane, timeout_seconds)

    def forget(self, lane: str) -> None:
        """Make no more calls on a lane."""
        self._lanes.forget(lane)

    def check(self) -> None:
        """Raise ClusterError if the job has failed; cheap."""
        if self.failure is not None:
            raise ClusterError(self.failure.sentence, self.failure.exit_code)
        if self._left or not self._is_mine():
            raise ClusterError(
                "This session is closed: the worker has left the job, or this is a process that it has forked."
            )

    def fail(self, summary: str) -> None:
        """Tell the others that this worker's program has failed; they end with that sentence.

        It returns when the chief has noted it, after two seconds at the latest. Then :attr:`failure` is the cause that all were
        told, which may be another: the death of a worker that has made this one fail.

        Args:
            summary: ``"ValueError: …"``.
        """
        if self.failure is None and not self._left and self._is_mine():
            self._failing = True
            self._send_last({"kind": "fail", "summary": summary[:_LONGEST_SUMMARY]})
            self._noted.wait(_GOODBYE_SECONDS)
            if self.failure is None and self._pulse.silence > QUIET:
                self.failure = self._pulse.silent_chief()

    def leave(self, wait_seconds: float | None = None) -> None:
        """End in order, and close the session; where the program ends, this is done by itself.

        Args:
            wait_seconds: for how long the chief stays for the others, who hear of each other through it; None: as long as any wait.
        """
        if not self._is_mine():
            return
        with self._ending:
            if self._left:
                return
            self._left = True
        atexit.unregister(self.leave)
        if self.failure is None:
            self._say_goodbye(self._limits.timeout if wait_seconds is None else wait_seconds)
        self._loop.stop()
        if self._server is not None:
            self._server.stop()

    # Calls, in the thread that makes them.

    def _meet(self, operation: str, topic: str, value: Any, lane: str, timeout_seconds: float | None) -> list[Any]:
        what = f"{operation} {topic!r}"
        with self._lanes.only_here(lane, what) as call, self._waiting(lane, what):
            asked = {"lane": lane, "number": call.calls, "operation": operation, "topic": topic, "value": value}
            frame = encode({"kind": "call", **asked})
            call.begin()
            self.check()  # Not before: whatever ends the session from here on ends this wait.
            if self._is_alone:
                raise ClusterError(self._alone())
            self._loop.call(lambda: self._connection.send(frame))
            try:
                self._await(call, what, self._limits.timeout if timeout_seconds is None else timeout_seconds)
            except CancelledError:
                self._send({"kind": "abandon", "lane": lane})
                raise
            return call.values

    @contextmanager
    def _waiting(self, lane: str, what: str) -> Iterator[None]:
        """Others see that this worker waits, and where."""
        step, activity = self._pulse.progress
        if lane == MAIN:
            self.report(step, f"{WAITING}{what}")
        try:
            yield
        finally:
            if lane == MAIN:
                self.report(step, activity)

    def _await(self, call: Channel, what: str, seconds: float) -> None:
        notice, awake = WaitLogger(self._announce, self._clock), SuspendDetector(self._clock)
        while not call.wait(_POLL_SECONDS):
            names = listed(missing["names"]) if (missing := self._missing.get(call.name)) else str(self.peers[0])
            limit = max(seconds, self._limits.long) if missing and missing["long"] else seconds
            if not awake.tick() - awake.since <= limit:  # Also where the limit is not a number.
                self._send({"kind": "overdue", "lane": call.name, "what": what, "seconds": limit})
                if call.wait(_GOODBYE_SECONDS) and self.failure and self.failure.kind is not FailureKind.STUCK:
                    break  # The chief knows more: that one of them gives no sign of life, say.
                late = f"{names}: did not come to {what} within {limit:g} s. See what they print, or raise timeout_seconds."
                raise ClusterError(late, exit_codes.NO_PROGRESS)
            notice.tell(f"{names}, at {what}")
        self.check()
        if call.error is not None:
            raise ClusterError(call.error)

    def _say_goodbye(self, wait_seconds: float) -> None:
        self._send_last({"kind": "leave"})
        notice = WaitLogger(self._announce, self._clock)
        seconds = wait_seconds if self.group.is_chief else _GOODBYE_SECONDS
        while not self._noted.wait(_POLL_SECONDS):
            others = listed(missing["names"]) if (missing := self._missing.get(LEAVE)) else ""
            if notice.seconds > seconds:
                if others:
                    self._announce(f"leaves while others go on, whom nobody watches from now: {others}")
                return
            if others:
                notice.tell(f"the end of {others}")

    def _send_last(self, message: dict[str, Any]) -> None:
        self._send(self._pulse.message)
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        self._loop.call(lambda: self._connection.send(frame))

    def _alone(self) -> str:
        return f"{self.peers[0]}, the chief, came to the end before, and nobody passes calls on."

    def _is_mine(self) -> bool:
        return os.getpid() == self._process  # Not so in a child that was forked: it must not speak for its parent.

    # What happens in the session's thread.

    def _received(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        self._pulse.heard()
        try:
            self._read(message)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            connection.ended = f"it sent a {message['kind']!r} that cannot be read ({error!r})"

    def _read(self, message: dict[str, Any]) -> None:
        if message["kind"] == "beat":
            self._missing = message["missing"]
        elif message["kind"] == "result":
            self._lanes.answer(message["lane"], message["values"], message["error"])
        elif message["kind"] == "departed":
            self.departed.add(message["worker"])
        elif message["kind"] == "noted":
            self._noted.set()
        elif message["kind"] == "failure":
            self._lose(Failure.from_message(message["failure"]))

    def _closed(self, connection: FramedSocket) -> None:
        if 0 not in self.departed and not self._left:
            self._lose(
                failure(
                    FailureKind.DIED, self.peers[0], f"died: {connection.ended} without a goodbye. It was the chief."
                )
            )
        self._is_alone = True
        self._lanes.finish(self._alone())
        self._noted.set()

    def _beat(self) -> None:
        self._pulse.tick()
        self._connection.send(encode(self._pulse.message | {"facts": self.facts()}))
        if self._pulse.silence > self._limits.timeout and not self._is_alone:
            self._lose(self._pulse.silent_chief())
        self._loop.later(BEAT_SECONDS, self._beat)

    def _lose(self, found: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = found
        self._lanes.finish(found.sentence)
        self._noted.set()
        if not (self._failing and found.worker == self.group.index):
            self._on_failure(found)
