"""The handshake of every connection: nonces, proofs of the secret, and the peer that it identifies.

The client sends ``hello`` with a nonce. The server answers with a ``challenge``: its own nonce and a proof that it knows the job's
secret. The client sends ``join`` with its :class:`Peer` and its own proof, which includes that. Then the server decides whether to
admit that peer, and sends ``welcome`` or ``refused``. If there is a secret, all messages after ``join`` carry a MAC, whose keys
depend on the secret and both nonces. Before it, the server reveals only its protocol version.

:class:`ServerHandshake` is the server's side of one connection; :class:`HandshakeServer` runs it for all connections of a listener.
:func:`open_listener` opens that, and decides who may reach it.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep._errors import ClusterError, check_depth
from lockstep._logging import capitalized
from lockstep.distributed.cluster.addresses import is_loopback, join_address, split_address
from lockstep.distributed.cluster.env_reader import BIND, OPEN, NetworkOptions
from lockstep.distributed.cluster.secret import SECRET, SECRET_FILE
from lockstep.distributed.control.transport import (
    HANDSHAKE_BYTES,
    MAX_BYTES,
    EventLoop,
    FramedSocket,
    MacCounter,
    Session,
    as_text,
    encode,
)


@dataclass(frozen=True)
class Peer:
    """A process of a job: a worker, a parameter server, the evaluator, or a supervisor of ``lockstep run``.

    Args:
        index: its number among the processes of its kind; worker 0 is the chief. A supervisor has -1.
        workers: number of workers that it was started with; of a process of another kind the number of that kind.
        host: name of its machine.
        pid: its process there.
        generation: how many times its job was restarted.
        identity: what must be equal on all workers.
        information: more about it, for the server: any JSON.
        address: address of its end of the connection, as the chief sees it.

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


PROTOCOL = 3
HANDSHAKE_SECONDS = 5.0
_SILENT = f"it sent nothing for {HANDSHAKE_SECONDS:.0f} s"
_CROWDED = "too many connections were in their handshake"
_MAX_HANDSHAKES = 256
_MAX_LOGGED = 3  # Reasons for which connections were rejected; a port scanner must not fill the log.
_MAX_REASON = 300  # Characters: unauthenticated peers can send any text.
_MAX_SENTENCE = 4000  # Characters.
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


class CoordinatorRunsError(ClusterError):
    """This process cannot listen, as another process of a Lockstep job does."""


class RetryableConnectError(Exception):
    """No process admits this one yet: to try again is right."""


def new_nonce() -> str:
    """Return a random text that was never used before."""
    return secrets.token_hex(16)


def make_proof(secret: bytes, role: str, *texts: str) -> str:
    """Return the HMAC-SHA-256 that proves knowledge of a secret without revealing it.

    Args:
        secret: known to both sides.
        role: ``"chief"`` for the server or ``"worker"`` for the client, so that a proof cannot be sent back.
        texts: the nonces of both sides; of a client, also its description.
    """
    return _mac(secret, role, *texts).hex()


def verify_proof(given: object, secret: bytes, role: str, *texts: str) -> bool:
    """Return whether ``given`` is the expected proof, in the same time for every wrong one."""
    expected = make_proof(secret, role, *texts).encode()
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected)


def make_session(secret: bytes, client_nonce: str, server_nonce: str, *, is_client: bool) -> Session:
    """Return what authenticates the messages of one end of a connection; no other connection has the same keys."""
    to_server, to_client = (
        MacCounter(_mac(secret, direction, client_nonce, server_nonce)) for direction in ("to server", "to client")
    )
    sent, received = (to_server, to_client) if is_client else (to_client, to_server)
    return Session(sent, received)


def _mac(secret: bytes, *texts: str) -> bytes:
    # Unauthenticated peers can send any text, also half characters.
    text = json.dumps([f"lockstep {PROTOCOL}", *texts])
    return hmac.digest(secret, text.encode(), hashlib.sha256)


# The server's side.


