"""The handshake of every connection, and the peer that it identifies.

The client sends ``hello`` with a nonce. The server answers with a ``challenge``: its own nonce and a proof that it knows the job's
secret. The client sends ``join`` with its own proof and its :class:`Peer`. Then the server decides whether to admit that peer, and
sends ``welcome`` or ``refused``. :class:`ServerHandshake` is the server's side without a socket; :class:`HandshakeServer` runs it
for all connections of an event loop, :func:`accept` for one connection in the calling thread.
"""

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.control.event_loop import EventLoop
from lockstep.distributed.control.transport import HANDSHAKE_BYTES, FramedSocket, encode

__all__ = [
    "HANDSHAKE_SECONDS",
    "PROTOCOL",
    "HandshakeError",
    "HandshakeServer",
    "Peer",
    "RejectionLog",
    "RetryableConnectError",
    "ServerHandshake",
    "accept",
    "check_not_refused",
    "connect",
    "hello",
    "introduce",
    "join_request",
    "make_proof",
    "new_nonce",
    "refusal",
    "verify_proof",
    "wait_until_admitted",
]


@dataclass(frozen=True)
class Peer:
    """One worker's process.

    Args:
        index: its number, 0 is the chief.
        workers: number of workers that it was started with.
        host: name of its machine.
        pid: its process there.
        generation: how many times its job was restarted.
        identity: what must be equal on all workers.
        information: for the other workers: any JSON.
        address: of its end of the connection, as the chief sees it.

    Example:
        >>> str(Peer(index=1, workers=3, host="node1", pid=77))
        'worker 1 of 3 (node1, process 77)'
    """

    index: int
    workers: int
    host: str
    pid: int
    generation: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    information: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""

    def __str__(self) -> str:
        name = "the chief" if self.job == "chief" else f"{self.job} {self.index} of {self.workers}"
        return f"{name} ({self.process})"

    @property
    def job(self) -> str:
        """``worker``; in a cluster of several jobs also ``chief``, ``ps`` or ``evaluator``."""
        return str(self.information.get("job", "worker"))

    @property
    def process(self) -> str:
        """Machine and process number, for messages."""
        return f"{self.host}, process {self.pid}"


PROTOCOL = 1
HANDSHAKE_SECONDS = 5.0
_SILENT = f"it said nothing for {HANDSHAKE_SECONDS:.0f} s"
_MAX_LOGGED = 3  # Reasons for which connections were rejected; a port scanner must not fill the log.
_MAX_REASON = 300  # Characters: unauthenticated peers can send any text.
_MAX_SHOWN = 40  # Of a value in a message.

_FIELDS = {
    "index": int,
    "workers": int,
    "host": str,
    "pid": int,
    "generation": int,
    "identity": dict,
    "information": dict,
}


class HandshakeError(Exception):
    """The other end is not a process that this one can talk to."""


class RetryableConnectError(Exception):
    """No process admits this one yet: to try again is right."""


def new_nonce() -> str:
    """Return a random text that was never used before."""
    return secrets.token_hex(16)


def make_proof(secret: bytes, role: str, *nonces: str) -> str:
    """Return the HMAC-SHA-256 that proves knowledge of a secret without revealing it.

    Args:
        secret: known to both sides.
        role: ``"chief"`` for the server or ``"worker"`` for the client, so that a proof cannot be sent back.
        nonces: of both sides.
    """
    return hmac.new(secret, _raw("|".join((f"lockstep {PROTOCOL}", role, *nonces))), hashlib.sha256).hexdigest()


def verify_proof(given: object, secret: bytes, role: str, *nonces: str) -> bool:
    """Return whether ``given`` is the expected proof, in the same time for every wrong one."""
    return isinstance(given, str) and hmac.compare_digest(_raw(given), _raw(make_proof(secret, role, *nonces)))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # Unauthenticated peers can send any text.


# The server's side.


