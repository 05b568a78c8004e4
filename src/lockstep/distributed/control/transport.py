"""Frames of JSON over TCP: the codec, and the non-blocking connection that every process of a job uses.

A frame is four bytes of length and one JSON object in UTF-8, a dict with its ``"kind"``. Nothing that is received is executed: no
pickle, no names of code. The handshake (``handshake.py``) rejects unauthenticated peers; if the job has a secret, each frame after it
is followed by its MAC. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import selectors
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep._errors import OptionError
from lockstep.distributed.cluster.addresses import join_address

MAX_BYTES = 16 * 2**20
HANDSHAKE_BYTES = 2**16  # Limit of a message before the handshake is complete.
CLOSED = "its connection closed"

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
_CHUNK = 2**18
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 15, 5, 4


class ProtocolError(Exception):
    """Received bytes are no message of this protocol."""


MAC_BYTES = 32
_COUNT = struct.Struct(">Q")


class Mac:
    """The message authentication code (HMAC-SHA-256) of one unit: a frame, or the arrays that follow it.

    Args:
        key: of one direction of one connection.
        number: of the unit in its direction.
    """

    def __init__(self, key: bytes, number: int) -> None:
        self._hmac = hmac.new(key, _COUNT.pack(number), hashlib.sha256)

    def update(self, part: bytes | bytearray | memoryview) -> None:
        """Add the next part of the unit."""
        self._hmac.update(part)

    def digest(self) -> bytes:
        """Return the code."""
        return self._hmac.digest()

    def verify(self, received: bytes) -> None:
        """Raise ProtocolError if the received code is another one."""
        if not hmac.compare_digest(received, self._hmac.digest()):
            raise ProtocolError("its MAC is wrong: it was changed, or sent before")


class MacCounter:
    """Gives each unit of one direction its MAC. A unit that is repeated, left out or moved has a wrong one.

    Args:
        key: of this direction of this connection only.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def begin(self) -> Mac:
        """Return the MAC of the next unit."""
        mac = Mac(self._key, self._count)
        self._count += 1
        return mac

    def of(self, *parts: bytes | bytearray | memoryview) -> Mac:
        """Return the MAC of the next unit, which consists of these parts."""
        mac = self.begin()
        for part in parts:
            mac.update(part)
        return mac


@dataclass(frozen=True)
class Session:
    """One end of a connection whose messages are authenticated.

    Args:
        sent: what this end sends.
        received: what it receives.
        covers_arrays: whether arrays that this end sends have a MAC, not only the frame that describes them. That takes longer than to
            send them within one machine, where no other user can change them.
    """

    sent: MacCounter
    received: MacCounter
    covers_arrays: bool = True


def encode(message: dict[str, Any], limit: int = MAX_BYTES) -> bytes:
    """Return a message as a frame.

    Raises:
        OptionError: it holds what JSON cannot express, or is larger than ``limit``.
    """
    text = as_text(message)
    if len(text) > limit:
        raise OptionError(f"{len(text):,} bytes are too many for one message to other workers: at most {limit:,}.")
    return _LENGTH.pack(len(text)) + text


def as_json(value: Any) -> Any:
    """Return ``value`` as a receiver gets it: tuples become lists, keys become strings; OptionError as in :func:`encode`."""
    return json.loads(as_text(value))


def as_text(value: Any) -> bytes:
    """Return a value as JSON; OptionError if that cannot express it."""
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

    Attributes:
        macs: of the messages from now on; None: they have none.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self.macs: MacCounter | None = None
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
            behind = end if self.macs is None else end + MAC_BYTES
            if len(self._bytes) < behind:
                return
            if self.macs is not None:
                self.macs.of(self._bytes[:end]).verify(bytes(self._bytes[end:behind]))
            message = decode(bytes(self._bytes[HEADER_BYTES:end]))
            del self._bytes[:behind]
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


def is_local(connected: socket.socket) -> bool:
    """Return whether a connection is between two loopback addresses of this machine."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    with contextlib.suppress(OSError):  # Closed already.
        return all(_is_loopback(name[0]) for name in (connected.getsockname(), connected.getpeername()))
    return False


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


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
        is_local: whether both ends are loopback addresses of this machine.
        session: authenticates the messages; None: they are not authenticated.
    """

    def __init__(self, connected: socket.socket, limit: int = MAX_BYTES) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frames = FrameDecoder(limit)
        self._unsent = bytearray()
        self._is_send_closed = False
        self.is_local = is_local(connected)
        self.ended: str | None = None
        self.address = configure(connected)
        self.session: Session | None = None

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

    def authenticate(self, session: Session) -> None:
        """Authenticate all messages from now on."""
        self.session, self._frames.macs = session, session.received

    def limit_unacknowledged(self, seconds: float) -> None:
        """See :func:`limit_unacknowledged`."""
        limit_unacknowledged(self._socket, seconds)

    def send(self, frame: bytes) -> None:
        """Send an encoded message, at once or when the socket has room for it."""
        if not self._is_send_closed:
            self._unsent += frame
            if self.session is not None:
                self._unsent += self.session.sent.of(frame).digest()
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
