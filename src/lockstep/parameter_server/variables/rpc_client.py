"""A worker's way to one server: a thread that asks one thing after the other, while the worker computes."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from lockstep._errors import ClusterError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.control.handshake_server import HandshakeError
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.wait_logger import WaitLogger, listed
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    ConnectionLostError,
    Message,
    ProtocolError,
)
from lockstep.parameter_server.variables.handshake import enter
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = ["Answer", "RpcClient", "connect"]

_RETRY_SECONDS = 0.1
_MARGIN_SECONDS = 5.0  # For an answer that was due at the end of the wait to arrive.

Answer = tuple[Message, dict[str, np.ndarray]]
Judge = Callable[[Message, tuple[VariableSpec, ...]], None]
Request = tuple[Message, Mapping[str, np.ndarray], Judge, "Future[Answer]"]


class RpcClient:
    """Asks one server. After the first failure of the connection, every question fails with the same error.

    Args:
        name: of the server, with its address, as errors name it.
        link: to the server, which knows this worker already.
        timeout_seconds: limit of each wait.
    """

    def __init__(self, name: str, link: ArrayConnection, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._link = link
        self._link.wait_at_most(timeout_seconds + _MARGIN_SECONDS)
        self._link.give_up_after(timeout_seconds)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._error: ClusterError | None = None
        self._thread = threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        return self._link.sent, self._link.received

    def ask(self, message: Message, arrays: Mapping[str, np.ndarray], judge: Judge) -> "Future[Answer]":
        """Ask something, after all that was asked before; arrays must not change until the answer is here.

        Args:
            message: the question.
            arrays: that go with it.
            judge: raises ProtocolError where an answer is not what was asked for.
        """
        if not self._thread.is_alive():
            raise ClusterError(f"{self.name}: this worker has closed its connection there.")
        answer: Future[Answer] = Future()
        self._requests.put((message, arrays, judge, answer))
        return answer

    def close(self) -> None:
        """Ask what waits to be asked, and end."""
        self._requests.put(None)
        self._thread.join(self.timeout_seconds + _MARGIN_SECONDS)
        self._link.close()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            message, arrays, judge, answer = request
            try:
                answer.set_result(self._exchange(message, arrays, judge))
            except Exception as error:  # Whatever it is, whoever waits for the answer must hear of it.
                answer.set_exception(error)

    def _exchange(self, message: Message, arrays: Mapping[str, np.ndarray], judge: Judge) -> Answer:
        if self._error is not None:
            raise self._error
        try:
            reply, values = self._ask(message, arrays, judge)
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

    def _ask(self, message: Message, arrays: Mapping[str, np.ndarray], judge: Judge) -> Answer:
        lost = None
        try:
            self._link.send(message, arrays)
        except ConnectionLostError as error:
            lost = error
        try:  # What could not be sent may have been refused, and that can be heard.
            return self._link.receive(lambda reply, given: _judged(reply, given, judge))
        except ConnectionLostError:
            if lost is not None:
                raise lost from None
            raise

    def _late(self, reply: Message, message: Message) -> str:
        waits_for = reply.get("waits_for")
        whom = listed(map(str, waits_for)) if isinstance(waits_for, list) and waits_for else "somebody"
        return (
            f"{self.name} could not answer a {message['kind']!r} within {message.get('seconds')} s: it waits for {whom}. Is that "
            f"stuck, or slower than the limit allows?"
        )

    def _broken(self, what: str, exit_code: int = exit_codes.PEER_LOST) -> ClusterError:
        self._error = ClusterError(f"{self.name} {what}.", exit_code)
        self._link.close()
        return self._error


def _judged(reply: Message, given: tuple[VariableSpec, ...], judge: Judge) -> None:
    if reply["kind"] not in ("refused", "late"):
        judge(reply, given)
    elif given:
        raise ProtocolError(f"arrays follow a {reply['kind']!r}")


def connect(
    name: str,
    address: str,
    me: Peer,
    secret: bytes | None,
    timeout_seconds: float,
    announce: Callable[[str], Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RpcClient:
    """Reach a server, which may still be about to start.

    Args:
        name: of the server, such as ``"ps 0"``.
        address: its ``host:port``.
        me: this worker.
        secret: of the job.
        timeout_seconds: limit of the wait, and of each later one.
        announce: takes a line while this waits.
        clock: gives seconds, and is not set back.
        sleep: waits.

    Raises:
        ClusterError: nobody answers in time, or it is no server of this job.
    """
    notice, reason = WaitLogger(announce, clock), "nobody listens there"
    while (left := timeout_seconds - notice.seconds) > 0:
        try:
            return RpcClient(f"{name} at {address}", _entered(name, address, me, secret, left), timeout_seconds)
        except (HandshakeError, ProtocolError) as error:
            raise ClusterError(f"{name} at {address} is no server of variables for this worker: {error}.") from None
        except (ConnectionLostError, OSError) as error:
            reason = str(error)
        notice.tell(f"{name} at {address}")
        sleep(_RETRY_SECONDS)
    raise ClusterError(
        f"{name} at {address} could not be reached within {timeout_seconds:g} s: {reason}. Is it started, and can it be reached from here?",
        exit_codes.PEER_LOST,
    )


def _entered(name: str, address: str, me: Peer, secret: bytes | None, seconds: float) -> ArrayConnection:
    connected = socket.create_connection(split_address(name, address), seconds)
    link = ArrayConnection(connected, seconds)
    try:
        if connected.getsockname() == connected.getpeername():
            raise ConnectionLostError(
                "nobody listens there"
            )  # A free port can be given to the very socket that tries to reach it.
        enter(link, me, secret, seconds)
    except (HandshakeError, ProtocolError, ConnectionLostError, OSError):
        link.close()
        raise
    return link
