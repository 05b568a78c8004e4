"""The chief's door: whoever connects has a few seconds to say properly who they are; all others harm nothing.

A worker says hello with a nonce, gets one back with the chief's proof of the secret, and joins with its own proof and
all that it says of itself.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.distributed.control.event_loop import EventLoop
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.protocol import FIRST_BYTES, PROTOCOL, encode, new_nonce, proof, proves

__all__ = ["HANDSHAKE_SECONDS", "HandshakeError", "HandshakeServer", "answer", "hello", "introduction", "other_secret"]

HANDSHAKE_SECONDS = 5.0
_TOLD = 3  # Causes for which strangers were turned away; a scanner of ports must not fill the log.

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
    """The other end is not one that this job can talk to."""


class HandshakeServer:
    """Makes peers of connections.

    Args:
        loop: serves the connections.
        chief: whose door it is.
        secret: what a worker must know; None: nothing.
        arrived: gets who has said properly who they are.
        announce: takes a line about who was turned away, one for each of the first causes.

    Attributes:
        turned_away: why somebody was, with the address.
    """

    def __init__(
        self,
        loop: EventLoop,
        chief: Peer,
        secret: bytes | None,
        arrived: Callable[[FramedSocket, Peer], None],
        announce: Callable[[str], None],
    ) -> None:
        self._loop, self._chief, self._secret = loop, chief, secret
        self._arrived, self._announce = arrived, announce
        self._nonces: dict[FramedSocket, tuple[str, str]] = {}  # Of who knocks: ours and theirs.
        self.turned_away: dict[str, str] = {}

    def knock(self, connection: FramedSocket) -> None:
        """Somebody has connected."""
        self._nonces[connection] = (new_nonce(), "")
        self._loop.add(connection, self._received, lambda _: self._turn_away(connection, connection.ended or ""))
        self._loop.later(
            HANDSHAKE_SECONDS, lambda: self._turn_away(connection, f"it said nothing for {HANDSHAKE_SECONDS:.0f} s")
        )

    def _received(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        try:
            self._read(connection, message)
        except HandshakeError as error:
            self._turn_away(connection, str(error))

    def _read(self, connection: FramedSocket, message: dict[str, Any]) -> None:
        ours, theirs = self._nonces[connection]
        if message["kind"] == "hello" and not theirs:
            theirs = _nonce_of(message)
            self._nonces[connection] = (ours, theirs)
            connection.send(encode(self._challenge(ours, theirs)))
            _check_protocol(message)
        elif message["kind"] == "join" and theirs:
            if self._secret is not None and not proves(message.get("proof"), self._secret, "worker", theirs, ours):
                raise HandshakeError("it does not know the secret of this job")
            peer = _peer_of(message.get("peer"), connection.address)
            del self._nonces[connection]
            self._arrived(connection, peer)
        elif message["kind"] == "other secret":
            raise HandshakeError("it was given another secret than this process, or one of them none")
        else:
            raise HandshakeError(f"it began with {message['kind']!r}")

    def _challenge(self, ours: str, theirs: str) -> dict[str, Any]:
        known = {"kind": "challenge", "protocol": PROTOCOL, "nonce": ours, "process": self._chief.process}
        return known | {"proof": None if self._secret is None else proof(self._secret, "chief", theirs, ours)}

    def _turn_away(self, connection: FramedSocket, reason: str) -> None:
        if self._nonces.pop(connection, None) is None:
            return
        self._loop.remove(connection)
        if reason not in self.turned_away and len(self.turned_away) < _TOLD:
            self.turned_away[reason] = connection.address
            self._announce(f"a connection from {connection.address} was closed: {reason}")


def hello(nonce: str) -> bytes:
    """The first message of a worker."""
    return encode({"kind": "hello", "protocol": PROTOCOL, "nonce": nonce})


def answer(challenge: dict[str, Any], nonce: str, me: Peer, secret: bytes | None) -> bytes:
    """What a worker joins with.

    Args:
        challenge: what the chief has answered.
        nonce: what :func:`hello` was given.
        me: this worker.
        secret: of the job.

    Raises:
        HandshakeError: whoever answered is not this job's chief.
    """
    theirs = _nonce_of(challenge)
    _check_protocol(challenge)
    if (challenge.get("proof") is None) != (secret is None):
        who = "it asks for a secret that this process was not given"
        raise HandshakeError(who if secret is None else "it was given no secret, this process was")
    if secret is not None and not proves(challenge["proof"], secret, "chief", nonce, theirs):
        raise HandshakeError("it and this process were given different secrets")
    return introduction(me, None if secret is None else proof(secret, "worker", nonce, theirs))


def introduction(me: Peer, proven: str | None = None) -> bytes:
    """All that a worker says of itself; OptionError where that cannot be sent."""
    peer = {name: value for name, value in asdict(me).items() if name in _FIELDS}
    return encode({"kind": "join", "proof": proven, "peer": peer}, FIRST_BYTES)


def other_secret() -> bytes:
    """Tells the chief why this worker does not join, for the chief's own message."""
    return encode({"kind": "other secret"})


def _nonce_of(message: dict[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not nonce:
        raise HandshakeError("it sent no nonce")
    return nonce


def _check_protocol(message: dict[str, Any]) -> None:
    if message.get("protocol") != PROTOCOL:
        raise HandshakeError(
            f"it speaks protocol {message.get('protocol')!r}, this process {PROTOCOL}: install the same Lockstep on all workers"
        )


def _peer_of(said: Any, address: str) -> Peer:
    if not isinstance(said, dict) or {name: type(value) for name, value in said.items()} != _FIELDS:
        raise HandshakeError("it did not say who it is")
    return Peer(**said, address=address)