class ServerHandshake:
    """The server's side of one handshake.

    Args:
        connection: to the client.
        me: this process.
        secret: that the client must know; None: none.
    """

    def __init__(self, connection: FramedSocket, me: Peer, secret: bytes | None) -> None:
        self._connection, self._me, self._secret = connection, me, secret
        self._nonce, self._client_nonce = new_nonce(), ""

    def receive(self, message: dict[str, Any]) -> Peer | None:
        """Handle the client's next message.

        Returns:
            The client, when its side of the handshake is complete; None before.

        Raises:
            HandshakeError: it is no process of this job.
        """
        if message["kind"] == "hello" and not self._client_nonce:
            self._client_nonce = _nonce_of(message)
            self._connection.send(encode(self._challenge()))
            _check_protocol(message)  # After the challenge, so that the client can report the versions, too.
            return None
        if message["kind"] == "join" and self._client_nonce:
            self._check_proof(message.get("proof"))
            return _peer_of(message.get("peer"), self._connection.address)
        if message["kind"] == "other secret":
            raise HandshakeError("it was given another secret than this process, or one of them none")
        raise HandshakeError(f"it began with {message['kind'][:_MAX_SHOWN]!r}")

    def _challenge(self) -> dict[str, Any]:
        known = {"kind": "challenge", "protocol": PROTOCOL, "nonce": self._nonce, "process": self._me.process}
        if self._secret is None:
            return known | {"proof": None}
        return known | {"proof": make_proof(self._secret, "chief", self._client_nonce, self._nonce)}

    def _check_proof(self, given: object) -> None:
        if self._secret is not None and not verify_proof(
            given, self._secret, "worker", self._client_nonce, self._nonce
        ):
            raise HandshakeError("it does not know the secret of this job")


