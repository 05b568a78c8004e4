"""A worker's end of the control channel: collective calls with the other workers, heartbeats, and notice of failures."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lockstep._errors import NO_PROGRESS, ClusterError
from lockstep._logging import CancelledError, WaitLogger, is_cancelled, listed
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.control_server import BARRIER, BROADCAST, GATHER, LEAVE, ControlServer
from lockstep.distributed.control.failure_detector import Failure, FailureKind, SuspendDetector, make_failure
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.heartbeat import (
    HEARTBEAT_SECONDS,
    PROGRAM,
    QUIET,
    SAVING,
    START,
    WAITING,
    Limits,
    WorkerStatus,
)
from lockstep.distributed.control.transport import EventLoop, FramedSocket, as_json, encode
from lockstep.distributed.control.value_differences import digest, find_disagreement

MAIN = "main"
_POLL_SECONDS = 0.2
_CONFIRMATION_SECONDS = 2.0  # For the chief to confirm an end or a failure.
_MAX_SUMMARY = 4000  # characters
_SAME_PROGRAM = "Fix: run the same program with the same options, arguments, seeds and callbacks on all workers."


class ControlClient:
    """One worker's end of the control channel; :func:`lockstep.distributed.control.connect.open_control_channel` makes it.

    All methods may be called from any thread. Collective calls are counted by channel: on each channel all workers make the same
    calls in the same order, and only one thread at a time may use a channel.

    Attributes:
        group: the workers.
        peers: all workers, in order.
        failure: why the job cannot continue; None while it can.
        metadata: returns the numbers that each heartbeat reports about this worker.
        ends_with_others: whether the process is to stay, at its end, until all workers have left.

    Example:
        >>> from lockstep.distributed.cluster.membership import WorkerGroup
        >>> from lockstep.distributed.control.connect import open_control_channel
        >>> client = open_control_channel(WorkerGroup(workers=1, index=0, coordinator="localhost:12421"), {"jax": "0.10.2"})
        >>> client.report(1, "step")
        >>> client.gather("rows", 7)
        [7]
        >>> client.leave()
    """

    def __init__(
        self,
        group: WorkerGroup,
        peers: tuple[Peer, ...],
        connection: FramedSocket,
        server: ControlServer | None,
        limits: Limits,
        on_failure: Callable[[Failure], None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group, self.peers = group, peers
        self.failure: Failure | None = None
        self.metadata: Callable[[], dict[str, float]] = dict
        self.ends_with_others = False
        self._connection, self._server, self._limits = connection, server, limits
        self._on_failure, self._log, self._clock = on_failure, log, clock
        self._process = os.getpid()
        self._heartbeat = _HeartbeatState(peers[0], clock)
        self._missing: dict[str, dict[str, Any]] = {}
        self._channels: dict[str, _Channel] = {}  # Each is made at its first call.
        self._leave_lock = threading.Lock()
        self._confirmed = threading.Event()
        self._is_failing = self._has_left = self._stays = self._is_disconnected = self._has_chief_left = False
        self._loop = EventLoop("lockstep-cluster", clock)
        self._loop.add(connection, self._received, self._closed)
        self._loop.later(0.0, self._send_heartbeat)
        self._loop.start()
        atexit.register(self.leave)

    @property
    def lost_worker(self) -> Failure | None:
        """The failure of the job; or that of the chief, if its heartbeats are late; None if no worker is seen to be lost."""
        is_silent = self._heartbeat.silence > QUIET and not self._has_left
        return self.failure or (self._heartbeat.silent_chief() if is_silent else None)

    def report(self, step: int, activity: str) -> None:
        """Set the progress that heartbeats report; takes less than a microsecond, so it may be called in each step.

        Args:
            step: a number that never falls and counts the same on all workers, over the life of the client.
            activity: ``"step"`` from the beginning of a step, which needs all workers, to the next ``"data"``: callbacks between them may
                wait for the step's result. ``"start"``, ``"compiling"`` and ``"saving"`` may take long.
        """
        self._heartbeat.report(step, activity)

    def report_program(self) -> None:
        """Report that the steps so far have ended, and that code of the user runs until the next report."""
        self.report(self._heartbeat.progress[0], PROGRAM)

    @property
    def is_saving(self) -> bool:
        """Whether this worker writes files."""
        return self._heartbeat.progress[1] == SAVING

    def saving(self) -> AbstractContextManager[None]:
        """Report that this worker writes or reads files, which may take long, until the end of the block."""
        return self._report_meanwhile(SAVING)

    def heartbeats(self) -> list[WorkerStatus]:
        """Return the last heartbeats of all workers, if this is the chief; else nothing."""
        return self._server.heartbeats() if self._server else []

    def gather(
        self, topic: str, value: Any = None, *, channel: str = MAIN, timeout_seconds: float | None = None
    ) -> list[Any]:
        """Return the values of all workers, in their order.

        Args:
            topic: what is gathered; a worker with another topic at this point causes an error that names both.
            value: a value of JSON; it is returned as JSON has it: a tuple as a list.
            channel: the sequence of calls that this one belongs to.
            timeout_seconds: limit of the wait, after which the job has failed; None: the client's. If a missing worker starts
                or compiles, ``long_seconds`` is the limit.

        Raises:
            ClusterError: a worker is missing, has left, or has another topic; or the job has failed.
            CancelledError: the result is no longer wanted (:data:`~lockstep._logging.is_cancelled`): forget
                the channel.
            OptionError: the value is not of JSON, or too large.
        """
        return self._collective(GATHER, topic, value, channel, timeout_seconds)

    def agree(self, topic: str, value: Any, *, fix: str = _SAME_PROGRAM, channel: str = MAIN) -> None:
        """Check that all workers have an equal value; else the same ClusterError on all names who differs and in what.

        Arguments and errors are those of :meth:`gather`; ``fix`` are sentences that follow.
        """
        own = as_json(value)
        found = find_disagreement(self.gather(topic, digest(own), channel=channel))
        if found is not None:  # Values can be long: only two of them are sent, and only now.
            shown = own if self.group.index in found.pair else None
            values = self.gather(topic, shown, channel=channel)
            sentence = found.sentence(topic, values, [str(peer) for peer in self.peers])
            raise ClusterError(f"{sentence} {fix}")

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Return the chief's value; those of the other workers are ignored. Arguments and errors are those of :meth:`gather`."""
        given = value if self.group.is_chief else None
        return self._collective(BROADCAST, topic, given, MAIN, None)[0]

    def barrier(self, topic: str) -> None:
        """Wait until all workers have called this. Arguments and errors are those of :meth:`gather`."""
        self._collective(BARRIER, topic, None, MAIN, None)

    def forget(self, channel: str) -> None:
        """Make no more calls on a channel."""
        self._channels.pop(channel, None)

    @property
    def is_open(self) -> bool:
        """Whether this worker is still in the job, and this process is its own."""
        return not self._has_left and self._is_own_process()

    def check(self) -> None:
        """Raise ClusterError if the job has failed; cheap."""
        if self.failure is not None:
            raise ClusterError(self.failure.sentence, self.failure.exit_code)
        if not self.is_open:
            raise ClusterError(
                "This control client is closed: the worker has left the job, or this is a process that it has forked. Fix: use the strategy only in "
                "the process that made it."
            )

    def fail(self, summary: str, *, may_follow: bool = False) -> None:
        """Report that this worker's program has failed with ``"ValueError: …"``; the other workers end with that sentence.

        Returns when the chief has confirmed it, after two seconds at the latest. Then :attr:`failure` is the cause that all were
        told, which may be another one: the death of a worker that has made this one fail.

        Args:
            summary: the exception.
            may_follow: whether it may follow from the loss of another worker. Then a worker whose heartbeats are late is the cause.
        """
        if self.failure is None and self.is_open:
            self._is_failing = True
            self._send_last({"kind": "fail", "summary": summary[:_MAX_SUMMARY], "may_follow": may_follow})
            self._confirmed.wait(_CONFIRMATION_SECONDS)
            if may_follow and self.failure is None and self._heartbeat.silence > QUIET:
                self.failure = self._heartbeat.silent_chief()

    def leave(self, wait_seconds: float | None = None, *, stays: bool = False) -> None:
        """Leave the job in order and close the client; also called at the end of the program.

        Args:
            wait_seconds: how long the chief stays for the other workers, whose messages it forwards; None: ``timeout_seconds``.
            stays: whether each worker stays so long until all have left, and ends with the reason if one fails before.
        """
        if not self._is_own_process():
            return
        with self._leave_lock:
            if self._has_left:
                return
            self._has_left, self._stays = True, stays
        atexit.unregister(self.leave)
        if self.failure is None:
            seconds = self._limits.timeout if wait_seconds is None else wait_seconds
            self._send_leave(seconds if stays or self.group.is_chief else _CONFIRMATION_SECONDS)
        self._loop.stop()
        if self._server is not None:
            self._server.stop()

    # Collective calls, in the thread that makes them.

    def _collective(
        self, operation: str, topic: str, value: Any, channel: str, timeout_seconds: float | None
    ) -> list[Any]:
        what = f"{operation} {topic!r}"
        report = self._report_meanwhile(f"{WAITING}{what}") if channel == MAIN else nullcontext()
        call = self._channels.setdefault(channel, _Channel(channel))
        with call.acquire(what), report:
            request = {"channel": channel, "number": call.calls, "operation": operation, "topic": topic, "value": value}
            frame = encode({"kind": "call", **request})
            call.begin()
            self.check()  # Not before: if the client ends from here on, that ends this wait.
            if self._is_disconnected:
                raise ClusterError(self._chief_has_left())
            self._loop.call(lambda: self._connection.send(frame))
            try:
                self._wait_for(call, what, self._limits.timeout if timeout_seconds is None else timeout_seconds)
            except CancelledError:
                self._send({"kind": "abandon", "channel": channel})
                raise
            return call.values

    @contextmanager
    def _report_meanwhile(self, activity: str) -> Iterator[None]:
        """Have heartbeats report an activity until the end of the block."""
        step, before = self._heartbeat.progress
        self.report(step, activity)
        try:
            yield
        finally:
            self.report(step, before)

    def _wait_for(self, call: "_Channel", what: str, seconds: float) -> None:
        wait, suspends = WaitLogger(self._log, self._clock), SuspendDetector(self._clock)
        while not call.wait(_POLL_SECONDS):
            names = listed(missing["names"]) if (missing := self._missing.get(call.name)) else str(self.peers[0])
            limit = max(seconds, self._limits.long) if missing and missing["long"] else seconds
            if not suspends.tick() - suspends.since <= limit:  # Also if the limit is not a number.
                self._send({"kind": "overdue", "channel": call.name, "what": what, "seconds": limit})
                if call.wait(_CONFIRMATION_SECONDS) and self.failure and self.failure.kind is not FailureKind.STUCK:
                    break  # The chief knows more, for instance that one of them is silent.
                late = f"{names}: did not reach {what} within {limit:g} s. Fix: see their output, or raise timeout_seconds above that."
                raise ClusterError(late, NO_PROGRESS)
            wait.log(f"{names}, at {what}")
        self.check()
        if call.error is not None:
            raise ClusterError(call.error)

    def _send_leave(self, wait_seconds: float) -> None:
        self._send_last({"kind": "leave", "stays": self._stays})
        wait = WaitLogger(self._log, self._clock)
        while not self._confirmed.wait(_POLL_SECONDS):
            others = listed(missing["names"]) if (missing := self._missing.get(LEAVE)) else ""
            if wait.seconds > wait_seconds:
                if others:
                    self._log(f"exits before {others}; they are no longer monitored")
                return
            if others:
                wait.log(f"the end of {others}")

    def _send_last(self, message: dict[str, Any]) -> None:
        self._send(self._heartbeat.message)
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        self._loop.call(lambda: self._connection.send(frame))

    def _chief_has_left(self) -> str:
        return f"{self.peers[0]}, the chief, has left before, and no calls can be forwarded. Fix: make the same calls on all workers."

    def _is_own_process(self) -> bool:
        return os.getpid() == self._process  # False in a forked child, which must not send anything for its parent.

    # Events, in the client's own thread.

    def _received(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        self._heartbeat.note_chief()
        try:
            self._handle(message)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            connection.ended = f"it sent a {message['kind']!r} that cannot be read ({error!r})"

    def _handle(self, message: dict[str, Any]) -> None:
        if message["kind"] == "heartbeat":
            self._missing = message["missing"]
        elif message["kind"] == "result":
            if (channel := self._channels.get(message["channel"])) is not None:
                channel.finish(message["values"], message["error"])
        elif message["kind"] == "chief left":
            self._has_chief_left = True
        elif message["kind"] == "noted":
            self._confirmed.set()
        elif message["kind"] == "failure":
            self._set_failure(Failure.from_message(message["failure"]))

    def _closed(self, connection: FramedSocket) -> None:
        if not self._has_chief_left and (self._stays or not self._has_left):
            what = f"died: {connection.ended} unexpectedly. It was the chief."
            self._set_failure(make_failure(FailureKind.DIED, self.peers[0], what))
        self._is_disconnected = True
        self._end_calls(self._chief_has_left())
        self._confirmed.set()

    def _send_heartbeat(self) -> None:
        self._connection.send(encode(self._heartbeat.message | {"metadata": self.metadata()}))
        if self._heartbeat.silence > self._limits.timeout and not self._is_disconnected:
            self._set_failure(self._heartbeat.silent_chief())
        self._loop.later(HEARTBEAT_SECONDS, self._send_heartbeat)

    def _set_failure(self, found: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = found
        self._end_calls(found.sentence)
        self._confirmed.set()
        if not (self._is_failing and found.worker == self.group.index):
            self._on_failure(found)

    def _end_calls(self, error: str) -> None:
        for channel in tuple(self._channels.values()):
            channel.finish([], error)


@dataclass
class _Channel:
    """One sequence of collective calls, and the result of the call that waits on it.

    Attributes:
        name: name of the sequence.
        done: is set when the call has its result, or will get none.
        calls: number of calls that were made.
        values: the result.
        error: why there is none.
        in_use: is held by the thread whose call waits.
    """

    name: str
    done: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    values: list[Any] = field(default_factory=list)
    error: str | None = None
    in_use: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def acquire(self, what: str) -> Iterator[None]:
        """Hold the channel for one call; ``what`` names the call in the error if another thread holds it."""
        if not self.in_use.acquire(blocking=False):
            raise ClusterError(
                f"{what}: another thread waits on channel {self.name!r}. Fix: give this thread a channel of its own."
            )
        try:
            yield
        finally:
            self.in_use.release()

    def begin(self) -> None:
        """Count one more call."""
        self.calls, self.error = self.calls + 1, None
        self.done.clear()

    def finish(self, values: list[Any], error: str | None) -> None:
        """Set the result of the waiting call."""
        self.values, self.error = values, error
        self.done.set()

    def wait(self, seconds: float) -> bool:
        """Return whether the result is here after ``seconds``; CancelledError if it is no longer wanted."""
        if self.done.wait(seconds):
            return True
        if is_cancelled.get()():
            raise CancelledError(self.name)
        return False


class _HeartbeatState:
    """Progress of this worker for its heartbeats, and the silence of the chief."""

    def __init__(self, chief: Peer, clock: Callable[[], float]) -> None:
        self._chief, self._clock = chief, clock
        self._suspends, self._heard = SuspendDetector(clock), clock()
        self.report(0, START)

    def report(self, step: int, activity: str) -> None:
        """Set step and activity."""
        self._now = (step, activity, self._clock())

    @property
    def progress(self) -> tuple[int, str]:
        """Step and activity."""
        return self._now[:2]

    def note_chief(self) -> None:
        """Note that the chief has sent something."""
        self._heard = self._clock()

    @property
    def message(self) -> dict[str, Any]:
        """The heartbeat for the chief."""
        step, activity, since = self._now
        age = max(0.0, self._suspends.tick() - max(since, self._suspends.since))
        return {"kind": "heartbeat", "step": int(step), "activity": activity, "seconds": age}

    @property
    def silence(self) -> float:
        """Seconds since the chief's last message, while this process was not suspended; it may be at any moment."""
        return self._suspends.tick() - max(self._heard, self._suspends.since)

    def silent_chief(self) -> Failure:
        """Return the failure that the chief is silent."""
        what = f"does not answer: no heartbeat for {self.silence:.0f} s (stopped, or cut off from the network)."
        return make_failure(FailureKind.SILENT, self._chief, f"{what} It was the chief.")