class ServerHandshake:
    """The server's side of one handshake; without ``secret``, the client needs to know none."""

    def __init__(self, connection: FramedSocket, secret: bytes | None) -> None:
        self._connection, self._secret = connection, secret
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
            peer = message.get("peer")
            self._authenticate(message.get("proof"), peer if isinstance(peer, str) else "")
            return _peer_of(peer, self._connection.address)
        if message["kind"] == "other secret":
            raise HandshakeError("it was given another secret than this process, or one of them none")
        raise HandshakeError(f"it began with {message['kind'][:_MAX_SHOWN]!r}")

    def _challenge(self) -> dict[str, Any]:
        proof = None if self._secret is None else make_proof(self._secret, "chief", self._client_nonce, self._nonce)
        return {"kind": "challenge", "protocol": PROTOCOL, "nonce": self._nonce, "proof": proof}

    def _authenticate(self, proof: object, peer: str) -> None:
        if self._secret is None:
            return
        if not verify_proof(proof, self._secret, "worker", self._client_nonce, self._nonce, peer):
            raise HandshakeError("it does not know the secret of this job")
        self._connection.authenticate(make_session(self._secret, self._client_nonce, self._nonce, is_client=False))


class RejectionLog:
    """Logs why connections were closed, once for each of the first reasons; may be used from any thread.

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
    """Runs the server's side of the handshake for the connections of a listener; ``on_peer`` gets each one whose handshake is complete.

    So many connections may be in their handshake: a quarter of the file descriptors that this process may have, 256 at most; and a
    quarter of those from one address. One more takes the place of the oldest one, so that silent connections keep no client out.

    Attributes:
        rejections: why connections were closed.
    """

    def __init__(
        self,
        loop: EventLoop,
        secret: bytes | None,
        on_peer: Callable[[FramedSocket, Peer], None],
        log: Callable[[str], None],
    ) -> None:
        self._loop, self._secret, self._on_peer, self._log = loop, secret, on_peer, log
        self._pending: dict[FramedSocket, ServerHandshake] = {}
        self._most = _most_handshakes()
        self.rejections = RejectionLog(log)

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections of a listening socket."""
        self._loop.listen(listener, self._accept, self._log)

    def _accept(self, connected: socket.socket) -> None:
        connection = FramedSocket(connected, HANDSHAKE_BYTES)
        self._pending[connection] = ServerHandshake(connection, self._secret)
        self._loop.add(connection, self._received, lambda _: self._reject(connection, connection.ended or ""))
        self._loop.later(HANDSHAKE_SECONDS, lambda: self._reject(connection, _SILENT, again=True))
        self._keep_limits(_host_of(connection))

    def _keep_limits(self, newest: str) -> None:
        """Close the oldest connection of an address that has too many, or of the one with the most if all have too many together."""
        hosts = Counter(map(_host_of, self._pending))
        if hosts[newest] > self._most // 4:
            crowded = newest
        elif len(self._pending) > self._most:
            crowded, _ = hosts.most_common(1)[0]
        else:
            return
        self._reject(next(one for one in self._pending if _host_of(one) == crowded), _CROWDED, again=True)

    def _received(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        try:
            peer = self._pending[connection].receive(message)
        except HandshakeError as error:
            self._reject(connection, str(error))
        else:
            if peer is not None:
                del self._pending[connection]
                self._on_peer(connection, peer)

    def _reject(self, connection: FramedSocket, reason: str, again: bool = False) -> None:
        if self._pending.pop(connection, None) is not None:
            connection.send(encode(refusal(f"the handshake failed: {reason}", again=again)))
            self._loop.remove(connection)
            self.rejections.add(connection.address, reason)


def _most_handshakes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_HANDSHAKES if soft == resource.RLIM_INFINITY else max(4, min(_MAX_HANDSHAKES, soft // 4))


def _host_of(connection: FramedSocket) -> str:
    return connection.address.rpartition(":")[0]


def refusal(sentence: str, *, again: bool = False, exit_code: int | None = None) -> dict[str, Any]:
    """Return the message that refuses a client, which may try ``again`` later, or ends with ``exit_code``; None: as after any error of the
    program.
    """
    return {"kind": "refused", "sentence": sentence, "again": again, "exit_code": exit_code}


def _peer_of(described: Any, address: str) -> Peer:
    try:
        fields = json.loads(described)
        check_depth("peer", fields)
    except (ValueError, TypeError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != _FIELDS:
        raise HandshakeError("it sent an invalid peer description")
    return Peer(**fields, address=address)


# The client's side.


def hello(nonce: str) -> bytes:
    """Return the first message of a client."""
    return encode({"kind": "hello", "protocol": PROTOCOL, "nonce": nonce})


def join_request(me: Peer, proof: str | None = None) -> bytes:
    """Return the message with which a client joins; OptionError if its description cannot be sent."""
    return encode({"kind": "join", "proof": proof, "peer": _describe(me)}, HANDSHAKE_BYTES)


def _describe(me: Peer) -> str:
    """Return the description of a client, as a text that its proof includes."""
    return as_text({name: value for name, value in asdict(me).items() if name in _FIELDS}).decode()


def connect(address: str, seconds: float) -> FramedSocket:
    """Connect to the server at ``host:port`` within this many seconds.

    Raises:
        RetryableConnectError: no server accepted the connection in time.
    """
    try:
        connected = socket.create_connection(split_address("the server", address), seconds)
    except OSError as error:
        raise RetryableConnectError(error.strerror or str(error)) from None
    if connected.getsockname() == connected.getpeername():
        connected.close()  # The system can give a free port to the very socket that tries to reach it.
        raise RetryableConnectError("no process listens there")
    return FramedSocket(connected, HANDSHAKE_BYTES)


def introduce(connection: FramedSocket, me: Peer, secret: bytes | None, seconds: float) -> None:
    """Run the client's side of the handshake, up to the server's decision to admit this process; ``seconds`` limits the wait for the challenge.

    Raises:
        RetryableConnectError: no process of a Lockstep job answers there.
        HandshakeError: a process of another job does.
    """
    nonce = new_nonce()
    connection.send(hello(nonce))
    challenge = _next_message(connection, time.monotonic() + seconds)
    if challenge is None:
        raise RetryableConnectError(
            f"what answers there is no process of a Lockstep job: {connection.ended or 'it says nothing'}"
        )
    try:
        server_nonce = _check_challenge(challenge, nonce, secret)
    except HandshakeError:
        connection.send(encode({"kind": "other secret"}))  # For the server's own log.
        raise
    if secret is None:
        connection.send(join_request(me))
    else:
        connection.send(join_request(me, make_proof(secret, "worker", nonce, server_nonce, _describe(me))))
        connection.authenticate(make_session(secret, nonce, server_nonce, is_client=True))
    connection.set_limit(MAX_BYTES)


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
        text = str(message.get("sentence"))[:_MAX_SENTENCE]  # Unauthenticated servers can send any text, too.
        sentence = "".join(character if character.isprintable() else "?" for character in text)
        raise (RetryableConnectError if message.get("again") else HandshakeError)(sentence)


def _check_challenge(challenge: dict[str, Any], nonce: str, secret: bytes | None) -> str:
    """Check the server's version and proof, and return its nonce."""
    check_not_refused(challenge)
    if challenge["kind"] != "challenge":
        raise HandshakeError(f"it said {challenge['kind']!r} instead of 'challenge'")
    _check_protocol(challenge)
    server_nonce, proof = _nonce_of(challenge), challenge.get("proof")
    if secret is None and proof is not None:
        raise HandshakeError("it asks for a secret that this process was not given")
    if secret is not None and proof is None:
        raise HandshakeError("it was given no secret, this process was")
    if secret is not None and not verify_proof(proof, secret, "chief", nonce, server_nonce):
        raise HandshakeError("it and this process were given different secrets")
    return server_nonce


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


_PROBE_SECONDS = 1.0
_ALL_ADDRESSES = ""


def open_listener(
    coordinator: str, network: NetworkOptions, log: Callable[[str], None], who: str = "the chief"
) -> socket.socket:
    """Return a socket that listens for the other processes of the job, which connect to ``coordinator``.

    It listens at ``network.bind_host``. Without one, it listens on the coordinator's host if that is a loopback address or another
    address of this machine. If it is a name, which may have another address on this machine (often 127.0.1.1), or an address of a
    NAT, it listens on all addresses.

    Raises:
        ClusterError: other machines can reach the socket and there is no secret, the port is in use, or the host is not an address of
            this machine.
    """
    named, port = split_address("the coordinator", coordinator)
    host = network.bind_host if network.bind_host is not None else _host_to_bind(named)
    check_closed(join_address(host or named, port), network, who)
    try:
        listener = _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(named if host == _ALL_ADDRESSES else host, port, who) from None
        is_fixed = network.bind_host is not None or host == _ALL_ADDRESSES or is_loopback(host)
        if not is_fixed and error.errno == errno.EADDRNOTAVAIL:
            log(f"{host} is no address of this machine: {who} listens on port {port} of all its addresses")
            return open_listener(coordinator, replace(network, bind_host=_ALL_ADDRESSES), log, who)
        place = f"port {port} of {host or 'this machine'}"
        variable = "" if network.bind_host is None else f" ({BIND})"
        raise ClusterError(
            f"{capitalized(who)} cannot listen on {place}{variable}: {error}. Fix: use another port, or set {BIND} to an "
            "address of this machine."
        ) from None
    if network.secret is None and not is_loopback(host):
        log(
            f"{OPEN}=1: {who} listens on port {port} of {host or 'all addresses'} without a secret. Each process that reaches that port can read "
            "and change this training."
        )
    return listener


def check_closed(address: str, network: NetworkOptions, who: str) -> None:
    """Check that a process needs no secret at the ``host:port`` at which it listens or to which it connects, or has one.

    Raises:
        ClusterError: the host is no loopback address, there is no secret, and the user has not said that none is needed.
    """
    if needs_secret(address, network):
        raise ClusterError(
            f"{capitalized(who)} uses {address}, which other machines may reach, and has no secret: anyone there could read and change "
            f"this training. Fix: give all processes of the job one secret: {SECRET}=$(openssl rand -hex 32), or {SECRET_FILE}=PATH of "
            f"a file that only you can read; or, on a network that no one else can use, set {OPEN}=1 (docs/security.md)."
        )


def needs_secret(address: str, network: NetworkOptions) -> bool:
    """Return whether a process at ``address`` (``host:port``) lacks a secret: it has none, and other machines may reach it."""
    host, _ = split_address("address", address)
    return network.secret is None and not network.is_open and not is_loopback(host)


def _host_to_bind(host: str) -> str:
    if is_loopback(host):
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return host
    return _ALL_ADDRESSES


def _listen(host: str, port: int) -> socket.socket:
    if host in (_ALL_ADDRESSES, "::"):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        return socket.create_server(("0.0.0.0", port), backlog=128)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=128)


def _port_in_use(host: str, port: int, who: str) -> ClusterError:
    is_lockstep = _is_lockstep(host, port)
    other = "another Lockstep job" if is_lockstep else "something that is no Lockstep job"
    return (CoordinatorRunsError if is_lockstep else ClusterError)(
        f"{capitalized(who)} cannot listen on port {port} of {host}: {other} uses it. Fix: end that ('ss -ltnp' shows its process), or give "
        f"all workers of this job another port, where this one comes from: TF_CONFIG, --hosts, --coordinator or LOCKSTEP_PORT."
    )


def _is_lockstep(host: str, port: int) -> bool:
    """Return whether a process of Lockstep listens at an address."""
    with contextlib.suppress(OSError):
        connection = FramedSocket(socket.create_connection((host, port), timeout=_PROBE_SECONDS))
        with contextlib.closing(connection):
            connection.send(hello(new_nonce()))
            message = _next_message(connection, time.monotonic() + _PROBE_SECONDS)
            return message is not None and message["kind"] == "challenge"
    return False