class RejectionLog:
    """Logs why connections were closed, once for each of the first reasons; may be used from any thread.

    Args:
        log: takes lines.

    Attributes:
        reasons: the addresses, by reason.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._lock = log, threading.Lock()
        self.reasons: dict[str, str] = {}

    def add(self, address: str, reason: str) -> None:
        """Note that a connection from ``address`` was closed."""
        reason = reason[:_MAX_REASON]
        with self._lock:
            if reason in self.reasons or len(self.reasons) >= _MAX_LOGGED:
                return
            self.reasons[reason] = address
        self._log(f"a connection from {address} was closed: {reason}")


class HandshakeServer:
    """Runs the server's side of the handshake for the connections of an event loop.

    Args:
        loop: serves the connections.
        me: this process.
        secret: that clients must know; None: none.
        on_peer: gets each connection whose handshake is complete, with its client.
        log: takes a line for each of the first reasons of rejections.

    Attributes:
        rejections: why connections were closed.
    """

    def __init__(
        self,
        loop: EventLoop,
        me: Peer,
        secret: bytes | None,
        on_peer: Callable[[FramedSocket, Peer], None],
        log: Callable[[str], None],
    ) -> None:
        self._loop, self._me, self._secret, self._on_peer = loop, me, secret, on_peer
        self._pending: dict[FramedSocket, ServerHandshake] = {}
        self.rejections = RejectionLog(log)

    def accept(self, connected: socket.socket) -> None:
        """Begin the handshake on a new connection."""
        connection = FramedSocket(connected, HANDSHAKE_BYTES)
        self._pending[connection] = ServerHandshake(connection, self._me, self._secret)
        self._loop.add(connection, self._received, lambda _: self._reject(connection, connection.ended or ""))
        self._loop.later(HANDSHAKE_SECONDS, lambda: self._reject(connection, _SILENT))

    def _received(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        try:
            peer = self._pending[connection].receive(message)
        except HandshakeError as error:
            self._reject(connection, str(error))
        else:
            if peer is not None:
                del self._pending[connection]
                self._on_peer(connection, peer)

    def _reject(self, connection: FramedSocket, reason: str) -> None:
        if self._pending.pop(connection, None) is not None:
            connection.send(encode(refusal(f"the handshake with {self._me} failed: {reason}")))
            self._loop.remove(connection)
            self.rejections.add(connection.address, reason)


def accept(connection: FramedSocket, me: Peer, secret: bytes | None) -> Peer:
    """Run the server's side of the handshake in this thread.

    Args:
        connection: to the client.
        me: this process.
        secret: that the client must know; None: none.

    Returns:
        The client.

    Raises:
        HandshakeError: it is no process of this job, went away, or took too long.
    """
    handshake, deadline = ServerHandshake(connection, me, secret), time.monotonic() + HANDSHAKE_SECONDS
    while True:
        message = _next_message(connection, deadline)
        if message is None:
            raise HandshakeError(connection.ended or _SILENT)
        peer = handshake.receive(message)
        if peer is not None:
            return peer


def refusal(sentence: str, *, again: bool = False, exit_code: int | None = None) -> dict[str, Any]:
    """Return the message that refuses a client.

    Args:
        sentence: the reason, for the user.
        again: whether to try again later is right.
        exit_code: of the refused process; None: as after any error of the program.
    """
    return {"kind": "refused", "sentence": sentence, "again": again, "exit_code": exit_code}


def _peer_of(described: Any, address: str) -> Peer:
    if not isinstance(described, dict) or {name: type(value) for name, value in described.items()} != _FIELDS:
        raise HandshakeError("it did not say who it is")
    return Peer(**described, address=address)


# The client's side.


def hello(nonce: str) -> bytes:
    """Return the first message of a client."""
    return encode({"kind": "hello", "protocol": PROTOCOL, "nonce": nonce})


def join_request(me: Peer, proof: str | None = None) -> bytes:
    """Return the message with which a client joins; OptionError if its description cannot be sent."""
    peer = {name: value for name, value in asdict(me).items() if name in _FIELDS}
    return encode({"kind": "join", "proof": proof, "peer": peer}, HANDSHAKE_BYTES)


def connect(address: str, seconds: float, name: str = "the coordinator") -> FramedSocket:
    """Connect to a server.

    Args:
        address: ``host:port``.
        seconds: limit of the wait.
        name: of the server, for errors about its address.

    Raises:
        RetryableConnectError: no server accepted the connection in time.
    """
    try:
        connected = socket.create_connection(split_address(name, address), seconds)
    except OSError as error:
        raise RetryableConnectError(error.strerror or str(error)) from None
    if connected.getsockname() == connected.getpeername():
        connected.close()  # The system can give a free port to the very socket that tries to reach it.
        raise RetryableConnectError("no process listens there")
    return FramedSocket(connected)


def introduce(connection: FramedSocket, me: Peer, secret: bytes | None, seconds: float) -> None:
    """Run the client's side of the handshake, up to the server's decision to admit this process.

    Args:
        connection: to the server.
        me: this process.
        secret: of the job.
        seconds: limit of the wait for the challenge.

    Raises:
        RetryableConnectError: no process of a Lockstep job answers there.
        HandshakeError: a process of another job does; the sentence begins with that process, in brackets.
    """
    nonce = new_nonce()
    connection.send(hello(nonce))
    challenge = connection.wait(seconds)
    if challenge is None:
        raise RetryableConnectError(
            f"what answers there is no process of a Lockstep job: {connection.ended or 'it says nothing'}"
        )
    try:
        connection.send(join_request(me, _check_challenge(challenge, nonce, secret)))
    except HandshakeError as error:
        connection.send(encode({"kind": "other secret"}))  # For the server's own log.
        raise HandshakeError(f"({challenge.get('process', 'an unknown process')}): {error}") from None


def wait_until_admitted(connection: FramedSocket, seconds: float) -> None:
    """Wait for the server's decision.

    Raises:
        RetryableConnectError: it refuses for now, or did not decide in time.
        HandshakeError: it refuses.
    """
    deadline = time.monotonic() + seconds
    while (message := _next_message(connection, deadline)) is not None:
        if message["kind"] == "welcome":
            return
        check_not_refused(message)
    raise RetryableConnectError(connection.ended or "it says nothing")


def check_not_refused(message: dict[str, Any]) -> None:
    """Raise RetryableConnectError or HandshakeError if a message is a :func:`refusal`."""
    if message["kind"] == "refused":
        raise (RetryableConnectError if message.get("again") else HandshakeError)(str(message.get("sentence")))


def _check_challenge(challenge: dict[str, Any], nonce: str, secret: bytes | None) -> str | None:
    """Check the server's version and proof, and return this process's own proof."""
    check_not_refused(challenge)
    if challenge["kind"] != "challenge":
        raise HandshakeError(f"it said {challenge['kind']!r} instead of 'challenge'")
    _check_protocol(challenge)
    server_nonce, proof = _nonce_of(challenge), challenge.get("proof")
    if secret is None and proof is not None:
        raise HandshakeError("it asks for a secret that this process was not given")
    if secret is None:
        return None
    if proof is None:
        raise HandshakeError("it was given no secret, this process was")
    if not verify_proof(proof, secret, "chief", nonce, server_nonce):
        raise HandshakeError("it and this process were given different secrets")
    return make_proof(secret, "worker", nonce, server_nonce)


# Both sides.


def _next_message(connection: FramedSocket, deadline: float) -> dict[str, Any] | None:
    while True:
        message = connection.wait(deadline - time.monotonic())
        if message is not None or connection.ended is not None or time.monotonic() >= deadline:
            return message


def _nonce_of(message: dict[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not nonce:
        raise HandshakeError("it sent no nonce")
    return nonce


def _check_protocol(message: dict[str, Any]) -> None:
    if message.get("protocol") != PROTOCOL:
        raise HandshakeError(
            f"it speaks protocol {repr(message.get('protocol'))[:_MAX_SHOWN]}, this process {PROTOCOL}: install the same Lockstep on all workers"
        )
