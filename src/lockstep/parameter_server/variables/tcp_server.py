"""TCP server of a parameter server or of the chief's task dispatcher: one thread for each client."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._logging import log_info
from lockstep.distributed.control.handshake import HandshakeError, RejectionLog, accept, refusal
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.transport import HANDSHAKE_BYTES, FramedSocket, encode
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    ConnectionLostError,
    Message,
    ProtocolError,
)

__all__ = ["ArrayServer", "ClientSession", "RequestHandler", "Response", "seconds_of"]

_MAX_HANDSHAKES = 32  # At the same time; further connections are closed at once.
_RETRY_SECONDS = 0.05
_MESSAGE_SECONDS = 60.0  # Limit of the wait for more of a message that has begun, and for room to send a response.
_MAX_WAIT_SECONDS = 3600.0
_MAX_SENTENCE = 300  # Characters: clients may send any text.

Response = tuple[Message, Mapping[str, np.ndarray]]


class ClientSession:
    """One connection of a client; a client that connects again has another session.

    Args:
        peer: the client.
        is_gone: returns whether the client has closed the connection while it waits for a response.
    """

    def __init__(self, peer: Peer, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.peer, self.is_gone = peer, is_gone

    def __str__(self) -> str:
        return str(self.peer)


def seconds_of(message: Message) -> float:
    """Return how long a request may wait; ProtocolError if that is no number of seconds."""
    seconds = message.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds <= _MAX_WAIT_SECONDS:
        return float(seconds)
    raise ProtocolError(f"seconds: expected a number from 0 to {_MAX_WAIT_SECONDS:g}, got {str(seconds)[:40]!r}")


class RequestHandler(Protocol):
    """The service behind a server: :class:`lockstep.parameter_server.variables.variable_service.VariableService` or :class:`lockstep.parameter_server.tasks.task_dispatcher.TaskDispatcher`."""

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Refuse a request by ProtocolError, before its arrays are received."""

    def handle(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        """Return the response to a request, after any wait that it needs; ProtocolError if the request is not allowed."""

    def leave(self, session: ClientSession) -> None:
        """Note that a client has gone."""


class ArrayServer:
    """Serves requests until it is stopped.

    Args:
        me: this process; clients must have the same identity.
        handler: handles the requests.
        listener: a listening socket, which belongs to this object from now on.
        secret: that clients must know; None: none.
        log: takes lines.

    Attributes:
        rejections: why connections were closed.
    """

    def __init__(
        self,
        me: Peer,
        handler: RequestHandler,
        listener: socket.socket,
        *,
        secret: bytes | None = None,
        log: Callable[[str], None] = log_info,
    ) -> None:
        self._me, self._handler, self._listener, self._secret = me, handler, listener, secret
        self.rejections = RejectionLog(log)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"lockstep-accept-{me.index}", daemon=True)

    def start(self) -> None:
        """Start to accept connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close all connections; updates that have begun are completed."""
        self._stopped.set()
        _shut_down(self._listener)
        self._listener.close()
        with self._lock:
            sockets = tuple(self._sockets)
        for connected in sockets:
            _shut_down(connected)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError:  # Closed; or no descriptors are left: keep serving the other clients.
                self._stopped.wait(_RETRY_SECONDS)
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._run, args=(connected,), daemon=True).start()
            else:
                connected.close()

    def _run(self, connected: socket.socket) -> None:
        """Serve one connection, from its first byte to its last."""
        with self._lock:
            self._sockets.add(connected)
        if self._stopped.is_set():  # It came at the same moment.
            _shut_down(connected)
        try:
            peer = self._admit(FramedSocket(connected, HANDSHAKE_BYTES))
            if peer is not None:
                link = ArrayConnection(connected, _MESSAGE_SECONDS)
                self._serve(link, ClientSession(peer, is_gone=link.is_closed))
        finally:
            with self._lock:
                self._sockets.discard(connected)
            connected.close()

    def _admit(self, connection: FramedSocket) -> Peer | None:
        """Run the handshake; None if the client is refused."""
        try:
            peer = accept(connection, self._me, self._secret)
            _check_identity(peer.identity, self._me.identity)
            connection.send(encode({"kind": "welcome"}))
            connection.detach()
        except (HandshakeError, ProtocolError) as error:
            connection.send(encode(refusal(str(error))))
            self._note_rejection(connection.address, str(error))
            return None
        finally:
            self._handshakes.release()
        return peer

    def _serve(self, link: ArrayConnection, session: ClientSession) -> None:
        link.limit_unacknowledged(_MESSAGE_SECONDS)
        try:
            while True:
                link.set_timeout(None)  # A worker may compute for as long as it likes.
                link.wait_for_message()
                link.set_timeout(_MESSAGE_SECONDS)
                link.send(*self._handler.handle(session, *link.receive(self._handler.check)))
        except ConnectionLostError:
            pass  # The client has ended, or died: its launcher knows.
        except ProtocolError as error:
            self._note_rejection(link.address, f"{session}: {error}")
            link.refuse(refusal(str(error)[:_MAX_SENTENCE]))
        finally:
            self._handler.leave(session)

    def _note_rejection(self, address: str, reason: str) -> None:
        if not self._stopped.is_set():
            self.rejections.add(address, reason)


def _check_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise HandshakeError(f"its {name} is {theirs.get(name)!r}, that of the server {ours.get(name)!r}")


def _shut_down(connected: socket.socket) -> None:
    """End a connection from any thread: the thread that uses it gets an error, and closes it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
