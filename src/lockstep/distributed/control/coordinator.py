"""The chief's side of the control channel: who has joined, what the workers ask each other, who is missing or stuck.

It lives in a thread of the chief's process. The chief's own session is connected to it like any other.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep._errors import OptionError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.control.admission import Admission, JoinRejection
from lockstep.distributed.control.event_loop import EventLoop
from lockstep.distributed.control.failure_detector import (
    BEAT_SECONDS,
    MAY_TAKE_LONG,
    START,
    Limits,
    SuspendDetector,
    WorkerStatus,
    cause,
    failure,
    look,
    overdue,
)
from lockstep.distributed.control.failures import Failure, FailureKind
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.handshake_server import HandshakeServer
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.pending_collectives import CollectiveReply, PendingCollectives
from lockstep.distributed.control.protocol import FIRST_BYTES, MAX_BYTES, encode
from lockstep.distributed.control.wait_logger import listed

__all__ = ["LEAVE", "LINGER_SECONDS", "Coordinator"]

LEAVE = "leave"  # Names the wait of a chief for the others' ends, as lanes name the waits of calls.

LINGER_SECONDS = 5.0  # For workers that come after the start has failed, so that they hear why.
_SETTLE_SECONDS = 0.25  # After an exception, as it may come of a death of which we hear a moment later.


@dataclass
class _WorkerRecord:
    """A worker that has joined, and what was last heard of it."""

    connection: FramedSocket
    peer: Peer
    heard: float
    since: float
    step: int = 0
    activity: str = START
    left: bool = False  # It said goodbye.
    failed: bool = False  # It said that its program failed.
    gone: bool = False  # Its connection has ended.
    facts: Mapping[str, float] = field(default_factory=dict)  # Numbers that it says of itself.


class Coordinator:
    """Serves one job.

    Args:
        group: who takes part.
        chief: this process.
        listener: where the others connect; None for a job of one worker.
        secret: what they must know.
        limits: of waits.
        announce: takes lines.
        clock: gives seconds, and is not set back.

    Attributes:
        connection: the end for the chief's own session.
        all_told: is set when all workers know why the job cannot start, or were waited for in vain.
    """

    def __init__(
        self,
        group: WorkerGroup,
        chief: Peer,
        listener: socket.socket | None,
        secret: bytes | None,
        limits: Limits,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._limits, self._clock = group, limits, clock
        self._deadline = clock() + limits.until_all_are_here
        self._loop = EventLoop("lockstep-chief", clock)
        self._roster = Admission(group, chief)
        self._door = HandshakeServer(self._loop, chief, secret, self._arrived, announce)
        self._calls = PendingCollectives(group.workers)
        self._handlers = {
            "beat": self._beat,
            "call": self._call,
            "abandon": self._abandon,
            "overdue": self._overdue,
            "fail": self._fail,
            "leave": self._leave,
        }
        self._awake = SuspendDetector(clock)
        self._seats: dict[int, _WorkerRecord] = {}
        self._started = False
        self._refusal: JoinRejection | None = None
        self._told: set[int] = set()
        self._to_tell = 0
        self._failure: Failure | None = None
        self.all_told = threading.Event()
        here, there = socket.socketpair()
        self.connection = FramedSocket(there)
        self._sit(FramedSocket(here), chief)
        if listener is not None:
            self._loop.listen(listener, self._door.knock, FIRST_BYTES)
        self._loop.later(0.0, self._tick)
        self._loop.start()

    def stop(self) -> None:
        """Close all connections and end."""
        self._loop.stop()

    def beats(self) -> list[WorkerStatus]:
        """What is known of all workers that have joined, in order; may be asked from any thread."""
        return [self._known(seat) for _, seat in sorted(self._seats.items())]

    # Joining.

    def _arrived(self, connection: FramedSocket, peer: Peer) -> None:
        refusal = self._refusal or self._roster.judge(peer)
        if refusal is None:
            self._sit(connection, peer)
            return
        if refusal.everyone and self._refusal is None:
            self._give_up(refusal, max(peer.workers, self._group.workers))
        connection.send(encode(_refuse(refusal)))
        self._loop.remove(connection)
        self._tell(peer.index)

    def _sit(self, connection: FramedSocket, peer: Peer) -> None:
        now = self._clock()
        self._seats[peer.index] = seat = _WorkerRecord(connection, peer, heard=now, since=now)
        self._roster.peers[peer.index] = peer
        connection.allow(MAX_BYTES)
        self._loop.add(connection, lambda _, message: self._received(seat, message), lambda _: self._closed(seat))
        if self._roster.is_complete:
            self._loop.call(self._start)

    def _start(self) -> None:
        if self._refusal is not None:
            return  # Somebody went away in the same moment.
        self._started = True
        for seat in self._seats.values():
            seat.heard = seat.since = self._clock()
        told = ("index", "host", "pid", "address", "information")
        peers = [{name: vars(seat.peer)[name] for name in told} for _, seat in sorted(self._seats.items())]
        self._send_all({"kind": "welcome", "peers": peers})

    def _give_up(self, refusal: JoinRejection, to_tell: int) -> None:
        """The job cannot start: say so to all that are here, and for a while to those that come, ``to_tell`` in all."""
        self._refusal, self._to_tell = refusal, to_tell
        self._send_all(_refuse(refusal))
        self._loop.later(LINGER_SECONDS, self.all_told.set)
        self._tell(*self._seats)

    def _tell(self, *indices: int) -> None:
        self._told.update(indices)
        if self._refusal is not None and len(self._told) >= self._to_tell:
            self.all_told.set()

    def _missing_at_start(self) -> JoinRejection:
        away = "".join(f" {address} was turned away: {reason}." for reason, address in self._door.turned_away.items())
        missing = self._roster.missing()
        return JoinRejection(
            f"{listed(missing)} did not join within {self._limits.until_all_are_here:g} s: {'are they' if missing[1:] else 'is it'} "
            f"started, and can {self._group.coordinator} be reached from there?{away}",
            exit_code=exit_codes.PEER_LOST,
        )

    # What the workers say.

    def _received(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        seat.heard = self._clock()
        try:
            if self._started and message["kind"] in self._handlers:
                self._handlers[message["kind"]](seat, message)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            seat.connection.ended = f"it sent a {message['kind']!r} that cannot be read ({error!r})"

    def _beat(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        seat.step, seat.activity = int(message["step"]), str(message["activity"])
        seat.since = seat.heard - float(message["seconds"])
        seat.facts = {str(name): float(value) for name, value in message.get("facts", seat.facts).items()}

    def _call(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        asked = [message[name] for name in ("lane", "number", "operation", "topic", "value")]
        self._reply(self._calls.put(seat.peer.index, *asked))

    def _overdue(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        missing = self._calls.missing(seat.peer.index).get(message["lane"])
        if self._awake.tick() - self._awake.since < float(message["seconds"]):
            return  # This process was stopped while that one waited, perhaps for this one; the answer is its silence.
        if missing:  # Else they have come in this moment.
            what = f"{message['what']} for {float(message['seconds']):.0f} s"
            self._declare(
                overdue(self._clock(), [self._known(self._seats[index]) for index in missing], seat.peer, what)
            )

    def _abandon(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        self._calls.abandon(seat.peer.index, message["lane"])

    def _fail(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        seat.failed = True
        found = failure(FailureKind.FAILED, seat.peer, f"failed: {message['summary']}")
        self._loop.later(_SETTLE_SECONDS, lambda: self._declare(found))

    def _leave(self, seat: _WorkerRecord, message: dict[str, Any]) -> None:
        seat.left = True
        self._send_all({"kind": "departed", "worker": seat.peer.index})
        self._reply(self._calls.leave(seat.peer.index, str(seat.peer)))
        if seat.peer.index:
            seat.connection.send(encode({"kind": "noted"}))
        self._let_the_chief_go()

    def _closed(self, seat: _WorkerRecord) -> None:
        seat.gone = True
        if not self._started:
            sentence = f"{seat.peer} went away before all workers had joined: {seat.connection.ended}."
            if self._refusal is None:
                gone = JoinRejection(sentence, everyone=True, exit_code=exit_codes.PEER_LOST)
                self._give_up(gone, self._group.workers)
        elif not seat.left and not seat.failed:
            self._declare(
                failure(
                    FailureKind.DIED,
                    seat.peer,
                    f"died: {seat.connection.ended} without a goodbye, last {self._known(seat).doing}.",
                )
            )
        self._let_the_chief_go()

    # What the workers are told.

    def _tick(self) -> None:
        now = self._awake.tick()
        if self._started and self._failure is None:
            found = look(now, [self._known(seat) for seat in self._seats.values()], self._limits)
            if found is not None:
                self._declare(found)
        if not self._started and self._refusal is None and now > self._deadline:
            self._give_up(self._missing_at_start(), 0)
        for index, seat in self._seats.items():
            if not seat.gone:
                seat.connection.send(encode({"kind": "beat", "missing": self._missing(index)}))
        self._loop.later(BEAT_SECONDS, self._tick)

    def _missing(self, index: int) -> dict[str, Any]:
        """Whom a worker waits for on each lane, and whether one of them may take long."""
        if not self._started:
            return {START: {"names": self._roster.missing(), "long": False}}
        waits = self._calls.missing(index)
        if self._seats[index].left:
            waits[LEAVE] = [other for other, seat in self._seats.items() if not (seat.left or seat.gone)]
        return {lane: self._described([self._seats[other] for other in others]) for lane, others in waits.items()}

    def _described(self, seats: list[_WorkerRecord]) -> dict[str, Any]:
        names = [f"{seat.peer}, {self._known(seat).doing}" for seat in seats]
        return {"names": names, "long": any(seat.activity in MAY_TAKE_LONG for seat in seats)}

    def _known(self, seat: _WorkerRecord) -> WorkerStatus:
        heard, since = max(seat.heard, self._awake.since), max(seat.since, self._awake.since)
        return WorkerStatus(seat.peer, heard, seat.step, seat.activity, since, seat.left, seat.facts)

    def _declare(self, found: Failure) -> None:
        """The job has failed: the first cause is told to all, last to this process, which may end at once."""
        if self._failure is None:
            self._failure = cause(self._clock(), found, [self._known(seat) for seat in self._seats.values()])
            self._send_all({"kind": "failure", "failure": self._failure.as_message()})
            self._let_the_chief_go()

    def _reply(self, replies: list[CollectiveReply]) -> None:
        for reply in replies:
            frame = _result(reply)
            for index in reply.to:
                self._seats[index].connection.send(frame)

    def _send_all(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        for _, seat in sorted(self._seats.items(), reverse=True):
            if not seat.gone and not (seat.left and message["kind"] == "failure"):
                seat.connection.send(frame)

    def _let_the_chief_go(self) -> None:
        others = [seat for index, seat in self._seats.items() if index]
        if self._seats[0].left and (self._failure is not None or all(seat.left or seat.gone for seat in others)):
            self._seats[0].connection.send(encode({"kind": "noted"}))


def _refuse(refusal: JoinRejection) -> dict[str, Any]:
    known = {"sentence": refusal.sentence, "again": refusal.again, "exit_code": refusal.exit_code}
    return {"kind": "refuse", **known}


def _result(reply: CollectiveReply) -> bytes:
    message = {"kind": "result", "lane": reply.lane, "values": reply.values, "error": reply.error}
    try:
        return encode(message)
    except OptionError as error:  # Each value was small enough, all together are not.
        return encode(message | {"values": [], "error": f"The values of all workers do not fit. {error}"})
