"""Blocking connection for messages with arrays: frames of the control channel, each followed by the bytes of its arrays.

The JSON of a frame describes the arrays (``lockstep._array_encoding``), so a receiver can refuse them before it takes memory. A connection
begins with the same handshake as the control channel; after it, this takes the socket over, with its session: then each frame has a
MAC, and so have the arrays behind it if the frame says so.
"""

import hmac
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep._array_encoding import DTYPES, ArraySpec, array_bytes, describe_arrays, parse_description
from lockstep._errors import MAX_WAIT_SECONDS
from lockstep.distributed.control.transport import (
    CLOSED,
    HEADER_BYTES,
    MAC_BYTES,
    ProtocolError,
    Session,
    body_length,
    configure,
    decode,
    encode,
    limit_unacknowledged,
    verify_mac,
)

MAX_HEAD_BYTES = 4 * 2**20  # Some 30,000 arrays.
_MAX_BUFFERS = 512  # Of one system call; Linux takes 1024.
_DISCARD_BYTES = 2**16
_HAS_MAC = "arrays_have_mac"  # In a frame that has a MAC itself.

Message = dict[str, Any]
Arrays = Mapping[str, np.ndarray]
CheckRequest = Callable[[Message, tuple[ArraySpec, ...]], None]


class ConnectionLostError(Exception):
    """Nothing more can come: the other end has closed the connection, is silent, or cannot be reached."""


