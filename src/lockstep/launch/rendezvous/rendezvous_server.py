"""Server of the rendezvous: a thread in node 0's supervisor that connects the nodes to the state machine."""

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
from lockstep.distributed.control.handshake import HandshakeServer, refusal
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.transport import CLOSED, MAX_BYTES, FramedSocket, encode
from lockstep.launch.rendezvous.node_messages import GenerationOutcome, JobSpec, NodeInfo
from lockstep.launch.rendezvous.rendezvous_state import Outbound, RendezvousState

__all__ = ["RendezvousServer"]

_HEARTBEAT_SECONDS = 1.0
_TICK_SECONDS = 0.1
_DEAD_SECONDS = 35.0  # A machine that acknowledges nothing for so long is lost; the same as for an idle connection.
_LINGER_SECONDS = 2.0  # For the other nodes to receive the end of the job.
_LOCAL_KEY = 0  # The key of this node.


class RendezvousServer:
    """Serves the rendezvous of one job.

    Args:
        spec: of this node, which all other nodes must match.
        me: this supervisor.
        listener: socket that the other nodes connect to.
        secret: that they must know; None: no secret is needed.
        log: prints a line about a rejected connection.
        clock: returns seconds and never goes back.

    Attributes:
        connection: the end for this node's own client.
    """

    def __init__(
        self,
        spec: JobSpec,
        me: Peer,
        listener: socket.socket,
        secret: bytes | None,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = EventLoop("lockstep-rendezvous", clock)
        self._state = RendezvousState(spec, clock)
        self._connections: dict[int, FramedSocket] = {}
        self._next_key, self._ticks = _LOCAL_KEY, 0
        self._end_delivered = threading.Event()
        server_end, client_end = socket.socketpair()
        self.connection = FramedSocket(client_end)
        own_host = split_address("the coordinator", spec.coordinator)[0]
        self._add(FramedSocket(server_end), NodeInfo.of(me, own_host, is_server=True))
        self._loop.listen(listener, HandshakeServer(self._loop, me, secret, self._on_join, log).accept)
        self._loop.later(0.0, self._tick)
        self._loop.start()

    def stop(self, code: int, sentence: str) -> None:
        """End the job with this code if it has not ended yet, and close when the other nodes have received the end."""
        self._loop.call(lambda: self._finish(code, sentence))
        self._end_delivered.wait(_LINGER_SECONDS)
        self._loop.stop()

    def _finish(self, code: int, sentence: str) -> None:
        if not self._state.is_over:
            self._send(self._state.finish(code, sentence))
        self._check_end_delivered()

    def _on_join(self, connection: FramedSocket, peer: Peer) -> None:
        try:
            rejection = self._state.validate(peer)
            node = None if rejection else NodeInfo.of(peer, _host_of(connection))
        except (LockstepError, TypeError, ValueError) as error:
            node, rejection = None, JoinRejection(f"{peer.process} sent an invalid description of its node ({error})")
        if node is not None:
            connection.send(encode({"kind": "welcome"}))
            self._add(connection, node)
        elif rejection is not None:
            connection.send(encode(refusal(rejection.sentence, again=rejection.again)))
            self._loop.remove(connection)

    def _add(self, connection: FramedSocket, node: NodeInfo) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        self._connections[key] = connection
        connection.set_limit(MAX_BYTES)
        connection.limit_unacknowledged(_DEAD_SECONDS)
        self._loop.add(connection, lambda _, message: self._on_message(key, message), lambda _: self._on_close(key))
        self._send(self._state.add(key, node))

    def _on_message(self, key: int, message: dict[str, Any]) -> None:
        try:
            if message["kind"] == "ended":
                self._send(self._state.record(key, GenerationOutcome.from_message(message)))
        except (KeyError, TypeError, ValueError) as error:
            self._connections[key].ended = f"it sent an invalid message ({error!r})"

    def _on_close(self, key: int) -> None:
        why = self._connections.pop(key).ended or CLOSED
        self._send(self._state.remove(key, why))
        self._check_end_delivered()

    def _check_end_delivered(self) -> None:
        if self._state.is_over and not set(self._connections) - {_LOCAL_KEY}:
            self._end_delivered.set()

    def _tick(self) -> None:
        self._send(self._state.advance())
        self._ticks += 1
        if self._ticks % round(_HEARTBEAT_SECONDS / _TICK_SECONDS) == 0:
            heartbeat = encode({"kind": "beat", "waits": self._state.describe_wait()})
            for key in self._state.idle_nodes():
                self._connections[key].send(heartbeat)
        self._loop.later(_TICK_SECONDS, self._tick)

    def _send(self, messages: Iterable[Outbound]) -> None:
        for outbound in messages:
            if outbound.to in self._connections:
                self._connections[outbound.to].send(encode(outbound.message))


def _host_of(connection: FramedSocket) -> str:
    """Return the host of the other end; an IPv4 address that a dual-stack socket shows as IPv6 is returned as IPv4."""
    host = split_address("address", connection.address)[0]
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)
