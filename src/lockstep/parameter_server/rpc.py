"""Remote calls between the processes of a job: requests and responses with arrays, the client that sends requests, and the server.

A client's requests are answered in their order; only connecting is repeated. On the server each connection has a thread of its own, which
calls the service behind it and may wait in it.
"""

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from lockstep._array_encoding import ArraySpec
from lockstep._errors import MAX_SECONDS, NO_PROGRESS, PEER_LOST, USER_ERROR, ClusterError, OptionError, summary_of
from lockstep._logging import WaitLogger, listed, log_info
from lockstep.distributed.control.handshake import (
    HandshakeError,
    HandshakeServer,
    Peer,
    RetryableConnectError,
    connect,
    introduce,
    refusal,
    wait_until_admitted,
)
from lockstep.distributed.control.transport import EventLoop, FramedSocket, ProtocolError, encode
from lockstep.distributed.control.value_differences import first_difference
from lockstep.parameter_server.array_transport import (
    ArrayConnection,
    Arrays,
    CheckRequest,
    ConnectionLostError,
    Message,
)

POLL_SECONDS = 0.25  # How often a waiting request checks whether its client has disconnected.
_MESSAGE_SECONDS = 60.0  # Limit of the wait for more of a message that has begun, and for room to send a response.
_MAX_SENTENCE = 300  # Characters: clients may send any text.
_RETRY_SECONDS = 0.1
_MARGIN_SECONDS = 5.0  # For a response that was due at the end of the wait to arrive.

Response = tuple[Message, Arrays]
Request = tuple[Message, Arrays, CheckRequest, "Future[Response]"]


def seconds_of(message: Message) -> float:
    """Return how long a request may wait; ProtocolError if that is no number of seconds."""
    seconds = message.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds <= MAX_SECONDS:
        return float(seconds)
    raise ProtocolError(f"seconds: expected a number from 0 to {MAX_SECONDS:g}, got {str(seconds)[:40]!r}")


def read_whole_number(message: Message, name: str) -> int:
    """Return a whole number of at least 0 from a message; raise ProtocolError if it is missing or something else."""
    value = message.get(name)
    if type(value) is int and value >= 0:
        return value
    raise ProtocolError(f"{name}: expected a whole number in a {message['kind']!r}, got {str(value)[:40]!r}")


def check_no_arrays(message: Message, given: Sequence[ArraySpec]) -> None:
    """Raise ProtocolError if arrays follow a response."""
    if given:
        raise ProtocolError(f"arrays follow a {message['kind']!r}")


