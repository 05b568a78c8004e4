"""Frames of JSON over TCP: the codec, and the non-blocking connection that every process of a job uses.

A frame is four bytes of length and one JSON object in UTF-8, a dict with its ``"kind"``. Nothing that is received is executed: no
pickle, no names of code. The handshake (``handshake.py``) rejects unauthenticated peers; frames are neither signed nor encrypted.
"""

import contextlib
import json
import selectors
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

from lockstep._errors import OptionError
from lockstep.distributed.cluster.addresses import join_address

__all__ = [
    "CLOSED",
    "HANDSHAKE_BYTES",
    "HEADER_BYTES",
    "MAX_BYTES",
    "FrameDecoder",
    "FramedSocket",
    "ProtocolError",
    "as_json",
    "body_length",
    "configure",
    "decode",
    "encode",
    "limit_unacknowledged",
]

MAX_BYTES = 16 * 2**20
HANDSHAKE_BYTES = 2**16  # Limit of a message before the handshake is complete.
CLOSED = "its connection closed"

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
_CHUNK = 2**18
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 15, 5, 4


class ProtocolError(Exception):
    """Received bytes are no message of this protocol."""


def encode(message: dict[str, Any], limit: int = MAX_BYTES) -> bytes:
    """Return a message as a frame.

    Raises:
        OptionError: it holds what JSON cannot express, or is larger than ``limit``.
    """
    text = _text(message)
    if len(text) > limit:
        raise OptionError(f"{len(text):,} bytes are too many for one message to other workers: at most {limit:,}.")
    return _LENGTH.pack(len(text)) + text


def as_json(value: Any) -> Any:
    """Return ``value`` as a receiver gets it: tuples become lists, keys become strings; OptionError as in :func:`encode`."""
    return json.loads(_text(value))


def _text(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"Only values of JSON can be sent to other workers: {error}.") from None


def body_length(header: bytes | bytearray, limit: int) -> int:
    """Return the length that the first ``HEADER_BYTES`` of a frame give; ProtocolError if it is above ``limit``."""
    (length,) = _LENGTH.unpack_from(header)
    if length > limit:
        raise ProtocolError(f"{bytes(header[:16])!r} is no beginning of a message of at most {limit:,} bytes")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """Return the message in a frame's body; ProtocolError if it is none."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(f"{body[:16]!r} is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError(f"{body[:16]!r} is no object with a kind")
    return message


class FrameDecoder:
    """Cuts a stream of bytes into messages.

    Args:
        limit: bytes of a message; longer ones are refused at their header.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self._bytes = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no received byte is left to decode."""
        return not self._bytes

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete; ProtocolError at the first that is none."""
        self._bytes += received
        while len(self._bytes) >= HEADER_BYTES:
            end = HEADER_BYTES + body_length(self._bytes, self.limit)
            if len(self._bytes) < end:
                return
            message = decode(bytes(self._bytes[HEADER_BYTES:end]))
            del self._bytes[:end]
            yield message


def configure(connected: socket.socket) -> str:
    """Turn off Nagle's algorithm, turn on TCP keepalive, and return the address of the other end."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return "this process"
    with contextlib.suppress(OSError, AttributeError):  # Not every system has the last three options.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    with contextlib.suppress(OSError):
        return join_address(*connected.getpeername()[:2])
    return "an unknown address"


def limit_unacknowledged(connected: socket.socket, seconds: float) -> None:
    """Have Linux close a connection whose other end has not acknowledged sent data for ``seconds``; its default is 15 minutes."""
    if sys.platform == "linux" and connected.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # Closed already.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


class FramedSocket:
    """One end of a connection that sends and receives messages without blocking; used by one thread at a time.

    Args:
        connected: the socket, which belongs to this object from now on.
        limit: bytes of a message that is received.

    Attributes:
        ended: why no more messages can come; None while they can.
        address: of the other end.
    """

    def __init__(self, connected: socket.socket, limit: int = MAX_BYTES) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frames = FrameDecoder(limit)
        self._unsent = bytearray()
        self._is_send_closed = False
        self.ended: str | None = None
        self.address = configure(connected)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether :meth:`flush` has something to send."""
        return bool(self._unsent)

    def set_limit(self, limit: int) -> None:
        """Accept messages of up to ``limit`` bytes."""
        self._frames.limit = limit

    def limit_unacknowledged(self, seconds: float) -> None:
        """See :func:`limit_unacknowledged`."""
        limit_unacknowledged(self._socket, seconds)

    def send(self, frame: bytes) -> None:
        """Send an encoded message, at once or when the socket has room for it."""
        if not self._is_send_closed:
            self._unsent += frame
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket has room for."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # Half a message may be out: send no more. What was received can still be read.
            self._is_send_closed = True
            self._unsent.clear()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived; sets :attr:`ended` when no more can come."""
        try:
            yield from self._frames.feed(self._read())
        except ProtocolError as error:
            self.ended = f"it sent what is no message: {error}"

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message; None if none comes within ``seconds`` or the connection has ended."""
        self.flush()
        message = next(self.receive(), None)
        if message is None and self.ended is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
                selector.select(max(0.0, seconds))
            message = next(self.receive(), None)
        return message

    def detach(self) -> socket.socket:
        """Give the socket to a blocking reader; ProtocolError if more was received or is to be sent than the messages so far."""
        if self._unsent or not self._frames.is_empty:
            raise ProtocolError("more than the handshake was sent before its end")
        return self._socket

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _read(self) -> bytes:
        try:
            received = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.ended = f"{CLOSED} ({error.strerror or error})"
            return b""
        if not received:
            self.ended = CLOSED
        return received
