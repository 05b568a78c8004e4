"""The side of the meeting that every supervisor has: it comes, is told its place, says how its workers have ended, and hears the end."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.cluster.exit_codes import DONE, NO_PROGRESS, PEER_LOST
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.protocol import encode
from lockstep.distributed.control.wait_logger import WaitLogger
from lockstep.launch.local_workers import ENDING, LocalWorkers
from lockstep.launch.rank_assignment import RankAssignment
from lockstep.launch.rendezvous.node_messages import GenerationOutcome
from lockstep.launch.rendezvous.rendezvous_server import RendezvousServer
from lockstep.launch.restart_loop import is_final
from lockstep.launch.signal_pipe import SignalPipe

__all__ = ["NodeExit", "RendezvousClient", "seconds_left", "unwanted"]

_SILENT_SECONDS = 60.0  # The host says something each second.


@dataclass(frozen=True)
class NodeExit:
    """Why this node takes part no more: the exit code, and a sentence for the user where there is one to say."""

    code: int
    sentence: str


@dataclass
class RendezvousClient:
    """The course of a node that meets others.

    Args:
        connection: to the host.
        host: the meeting itself, where it is at this node.
        where: the meeting, for messages.
        received: the signals of the supervisor.
        stop_at: when the run must be over, on the monotonic clock.
        say: takes lines for the user.
    """

    connection: FramedSocket
    host: RendezvousServer | None
    where: str
    received: SignalPipe
    stop_at: float | None
    say: Callable[[str], None]
    _end: NodeExit | None = field(default=None, init=False)
    _place: RankAssignment | None = field(default=None, init=False)
    _called_off: str | None = field(default=None, init=False)
    _last_code: int | None = field(default=None, init=False)
    _waits_for: str = field(default="", init=False)
    _heard: float = field(default=0.0, init=False)

    @property
    def code(self) -> int:
        """What the job ends with on this node."""
        return DONE if self._end is None else self._end.code

    @property
    def news(self) -> "RendezvousClient":
        """This: others say here that a generation must end."""
        return self

    def fileno(self) -> int:
        """Of the connection."""
        return self.connection.fileno()

    def read(self) -> str | None:
        """Why the workers here must end; None where that was not said."""
        self._receive()
        return self._called_off if self._end is None else self._end.sentence or "the job is over"

    def places(self) -> Generator[RankAssignment, None, None]:
        """One for each generation that this node takes part in."""
        while True:
            self._wait()
            if self._end is not None or self._place is None:
                break
            place, self._place, self._called_off = self._place, None, None
            last = place.first + place.workers - 1
            own = f"worker {last}" if place.workers == 1 else f"workers {place.first} to {last}"
            self.say(
                f"start {place.generation}: node {place.node} of {place.nodes}, {own} of {place.all_workers}; worker 0 is at {place.meeting}."
            )
            yield place
        if self._end is not None and self._end.sentence:
            self.say(f"{self._end.sentence}.")

    def note(self, ended: LocalWorkers) -> None:
        """Tell the meeting how a generation has ended here."""
        self._last_code = ended.code
        outcome = self._outcome(ended)
        self.connection.send(encode({"kind": "ended", **outcome.as_message()}))
        if self._end is None and (outcome.leaves or outcome.is_final):
            self._end = NodeExit(ended.code, "")

    def close(self) -> None:
        """Leave; where the meeting is here, it is over for all."""
        if self.host is not None:
            code = self.code or PEER_LOST
            self.host.stop(code, f"{self.where} has ended, and the job cannot go on without it")
        self.connection.flush()
        self.connection.close()

    def _outcome(self, ended: LocalWorkers) -> GenerationOutcome:
        if ended.is_unwanted and self.host is not None:
            return GenerationOutcome(ended.code or PEER_LOST, "it was asked to end", is_final=True, leaves=True)
        if ended.is_unwanted:
            return GenerationOutcome(PEER_LOST if ended.code else DONE, "it was asked to end", leaves=True)
        if ended.is_late:
            return GenerationOutcome(ended.code, "the run took longer than --timeout allows", is_final=True)
        failure = ended.failure
        if failure is None:
            return GenerationOutcome(ended.code, "its workers were asked to end", is_consequence=True)
        return GenerationOutcome(ended.code, failure.headline, failure.is_consequence, is_final(ended))

    def _wait(self) -> None:
        """Until there is a place or an end."""
        notice = WaitLogger(self.say)
        self._heard = time.monotonic()
        while True:
            self._receive()
            if self._place is not None or self._end is not None:
                return
            limit = min(seconds_left(self.stop_at), self._heard + _SILENT_SECONDS - time.monotonic())
            if limit <= 0:
                self._end = self._end_of_patience()
                return
            numbers, _ = self.received.wait(min(limit, 1.0), [self.fileno()])
            self._end = unwanted(numbers, self._last_code)
            if self._waits_for:
                notice.tell(self._waits_for)

    def _end_of_patience(self) -> NodeExit:
        if seconds_left(self.stop_at) <= 0:
            return NodeExit(NO_PROGRESS, "the run takes longer than --timeout allows")
        return NodeExit(
            PEER_LOST, f"{self.where} said nothing for {_SILENT_SECONDS:g} s, and the job cannot go on without it"
        )

    def _receive(self) -> None:
        for message in self.connection.receive():
            self._heard = time.monotonic()
            self._take(message)
        if self.connection.ended is not None and self._end is None:
            why = self.connection.ended
            self._end = NodeExit(PEER_LOST, f"{self.where} was lost ({why}), and the job cannot go on without it")

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "start":
            self._place = RankAssignment(**message["place"])
        elif message["kind"] == "call off":
            self._called_off = message["sentence"]
        elif message["kind"] == "again":
            self.say(f"{message['sentence']}.")
        elif message["kind"] == "beat":
            self._waits_for = message["waits"]
        elif message["kind"] == "end" and self._end is None:
            self._end = NodeExit(int(message["code"]), message["sentence"])


def seconds_left(stop_at: float | None) -> float:
    """Until the run must be over."""
    return float("inf") if stop_at is None else stop_at - time.monotonic()


def unwanted(numbers: list[int], code: int | None = None) -> NodeExit | None:
    """The end where the supervisor was asked to end while nothing runs: with ``code``, if workers have run before."""
    asked = [number for number in numbers if number in ENDING]
    return NodeExit(128 + asked[0] if code is None else code, "") if asked else None