class ArrayConnection:
    """One end of a connection for messages with arrays; used by one thread at a time, which blocks.

    Args:
        connected: the socket, which belongs to this object from now on.
        silence_seconds: limit of the wait for the next byte.
        session: authenticates the messages; None: they are not authenticated.
        clock: gives seconds, and is not set back.

    Attributes:
        address: address of the other end.
        sent: bytes that were sent.
        received: bytes that were received.
    """

    def __init__(
        self,
        connected: socket.socket,
        silence_seconds: float | None,
        session: Session | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._session, self._clock = connected, session, clock
        self.address = configure(connected)
        self.sent = self.received = 0
        self.set_timeout(silence_seconds)

    def set_timeout(self, silence_seconds: float | None) -> None:
        """Set the limit of the wait for the next byte, in both directions; None: only the system's own."""
        self._deadline: float | None = None
        self._socket.settimeout(silence_seconds and min(silence_seconds, MAX_WAIT_SECONDS))

    def set_deadline(self, seconds: float) -> None:
        """Limit everything from now on, together, to ``seconds``, until :meth:`set_timeout` is called."""
        self._deadline = self._clock() + min(seconds, MAX_WAIT_SECONDS)

    def limit_unacknowledged(self, seconds: float) -> None:
        """See :func:`lockstep.distributed.control.transport.limit_unacknowledged`."""
        limit_unacknowledged(self._socket, seconds)

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message and arrays; ConnectionLostError if they cannot be sent."""
        arrays = arrays or {}
        has_mac = self._session is not None and self._session.covers_arrays and bool(arrays)
        head = message | {"arrays": describe_arrays(arrays)} | ({_HAS_MAC: True} if has_mac else {})
        frame = encode(head, MAX_HEAD_BYTES)
        if self._session is not None:
            frame += self._session.sent.of(frame).digest()
        buffers = map(array_bytes, arrays.values())
        if self._session is None or not has_mac:
            self._send([memoryview(frame), *buffers])
        else:
            mac = self._session.sent.begin()
            self._send([memoryview(frame)])
            self._send(buffers, mac)
            self._send([memoryview(mac.digest())])

    def receive(self, check: CheckRequest) -> tuple[Message, dict[str, np.ndarray]]:
        """Return the next message and its arrays.

        Args:
            check: gets the message and the description of its arrays, and raises if they are not wanted; no memory is taken before.

        Raises:
            ConnectionLostError: nothing more can come.
            ProtocolError: the received bytes are no message.
        """
        message, specs = self.receive_head()
        has_mac = message.pop(_HAS_MAC, False) is True
        check(message, specs)
        mac = self._session.received.begin() if self._session is not None and has_mac else None
        arrays = {spec.name: self._array(spec, mac) for spec in specs}
        self._verify(mac)
        return message, arrays

    def receive_head(self) -> tuple[Message, tuple[ArraySpec, ...]]:
        """Return the next message and the description of its arrays, which must be received unless the connection is closed."""
        mac = None if self._session is None else self._session.received.begin()
        body = self._bytes(body_length(self._bytes(HEADER_BYTES, mac), MAX_HEAD_BYTES), mac)
        self._verify(mac)
        message = decode(body)
        try:
            return message, parse_description(message.pop("arrays", []))
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def refuse(self, message: Message, seconds: float = 1.0) -> None:
        """Send a last message and close; what the other end still sends is discarded, or it could not receive the message."""
        with suppress(ConnectionLostError, OSError):
            self.set_deadline(seconds)
            self.send(message)
            self._socket.shutdown(socket.SHUT_WR)
            discarded = memoryview(bytearray(_DISCARD_BYTES))
            while True:
                self._receive_some(discarded)
        self.close()

    def wait_for_message(self) -> None:
        """Wait for the first byte of the next message; ConnectionLostError if none can come."""
        self._receive_some(memoryview(bytearray(1)), socket.MSG_PEEK)

    def is_closed(self) -> bool:
        """Return, without blocking, whether the other end has closed the connection and sent nothing before."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                return bool(selector.select(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # A closed socket has no descriptor.
            return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _array(self, spec: ArraySpec, mac: hmac.HMAC | None) -> np.ndarray:
        array = np.empty(spec.shape, DTYPES[spec.dtype])
        self._fill(array.reshape(-1).view(np.uint8).data, mac)
        return array

    def _bytes(self, count: int, mac: hmac.HMAC | None) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer), mac)
        return bytes(buffer)

    def _fill(self, buffer: memoryview, mac: hmac.HMAC | None) -> None:
        done = 0
        while done < len(buffer):
            count = self._receive_some(buffer[done:])
            if mac is not None:  # Here, while the next bytes are on their way.
                mac.update(buffer[done : done + count])
            done += count
        self.received += done

    def _verify(self, mac: hmac.HMAC | None) -> None:
        if mac is not None:
            verify_mac(mac, self._bytes(MAC_BYTES, None))

    def _receive_some(self, buffer: memoryview, flags: int = 0) -> int:
        try:
            self._apply_deadline()
            count = self._socket.recv_into(buffer, 0, flags)
        except TimeoutError:
            raise ConnectionLostError("it sent no data in time") from None
        except OSError as error:
            raise ConnectionLostError(f"{CLOSED} ({error.strerror or error})") from None
        if not count:
            raise ConnectionLostError(CLOSED)
        return count

    def _apply_deadline(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(1e-3, self._deadline - self._clock()))

    def _send(self, buffers: Iterable[memoryview], mac: hmac.HMAC | None = None) -> None:
        """Send bytes, and add them to a MAC."""
        unsent = deque(buffer for buffer in buffers if len(buffer))
        while unsent:
            try:
                self._apply_deadline()
                count = self._socket.sendmsg(itertools.islice(unsent, _MAX_BUFFERS))
            except TimeoutError:
                raise ConnectionLostError("it accepted no data in time") from None
            except OSError as error:
                raise ConnectionLostError(f"{CLOSED} ({error.strerror or error})") from None
            self.sent += count
            for part in _take(unsent, count):
                if mac is not None:  # After they were sent: the other end works at the same time.
                    mac.update(part)


def _take(buffers: deque[memoryview], count: int) -> Iterator[memoryview]:
    """Remove the first ``count`` bytes of all buffers, and yield them."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        yield buffers.popleft()
    if count:
        yield buffers[0][:count]
        buffers[0] = buffers[0][count:]


def payload_bytes(specs: tuple[ArraySpec, ...]) -> int:
    """Return the bytes of all arrays together."""
    return sum(spec.nbytes for spec in specs)
