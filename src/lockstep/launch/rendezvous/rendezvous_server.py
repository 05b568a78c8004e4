"""The side of the meeting that listens: a thread of node 0's supervisor, which carries what the assembly decides."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lockstep._errors import LockstepError
from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.control.admission import JoinRejection
from lockstep.distributed.control.event_loop import EventLoop
from lockstep.distributed.control.framed_socket import CLOSED, FramedSocket
from lockstep.distributed.control.handshake_server import HandshakeServer
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.protocol import FIRST_BYTES, MAX_BYTES, encode
from lockstep.launch.rendezvous.node_messages import GenerationOutcome, JobSpec, NodeInfo
from lockstep.launch.rendezvous.rendezvous_state import Outbound, RendezvousState

__all__ = ["RendezvousServer"]

_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.1
_DEAD_SECONDS = 35.0  # After these a machine that answers no more is lost; the same as for one that nothing is sent to.
_LINGER_SECONDS = 2.0  # For the others to hear that the job is over.
_OWN = 0  # The key of the node that the meeting is at.


class RendezvousServer:
    """Serves the meeting of one job.

    Args:
        terms: of this node, which all others must have.
        me: this supervisor.
        listener: where the others connect.
        secret: what they must know; None: nothing.
        announce: takes a line about who was turned away.
        clock: gives seconds, and is not set back.

    Attributes:
        connection: the end for this node's own guest.
    """

    def __init__(
        self,
        terms: JobSpec,
        me: Peer,
        listener: socket.socket,
        secret: bytes | None,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = EventLoop("lockstep-meeting", clock)
        self._assembly = RendezvousState(terms, clock)
        self._connections: dict[int, FramedSocket] = {}
        self._next_key, self._ticks = _OWN, 0
        self._all_told = threading.Event()
        here, there = socket.socketpair()
        self.connection = FramedSocket(there)
        self._sit(
            FramedSocket(here), NodeInfo.of(me, split_address("the coordinator", terms.coordinator)[0], is_host=True)
        )
        self._loop.listen(listener, HandshakeServer(self._loop, me, secret, self._arrived, announce).knock, FIRST_BYTES)
        self._loop.later(0.0, self._tick)
        self._loop.start()

    def stop(self, code: int, sentence: str) -> None:
        """End the job with this code if it has not ended yet, and close when the others know it."""
        self._loop.call(lambda: self._finish(code, sentence))
        self._all_told.wait(_LINGER_SECONDS)
        self._loop.stop()

    def _finish(self, code: int, sentence: str) -> None:
        if not self._assembly.is_over:
            self._say(self._assembly.finish(code, sentence))
        self._see_who_is_left()

    def _arrived(self, connection: FramedSocket, peer: Peer) -> None:
        try:
            refusal = self._assembly.judge(peer)
            node = None if refusal else NodeInfo.of(peer, _host_of(connection))
        except (LockstepError, TypeError, ValueError) as error:
            node, refusal = None, JoinRejection(f"{peer.process} did not say properly which node it is ({error})")
        if node is not None:
            connection.send(encode({"kind": "welcome"}))
            self._sit(connection, node)
        elif refusal is not None:
            message = {"kind": "refuse", "sentence": refusal.sentence, "again": refusal.again}
            connection.send(encode(message))
            self._loop.remove(connection)

    def _sit(self, connection: FramedSocket, node: NodeInfo) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        self._connections[key] = connection
        connection.allow(MAX_BYTES)
        connection.give_up_after(_DEAD_SECONDS)
        self._loop.add(connection, lambda _, message: self._received(key, message), lambda _: self._closed(key))
        self._say(self._assembly.come(key, node))

    def _received(self, key: int, message: dict[str, Any]) -> None:
        try:
            if message["kind"] == "ended":
                self._say(self._assembly.note(key, GenerationOutcome.from_message(message)))
        except (KeyError, TypeError, ValueError) as error:
            self._connections[key].ended = f"it sent what cannot be read ({error!r})"

    def _closed(self, key: int) -> None:
        why = self._connections.pop(key).ended or CLOSED
        self._say(self._assembly.go(key, why))
        self._see_who_is_left()

    def _see_who_is_left(self) -> None:
        if self._assembly.is_over and not set(self._connections) - {_OWN}:
            self._all_told.set()

    def _tick(self) -> None:
        self._say(self._assembly.step())
        self._ticks += 1
        if self._ticks % round(_BEAT_SECONDS / _TICK_SECONDS) == 0:
            beat = encode({"kind": "beat", "waits": self._assembly.waits_for()})
            for key in self._assembly.waiting():
                self._connections[key].send(beat)
        self._loop.later(_TICK_SECONDS, self._tick)

    def _say(self, said: Iterable[Outbound]) -> None:
        for one in said:
            if one.to in self._connections:
                self._connections[one.to].send(encode(one.message))


def _host_of(connection: FramedSocket) -> str:
    """Where a connection comes from; an IPv4 address that a socket for both shows as IPv6 is written as what it is."""
    host = split_address("address", connection.address)[0]
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)
