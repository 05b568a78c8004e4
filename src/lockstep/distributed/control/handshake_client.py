"""How a process gets through a door (``door.py``): it connects, and each side proves to the other that it knows the secret."""

import socket

from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.handshake_server import HandshakeError, answer, hello, other_secret
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.protocol import new_nonce

__all__ = ["RetryableConnectError", "connect", "introduce"]


class RetryableConnectError(Exception):
    """Nobody is there yet who could let this process in: to try again is right."""


def connect(address: str, seconds: float) -> FramedSocket:
    """A connection to ``host:port``; RetryableConnectError where none is made within ``seconds``."""
    try:
        connected = socket.create_connection(split_address("the coordinator", address), seconds)
    except OSError as error:
        raise RetryableConnectError(error.strerror or str(error)) from None
    if connected.getsockname() == connected.getpeername():
        connected.close()  # A free port can be given to the very socket that tries to reach it.
        raise RetryableConnectError("nobody listens there")
    return FramedSocket(connected)


def introduce(connection: FramedSocket, me: Peer, secret: bytes | None, seconds: float) -> None:
    """Say who this process is.

    Args:
        connection: to the door.
        me: this process.
        secret: of the job.
        seconds: limit of the wait for an answer.

    Raises:
        RetryableConnectError: what answers is no door, or nothing does.
        HandshakeError: it is the door of another job; the sentence begins with the process there, in brackets.
    """
    nonce = new_nonce()
    connection.send(hello(nonce))
    challenge = connection.wait(seconds)
    if challenge is None or challenge["kind"] != "challenge":
        raise RetryableConnectError(
            f"what answers there is no chief of a Lockstep job: {connection.ended or 'it says nothing'}"
        )
    try:
        connection.send(answer(challenge, nonce, me, secret))
    except HandshakeError as error:
        connection.send(other_secret())
        raise HandshakeError(f"({challenge.get('process')}): {error}") from None
