"""How a worker and a server of variables meet: as at the chief's door (``distributed/control/handshake_server.py``), but each waits in a thread of its own."""

from collections.abc import Mapping
from typing import Any

from lockstep.distributed.control.handshake_server import HANDSHAKE_SECONDS, HandshakeError, answer, hello, other_secret
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.protocol import FIRST_BYTES, PROTOCOL, new_nonce, proof, proves
from lockstep.parameter_server.variables.array_transport import ArrayConnection, Message, ProtocolError
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = ["enter", "let_in"]


def let_in(link: ArrayConnection, me: Peer, secret: bytes | None) -> Peer:
    """Find out who has connected.

    Args:
        link: to whoever it is.
        me: this server; who comes must have the same identity.
        secret: what they must know; None: nothing.

    Returns:
        The worker.

    Raises:
        HandshakeError: it is no worker of this job.
        ConnectionLostError: it went away, or took too long.
        ProtocolError: it sent what is no message.
    """
    link.hurry(HANDSHAKE_SECONDS)
    greeting = _next(link, "hello")
    ours, theirs = new_nonce(), str(greeting.get("nonce"))
    proven = None if secret is None else proof(secret, "chief", theirs, ours)
    link.send({"kind": "challenge", "protocol": PROTOCOL, "nonce": ours, "process": me.process, "proof": proven})
    joining = _next(link, "join")
    if secret is not None and not proves(joining.get("proof"), secret, "worker", theirs, ours):
        raise HandshakeError("it does not know the secret of this job")
    worker = _peer_of(joining.get("peer"), link.address)
    _compare(worker.identity, me.identity)
    link.send({"kind": "welcome"})
    return worker


def enter(link: ArrayConnection, me: Peer, secret: bytes | None, seconds: float) -> None:
    """Say to a server who this worker is.

    Args:
        link: to the server.
        me: this worker.
        secret: of the job.
        seconds: limit of all of it.

    Raises:
        HandshakeError: it is no server of this job, or does not let this worker in.
        ConnectionLostError: it went away, or took too long.
        ProtocolError: it sent what is no message.
    """
    link.hurry(seconds)
    nonce = new_nonce()
    link.send_frame(hello(nonce))
    challenge = _next(link, "challenge")
    try:
        link.send_frame(answer(challenge, nonce, me, secret))
    except HandshakeError:
        link.send_frame(other_secret())
        raise
    _next(link, "welcome")


def _next(link: ArrayConnection, kind: str) -> Message:
    message, _ = link.receive(_nothing_follows, FIRST_BYTES)
    if message["kind"] == "refused":
        raise HandshakeError(f"it says: {message.get('sentence')}")
    if message["kind"] != kind:
        raise HandshakeError(f"it said {message['kind']!r} instead of {kind!r}")
    return message


def _nothing_follows(message: Message, specs: tuple[VariableSpec, ...]) -> None:
    if specs:
        raise ProtocolError(f"arrays follow a {message['kind']!r}")


def _peer_of(said: Any, address: str) -> Peer:
    match said:
        case {
            "index": int(index),
            "workers": int(workers),
            "host": str(host),
            "pid": int(pid),
            "identity": dict(identity),
            "information": dict(information),
        }:
            return Peer(index, workers, host, pid, identity=identity, information=information, address=address)
    raise HandshakeError("it did not say who it is")


def _compare(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise HandshakeError(f"its {name} is {theirs.get(name)!r}, that of the server {ours.get(name)!r}")
