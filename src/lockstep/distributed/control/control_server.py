"""The chief's side of the control channel: it admits workers, answers their collective calls, and detects failures.

It runs in a thread of the chief's process. The chief's own control client is connected to it like those of all workers.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep._errors import PEER_LOST, OptionError
from lockstep._logging import abridged, listed
from lockstep.distributed.cluster.addresses import COORDINATOR, host_of, is_loopback
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.admission import Admission, JoinRejection
from lockstep.distributed.control.failure_detector import (
    Failure,
    FailureKind,
    SuspendDetector,
    find_cause,
    find_death,
    find_failure,
    find_overdue,
    make_failure,
)
from lockstep.distributed.control.handshake import HandshakeServer, Peer, refusal
from lockstep.distributed.control.heartbeat import HEARTBEAT_SECONDS, MAY_TAKE_LONG, START, Limits, WorkerStatus
from lockstep.distributed.control.transport import MAX_BYTES, EventLoop, FramedSocket, encode

GATHER, BROADCAST, BARRIER = "gather", "broadcast", "barrier"
_REACHABLE = f"give lockstep run --coordinator host:port, or else set {COORDINATOR}=host:port on each worker"
_FIX = "Fix: make the same calls, such as fit and evaluate, in the same order on all workers."
_ENDING = JoinRejection("the job of this chief has failed and ends", again=True)  # Its successor may admit the worker.


@dataclass(frozen=True)
class CollectiveReply:
    """The result of a collective call for some workers, or why there is none."""

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
    """All collective calls that are under way, each of which ``workers`` workers make.

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
                f"(call {number + 1} on channel {channel!r}). {_FIX}"
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
        return {channel: missing for channel, waiting, missing in self.waits() if worker in waiting}

    def waits(self) -> Iterator[tuple[str, Collection[int], list[int]]]:
        """Yield the channel of each call, the workers that wait there, and those that have not called."""
        for pending in self._calls.values():
            missing = [worker for worker in range(self._workers) if worker not in pending.values]
            yield pending.channel, pending.waiting, missing

    def _complete(self, calls: Iterable[_PendingCollective]) -> list[CollectiveReply]:
        replies = []
        for pending in calls:
            gone = [name for worker, name in self._left.items() if worker not in pending.values]
            if gone and pending.error is None:
                pending.error = f"{listed(gone)} finished before {_named(*pending.call)}, where others wait. {_FIX}"
            if pending.error is not None or len(pending.values) == self._workers:
                values = [] if pending.error else _values_of(pending)
                replies.append(CollectiveReply(tuple(sorted(pending.waiting)), pending.channel, values, pending.error))
                pending.waiting.clear()
        return [reply for reply in replies if reply.to]


def _values_of(pending: _PendingCollective) -> list[Any]:
    operation, _ = pending.call
    if operation == BARRIER:
        return []
    return [pending.values[worker] for worker in sorted(pending.values)][: 1 if operation == BROADCAST else None]


def _named(operation: str, topic: str) -> str:
    return f"{operation} {topic!r}"


# A channel, the workers that wait there, and a description of the missing ones.
_Wait = tuple[str, Collection[int], dict[str, Any]]
LEAVE = "leave"  # Names the chief's wait for the ends of the other workers, as channels name the waits of calls.

LINGER_SECONDS = 5.0  # For workers that come after the start has failed, so that they learn why.
_SETTLE_SECONDS = 0.25  # After an exception: it may result from a death that is noticed a moment later.


@dataclass
class _WorkerRecord:
    """A worker that has joined, and its last heartbeat."""

    connection: FramedSocket
    peer: Peer
    heard: float
    since: float
    step: int = 0
    activity: str = START
    left: bool = False  # It has sent that it leaves.
    stays: bool = False  # It waits after that until all workers have left.
    failed: bool = False  # It said that its program failed.
    closed: bool = False  # Its connection has ended.
    metadata: Mapping[str, float] = field(default_factory=dict)  # Numbers that it reports about itself.


