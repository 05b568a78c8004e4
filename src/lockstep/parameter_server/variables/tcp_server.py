"""The shell with sockets: it listens where it is told to, and serves each worker in a thread of its own."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from lockstep._logging import log_info
from lockstep.distributed.control.handshake_server import HandshakeError
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    ConnectionLostError,
    Message,
    ProtocolError,
)
from lockstep.parameter_server.variables.client_session import Answer, ClientSession
from lockstep.parameter_server.variables.handshake import let_in
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = ["ArrayServer", "RequestHandler"]

_MOST_AT_THE_DOOR = 32  # Who has not said yet who they are; more are closed at once.
_AGAIN_SECONDS = 0.05
_LONGEST_REASON = 300  # Strangers may send any text.
_TOLD = 3  # A scanner of ports must not fill the log.
_MESSAGE_SECONDS = 60.0  # Limit of the wait for more of a message that has begun, and for room to send an answer.


class RequestHandler(Protocol):
    """What is served: :class:`lockstep.parameter_server.variables.variable_service.VariableService` and :class:`lockstep.parameter_server.tasks.task_dispatcher.TaskDispatcher`."""

    def judge(self, message: Message, given: tuple[VariableSpec, ...]) -> None:
        """Refuse a message by ProtocolError, before its arrays are received."""

    def answer(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Answer:
        """Do what is asked, and wait for it where needed; ProtocolError where it cannot be asked."""

    def leave(self, visit: ClientSession) -> None:
        """Who came has gone."""


class ArrayServer:
    """Serves until it is stopped.

    Args:
        me: this process; who comes must have the same identity.
        answers: answers what is asked.
        listener: a socket that listens; it belongs to this object from now on.
        secret: what others must know; None: nothing.
        announce: takes lines.

    Attributes:
        turned_away: why connections were closed, as far as it was told.
    """

    def __init__(
        self,
        me: Peer,
        answers: RequestHandler,
        listener: socket.socket,
        *,
        secret: bytes | None = None,
        announce: Callable[[str], None] = log_info,
    ) -> None:
        self._me, self._answers, self._listener = me, answers, listener
        self._secret, self._announce = secret, announce
        self._links: set[ArrayConnection] = set()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_AT_THE_DOOR)
        self._stopped = threading.Event()
        self.turned_away: list[str] = []
        self._thread = threading.Thread(target=self._accept, name=f"lockstep-accept-{me.index}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Close everything; updates that have begun come to their end."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            links = tuple(self._links)
        for link in links:
            link.cut()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError:  # Closed; or no descriptors are left, and others are served all the same.
                self._stopped.wait(_AGAIN_SECONDS)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._receive, args=(connected,), daemon=True).start()
            else:
                connected.close()

    def _receive(self, connected: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        link = ArrayConnection(connected, _MESSAGE_SECONDS)
        with self._lock:
            self._links.add(link)
        if self._stopped.is_set():  # It came in the same moment.
            link.cut()
        try:
            visit = self._meet(link)
            if visit is not None:
                self._serve(link, visit)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _meet(self, link: ArrayConnection) -> ClientSession | None:
        try:
            return ClientSession(let_in(link, self._me, self._secret), is_gone=link.is_closed)
        except (ConnectionLostError, ProtocolError, HandshakeError) as error:
            self._turn_away(link, "it", error)
            return None
        finally:
            self._places.release()

    def _serve(self, link: ArrayConnection, visit: ClientSession) -> None:
        link.give_up_after(_MESSAGE_SECONDS)
        try:
            while True:
                link.wait_at_most(None)  # A worker may compute for as long as it likes.
                link.expect()
                link.wait_at_most(_MESSAGE_SECONDS)
                link.send(*self._answers.answer(visit, *link.receive(self._answers.judge)))
        except ConnectionLostError:
            pass  # It has ended, or died: whoever started it knows.
        except ProtocolError as error:
            self._turn_away(link, str(visit), error)
        finally:
            self._answers.leave(visit)

    def _turn_away(self, link: ArrayConnection, who: str, error: Exception) -> None:
        if self._stopped.is_set():
            return
        reason = str(error)[:_LONGEST_REASON]
        sentence = f"a connection from {link.address} was closed: {who}: {reason}"
        with self._lock:
            is_told = len(self.turned_away) < _TOLD
            if is_told:
                self.turned_away.append(sentence)
        if is_told:
            self._announce(sentence)
        link.refuse({"kind": "refused", "sentence": reason})
