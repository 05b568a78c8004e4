"""RPC client of one server: a thread that sends one request after the other while the worker computes."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._errors import ClusterError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.handshake import (
    HandshakeError,
    RetryableConnectError,
    introduce,
    wait_until_admitted,
)
from lockstep.distributed.control.handshake import connect as connect_to
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.wait_logger import WaitLogger, listed
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    CheckRequest,
    ConnectionLostError,
    Message,
    ProtocolError,
)

__all__ = ["Response", "RpcClient", "connect"]

_RETRY_SECONDS = 0.1
_MARGIN_SECONDS = 5.0  # For a response that was due at the end of the wait to arrive.

Response = tuple[Message, dict[str, np.ndarray]]
Request = tuple[Message, Mapping[str, np.ndarray], CheckRequest, "Future[Response]"]


class RpcClient:
    """Sends requests to one server. After the first failure of the connection, every request fails with the same error.

    Args:
        name: of the server, with its address, for errors.
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
        self._thread = threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        return self._link.sent, self._link.received

    def call(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> "Future[Response]":
        """Send a request after all earlier ones; arrays must not change until the response is here.

        Args:
            message: the request.
            arrays: of the request.
            check: raises ProtocolError if a response is not what was requested.
        """
        if not self._thread.is_alive():
            raise ClusterError(f"{self.name}: this worker has closed its connection there.")
        response: Future[Response] = Future()
        self._requests.put((message, arrays, check, response))
        return response

    def close(self) -> None:
        """Send the requests that are queued, and end."""
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

    def _exchange(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> Response:
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
            raise self._broken(f"has refused a {message['kind']!r}: {reply.get('sentence')}", exit_codes.USER_ERROR)
        if reply["kind"] == "late":
            raise ClusterError(self._late(reply, message), exit_codes.NO_PROGRESS)
        return reply, values

    def _send(self, message: Message, arrays: Mapping[str, np.ndarray], check: CheckRequest) -> Response:
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
            f"{self.name} could not answer a {message['kind']!r} within {message.get('seconds')} s: it waits for {whom}. Is that "
            f"stuck, or slower than the limit allows?"
        )

    def _broken(self, what: str, exit_code: int = exit_codes.PEER_LOST) -> ClusterError:
        self._error = ClusterError(f"{self.name} {what}.", exit_code)
        self._link.close()
        return self._error


def _check_reply(reply: Message, given: tuple[ArraySpec, ...], check: CheckRequest) -> None:
    if reply["kind"] not in ("refused", "late"):
        check(reply, given)
    elif given:
        raise ProtocolError(f"arrays follow a {reply['kind']!r}")


def connect(
    name: str,
    address: str,
    me: Peer,
    secret: bytes | None,
    timeout_seconds: float,
    log: Callable[[str], Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RpcClient:
    """Connect to a server, which may not have started yet.

    Args:
        name: of the server, such as ``"ps 0"``.
        address: its ``host:port``.
        me: this worker.
        secret: of the job.
        timeout_seconds: limit of this wait, and of each later one.
        log: takes a line while this waits.
        clock: gives seconds, and is not set back.
        sleep: waits.

    Raises:
        ClusterError: no server answers in time, or it is none of this job.
    """
    wait, reason = WaitLogger(log, clock), "no process listens there"
    while (left := timeout_seconds - wait.seconds) > 0:
        try:
            return RpcClient(f"{name} at {address}", _connect_once(name, address, me, secret, left), timeout_seconds)
        except (HandshakeError, ProtocolError) as error:
            raise ClusterError(f"{name} at {address} is no server of variables for this worker: {error}.") from None
        except RetryableConnectError as error:
            reason = str(error)
        wait.log(f"{name} at {address}")
        sleep(_RETRY_SECONDS)
    raise ClusterError(
        f"{name} at {address} could not be reached within {timeout_seconds:g} s: {reason}. Is it started, and can it be reached from here?",
        exit_codes.PEER_LOST,
    )


def _connect_once(name: str, address: str, me: Peer, secret: bytes | None, seconds: float) -> ArrayConnection:
    connection = connect_to(address, seconds, name)
    try:
        introduce(connection, me, secret, seconds)
        wait_until_admitted(connection, seconds)
        return ArrayConnection(connection.detach(), seconds)
    except BaseException:
        connection.close()
        raise