class ControlServer:
    """Serves the control channel of one job; a job of one worker has no listener.

    Attributes:
        connection: the other end of the connection to the chief's own control client.
        rejection_sent: is set when all workers know why the job cannot start, or have not come in time to be told.
    """

    def __init__(
        self,
        group: WorkerGroup,
        chief: Peer,
        listener: socket.socket | None,
        secret: bytes | None,
        limits: Limits,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._limits, self._clock = group, limits, clock
        self._deadline = clock() + limits.timeout
        self._loop = EventLoop("lockstep-chief", clock)
        self._admission = Admission(group, chief)
        self._handshakes = HandshakeServer(self._loop, secret, self._on_peer, log)
        self._collectives = PendingCollectives(group.workers)
        self._handlers = {
            "heartbeat": self._on_heartbeat,
            "call": self._on_call,
            "abandon": self._on_abandon,
            "overdue": self._on_overdue,
            "fail": self._on_fail,
            "leave": self._on_leave,
        }
        self._suspends = SuspendDetector(clock)
        self._workers: dict[int, _WorkerRecord] = {}
        self._started = False
        self._rejection: JoinRejection | None = None
        self._informed: set[int] = set()
        self._to_inform = 0
        self._failure: Failure | None = None
        self.rejection_sent = threading.Event()
        here, there = socket.socketpair()
        self.connection = FramedSocket(there)
        self._add_worker(FramedSocket(here), chief)
        if listener is not None:
            self._handshakes.listen(listener)
        self._loop.later(0.0, self._tick)
        self._loop.start()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._loop.stop()

    def heartbeats(self) -> list[WorkerStatus]:
        """Return what is known of all workers that have joined, in order; may be called from any thread."""
        return [self._status(worker) for _, worker in sorted(self._workers.items())]

    # Joining.

    def _on_peer(self, connection: FramedSocket, peer: Peer) -> None:
        rejection = self._rejection or (_ENDING if self._failure else self._admission.validate(peer))
        if rejection is None:
            self._add_worker(connection, peer)
            return
        if rejection.everyone and self._rejection is None:
            self._cancel_start(rejection, max(peer.workers, self._group.workers))
        connection.send(encode(_refusal(rejection)))
        self._loop.remove(connection)
        self._note_informed(peer.index)

    def _add_worker(self, connection: FramedSocket, peer: Peer) -> None:
        now = self._clock()
        self._workers[peer.index] = worker = _WorkerRecord(connection, peer, heard=now, since=now)
        self._admission.peers[peer.index] = peer
        connection.set_limit(MAX_BYTES)
        self._loop.add(connection, lambda _, message: self._received(worker, message), lambda _: self._closed(worker))
        if self._admission.is_complete:
            self._loop.call(self._start)
        else:
            connection.send(_heartbeat(peer.index, self._waits()))  # It tells the worker that it was admitted.

    def _start(self) -> None:
        if self._rejection is not None:
            return  # A worker's connection has closed at the same moment.
        self._started = True
        for worker in self._workers.values():
            worker.heard = worker.since = self._clock()
        shared = ("index", "host", "pid", "address")
        peers = [{name: vars(worker.peer)[name] for name in shared} for _, worker in sorted(self._workers.items())]
        self._send_all({"kind": "welcome", "peers": peers})

    def _cancel_start(self, rejection: JoinRejection, to_inform: int) -> None:
        """Reject all workers that are here and, for a while, those that still come: ``to_inform`` in all."""
        self._rejection, self._to_inform = rejection, to_inform
        self._send_all(_refusal(rejection))
        self._loop.later(LINGER_SECONDS, self.rejection_sent.set)
        self._note_informed(*self._workers)

    def _note_informed(self, *indices: int) -> None:
        self._informed.update(indices)
        if self._rejection is not None and len(self._informed) >= self._to_inform:
            self.rejection_sent.set()

    def _missing_at_start(self) -> JoinRejection:
        reasons = self._handshakes.rejections.reasons
        rejected = "".join(f" {address} was turned away: {reason}." for reason, address in reasons.items())
        missing, coordinator = self._admission.missing(), self._group.coordinator
        # MASTER_ADDR of a PyTorchJob may be localhost at worker 0, and its name everywhere else.
        may_be_elsewhere = self._group.addresses is None and is_loopback(host_of(coordinator))
        hint = f" Other machines cannot reach it: {_REACHABLE}." if may_be_elsewhere else ""
        return JoinRejection(
            f"{listed(missing)} did not join within {self._limits.timeout:g} s.{rejected} Fix: check that "
            f"{'they are' if missing[1:] else 'it is'} started, and can reach {coordinator}.{hint}",
            exit_code=PEER_LOST,
        )

    # Messages of the workers.

    def _received(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        worker.heard = self._clock()
        try:
            if self._started and message["kind"] in self._handlers:
                self._handlers[message["kind"]](worker, message)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            worker.connection.ended = f"it sent a {message['kind']!r} that cannot be read ({error!r})"

    def _on_heartbeat(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        worker.step, worker.activity = int(message["step"]), str(message["activity"])
        worker.since = worker.heard - float(message["seconds"])
        metadata = dict(message.get("metadata", worker.metadata))
        worker.metadata = {str(name): float(value) for name, value in metadata.items()}

    def _on_call(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        call = [message[name] for name in ("channel", "number", "operation", "topic", "value")]
        self._reply(self._collectives.put(worker.peer.index, *call))

    def _on_overdue(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        missing = self._collectives.missing(worker.peer.index).get(message["channel"])
        if self._suspends.tick() - self._suspends.since < float(message["seconds"]):
            return  # This process was suspended meanwhile, and may be the one that is waited for: it reports no failure.
        if missing:  # Else they have come in this moment.
            what = f"{message['what']} for {float(message['seconds']):.0f} s"
            statuses = [self._status(self._workers[index]) for index in missing]
            self._declare(find_overdue(self._clock(), statuses, worker.peer, what))

    def _on_abandon(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        self._collectives.abandon(worker.peer.index, message["channel"])

    def _on_fail(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        worker.failed = True
        found = make_failure(FailureKind.FAILED, worker.peer, f"failed: {message['summary']}")
        self._loop.later(_SETTLE_SECONDS, lambda: self._declare(found, message["may_follow"]))

    def _on_leave(self, worker: _WorkerRecord, message: dict[str, Any]) -> None:
        worker.left, worker.stays = True, bool(message["stays"])
        if worker.peer.index == 0:
            self._send_all({"kind": "chief left"})
        self._reply(self._collectives.leave(worker.peer.index, str(worker.peer)))
        if worker.peer.index and not worker.stays:
            worker.connection.send(encode({"kind": "noted"}))
        self._release_staying()

    def _closed(self, worker: _WorkerRecord) -> None:
        worker.closed = True
        if not self._started:
            sentence = f"{worker.peer} went away before all workers had joined: {worker.connection.ended}. Fix: see the end of its output."
            if self._rejection is None:
                rejection = JoinRejection(sentence, everyone=True, exit_code=PEER_LOST)
                self._cancel_start(rejection, self._group.workers)
        elif not worker.failed and (death := find_death(self._status(worker), worker.connection.ended)):
            self._declare(death)
        self._release_staying()

    # Messages to the workers.

    def _tick(self) -> None:
        now = self._suspends.tick()
        if self._started and self._failure is None:
            calls = [(waiting, missing) for _, waiting, missing in self._collectives.waits()]
            found = find_failure(now, self.heartbeats(), self._limits, calls)
            if found is not None:
                self._declare(found)
        if not self._started and self._rejection is None and now > self._deadline:
            self._cancel_start(self._missing_at_start(), 0)
        waits = self._waits()
        for index, worker in self._workers.items():
            if not worker.closed:
                worker.connection.send(_heartbeat(index, waits))
        self._loop.later(HEARTBEAT_SECONDS, self._tick)

    def _waits(self) -> list[_Wait]:
        """Describe all waits, each once for all workers that wait: their number times that of the missing may be millions."""
        if not self._started:
            return [(START, self._workers, {"names": self._admission.missing(), "long": False})]
        left = {index for index, worker in self._workers.items() if worker.left}
        staying = [index for index, worker in self._workers.items() if not (worker.left or worker.closed)]
        waits = [*self._collectives.waits(), (LEAVE, left, staying)]
        return [(channel, waiting, self._described(missing)) for channel, waiting, missing in waits if waiting]

    def _described(self, missing: list[int]) -> dict[str, Any]:
        """Name the workers that a wait is for, and say whether one of them may take long."""
        workers = [self._workers[index] for index in missing]
        names = abridged([f"{worker.peer}, {self._status(worker).doing}" for worker in workers])
        return {"names": names, "long": any(worker.activity in MAY_TAKE_LONG for worker in workers)}

    def _status(self, worker: _WorkerRecord) -> WorkerStatus:
        heard, since = max(worker.heard, self._suspends.since), max(worker.since, self._suspends.since)
        return WorkerStatus(worker.peer, heard, worker.step, worker.activity, since, worker.left, worker.metadata)

    def _declare(self, found: Failure, may_follow: bool = True) -> None:
        """Report the job's first failure to all workers, last to this process, which may end at once.

        If it may follow from the failure of another worker, that is looked for.
        """
        if self._failure is None:
            self._failure = find_cause(self._clock(), found, self.heartbeats()) if may_follow else found
            self._send_all({"kind": "failure", "failure": asdict(self._failure)})
            self._release_staying()

    def _reply(self, replies: list[CollectiveReply]) -> None:
        for reply in replies:
            frame = _result(reply)
            for index in reply.to:
                self._workers[index].connection.send(frame)

    def _send_all(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        for _, worker in sorted(self._workers.items(), reverse=True):
            if not worker.closed and not (worker.left and not worker.stays and message["kind"] == "failure"):
                worker.connection.send(frame)

    def _release_staying(self) -> None:
        """Confirm the leaving of the chief, and of other workers that stay, when they need not stay for the others any more."""
        others = [worker for index, worker in self._workers.items() if index]
        if self._workers[0].left and (self._failure is not None or all(x.left or x.closed for x in others)):
            for _, worker in sorted(self._workers.items(), reverse=True):
                if not worker.closed and (worker.stays or not worker.peer.index):
                    worker.connection.send(encode({"kind": "noted"}))


def _heartbeat(index: int, waits: list[_Wait]) -> bytes:
    """Return the chief's heartbeat for a worker, with the missing workers for each channel on which it waits."""
    missing = {channel: described for channel, waiting, described in waits if index in waiting}
    return encode({"kind": "heartbeat", "missing": missing})


def _refusal(rejection: JoinRejection) -> dict[str, Any]:
    return refusal(rejection.sentence, again=rejection.again, exit_code=rejection.exit_code)


def _result(reply: CollectiveReply) -> bytes:
    message = {"kind": "result", "channel": reply.channel, "values": reply.values, "error": reply.error}
    try:
        return encode(message)
    except OptionError as error:  # Each value was small enough, all together are not.
        return encode(message | {"values": [], "error": f"The values of all workers do not fit. {error}"})