class RpcClient:
    """Sends requests to one server. After the first failure of the connection, every request fails with the same error.

    Args:
        name: name of the server, with its address, for errors.
        link: to the server, after the handshake.
        timeout_seconds: limit of each wait.
    """

    def __init__(self, name: str, link: ArrayConnection, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._link = link
        self._link.set_timeout(timeout_seconds + _MARGIN_SECONDS)
        self._link.limit_unacknowledged(timeout_seconds)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._error: ClusterError | None = None
        self._is_closed, self._lock = False, threading.Lock()  # No request is queued behind the end.
        self._thread = threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        return self._link.sent, self._link.received

    def call(self, message: Message, arrays: Arrays, check: CheckRequest) -> "Future[Response]":
        """Send a request after all earlier ones; arrays must not change until the response is here.

        Args:
            message: the request.
            arrays: arrays of the request.
            check: raises ProtocolError if a response is not what was requested.
        """
        response: Future[Response] = Future()
        with self._lock:
            if self._is_closed:
                raise ClusterError(
                    f"{self.name}: this worker has closed its connection there. Fix: call this before fit or the scheduled function ends."
                )
            self._requests.put((message, arrays, check, response))
        return response

    def close(self) -> None:
        """Send the requests that are queued, and end."""
        with self._lock:
            self._is_closed = True
            self._requests.put(None)
        self._thread.join(self.timeout_seconds + _MARGIN_SECONDS)
        self._link.close()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            message, arrays, check, response = request
            try:
                response.set_result(self._exchange(message, arrays, check))
            except Exception as error:  # Any error belongs to the thread that waits for the response.
                response.set_exception(error)

    def _exchange(self, message: Message, arrays: Arrays, check: CheckRequest) -> Response:
        if self._error is not None:
            raise self._error
        try:
            reply, values = self._send(message, arrays, check)
        except ConnectionLostError as error:
            raise self._broken(
                f"was lost while this process waited for its answer to {message['kind']!r}: {error}"
            ) from None
        except ProtocolError as error:
            raise self._broken(f"gave no answer to a {message['kind']!r}: {error}") from None
        if reply["kind"] == "refused":
            raise self._broken(f"has refused a {message['kind']!r}: {reply.get('sentence')}", USER_ERROR)
        if reply["kind"] == "late":
            raise ClusterError(self._late(reply, message), NO_PROGRESS)
        return reply, values

    def _send(self, message: Message, arrays: Arrays, check: CheckRequest) -> Response:
        lost = None
        try:
            self._link.send(message, arrays)
        except ConnectionLostError as error:
            lost = error
        try:  # The server may have refused the request before all of it was sent, and its response can be read.
            return self._link.receive(lambda reply, given: _check_reply(reply, given, check))
        except ConnectionLostError:
            if lost is not None:
                raise lost from None
            raise

    def _late(self, reply: Message, message: Message) -> str:
        waits_for = reply.get("waits_for")
        whom = listed(map(str, waits_for)) if isinstance(waits_for, list) and waits_for else "another process"
        return (
            f"{self.name} could not answer a {message['kind']!r} within {message.get('seconds')} s: it waits for {whom}. Fix: see whether that "
            "is stuck; if it is slower than the limit allows, raise timeout_seconds."
        )

    def _broken(self, what: str, exit_code: int = PEER_LOST) -> ClusterError:
        problem, _, fix = what.removesuffix(".").partition(" Fix: ")
        problem = problem.removesuffix(".")
        self._error = ClusterError(f"{self.name} {problem}. Fix: {fix or 'see what it prints'}.", exit_code)
        self._link.close()
        return self._error


def _check_reply(reply: Message, given: tuple[ArraySpec, ...], check: CheckRequest) -> None:
    if reply["kind"] not in ("refused", "late"):
        check(reply, given)
    elif given:
        raise ProtocolError(f"arrays follow a {reply['kind']!r}")


def connect_rpc(
    name: str,
    address: str,
    me: Peer,
    secret: bytes | None,
    timeout_seconds: float,
    log: Callable[[str], Any],
    raise_failure: Callable[[], object] = lambda: None,
) -> RpcClient:
    """Connect to a server, which may not have started yet.

    Args:
        name: name of the server, such as ``"ps 0"``.
        address: its ``host:port``.
        me: this worker.
        secret: secret of the job.
        timeout_seconds: limit of this wait, and of each later one.
        log: takes a line while this waits.
        raise_failure: raises why this wait is in vain, if that is known; called after each attempt.

    Raises:
        ClusterError: no server answers in time, or it is none of this job.
    """
    wait, reason = WaitLogger(log), "no process listens there"
    while (left := timeout_seconds - wait.seconds) > 0:
        try:
            return RpcClient(f"{name} at {address}", _connect_once(address, me, secret, left), timeout_seconds)
        except (HandshakeError, ProtocolError) as error:
            raise ClusterError(
                f"{name} at {address} is not a server of this job: {error}. Fix: start the same script on all processes, with the same cluster, "
                "secret and versions; each must make the same models in the same order, as Keras numbers layers without a name."
            ) from None
        except RetryableConnectError as error:
            raise_failure()
            reason = str(error)
        wait.log(f"{name} at {address}")
        time.sleep(_RETRY_SECONDS)
    raise ClusterError(
        f"{name} at {address} could not be reached within {timeout_seconds:g} s: {reason}. Fix: check that it is "
        "started and can be reached from here.",
        PEER_LOST,
    )


def _connect_once(address: str, me: Peer, secret: bytes | None, seconds: float) -> ArrayConnection:
    connection = connect(address, seconds)
    try:
        introduce(connection, me, secret, seconds)
        wait_until_admitted(connection, seconds)
        return ArrayConnection(connection.detach(), seconds, connection.session)
    except BaseException:
        connection.close()
        raise


class ClientSession:
    """One connection of a client; a client that connects again has another session.

    A request that waits asks ``is_gone`` whether the client has closed the connection.
    """

    def __init__(self, peer: Peer, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.peer, self.is_gone = peer, is_gone

    def __str__(self) -> str:
        return str(self.peer)


class RequestHandler(Protocol):
    """The service behind a server: :class:`lockstep.parameter_server.variable_server.VariableService` or
    :class:`lockstep.parameter_server.task_dispatcher.TaskDispatcher`.
    """

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Refuse a request by ProtocolError, before its arrays are received."""

    def handle(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
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
        self._me, self._handler, self._listener = me, handler, listener
        self._loop = EventLoop(f"lockstep-accept-{me.index}")
        self._handshakes = HandshakeServer(self._loop, secret, self._on_peer, log)
        self.rejections = self._handshakes.rejections
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to accept connections."""
        self._handshakes.listen(self._listener)
        self._loop.start()

    def stop(self) -> None:
        """Close all connections; updates that have begun are completed."""
        self._stopped.set()
        _shut_down(self._listener)
        self._loop.stop()
        self._listener.close()
        with self._lock:
            sockets = tuple(self._sockets)
        for connected in sockets:
            _shut_down(connected)

    def _on_peer(self, connection: FramedSocket, peer: Peer) -> None:
        """Give an authenticated connection to a thread of its own; called in the thread of the handshakes."""
        found = first_difference(peer.identity, self._me.identity)
        if found is not None:
            name, theirs, ours = found
            self._note_rejection(connection.address, f"{peer}: its {name} is {theirs}, that of the server {ours}")
            sentence = (
                f"its {name} is {theirs}"[:_MAX_SENTENCE] + ", that of the server is another one, which its log has"
            )
            # A server that is late has not ended the last call.
            connection.send(encode(refusal(sentence, again=name == "call")))
            self._loop.remove(connection)
            return
        self._loop.release(connection)
        try:
            threading.Thread(target=self._run, args=(connection, peer), daemon=True).start()
        except RuntimeError as error:  # The limit of this machine or user for threads; others may end.
            self._note_rejection(connection.address, f"{peer}: {error}")
            connection.send(encode(refusal(f"the server cannot serve more processes: {error}", again=True)))
            connection.close()

    def _run(self, connection: FramedSocket, peer: Peer) -> None:
        """Serve one connection after its handshake, to its last byte."""
        connection.send(encode({"kind": "welcome"}))
        try:
            connected = connection.detach()
        except ProtocolError as error:
            self._note_rejection(connection.address, f"{peer}: {error}")
            connection.close()
            return
        with self._lock:
            self._sockets.add(connected)
        if self._stopped.is_set():  # It came at the same moment.
            _shut_down(connected)
        try:
            link = ArrayConnection(connected, _MESSAGE_SECONDS, connection.session)
            self._serve(link, ClientSession(peer, is_gone=link.is_closed))
        finally:
            with self._lock:
                self._sockets.discard(connected)
            connected.close()

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
        except (ProtocolError, OptionError) as error:  # The request cannot be answered, or the answer is too large.
            self._note_rejection(link.address, f"{session}: {error}")
            link.refuse(refusal(str(error)[:_MAX_SENTENCE]))
        except Exception as error:  # The user's optimizer has failed, or memory is exhausted: the client would take this for a lost server.
            traceback.print_exception(error)
            link.refuse(refusal(summary_of(error)[:_MAX_SENTENCE]))
        finally:
            self._handler.leave(session)

    def _note_rejection(self, address: str, reason: str) -> None:
        if not self._stopped.is_set():
            self.rejections.add(address, reason)


def _shut_down(connected: socket.socket) -> None:
    """End a connection from any thread: the thread that uses it gets an error, and closes it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
