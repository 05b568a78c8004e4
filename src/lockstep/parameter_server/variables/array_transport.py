"""Blocking connection for messages with arrays: frames of the control channel, each followed by the bytes of its arrays.

The JSON of a frame describes the arrays (``lockstep._arrays``), so a receiver can refuse them before it takes memory. A connection
begins with the same handshake as the control channel; after it, this takes the socket over.
"""

import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep._arrays import DTYPES, ArraySpec, array_bytes, describe_arrays, parse_description
from lockstep.distributed.control.transport import (
    CLOSED,
    HEADER_BYTES,
    ProtocolError,
    body_length,
    configure,
    decode,
    encode,
    limit_unacknowledged,
)

__all__ = [
    "MAX_HEAD_BYTES",
    "ArrayConnection",
    "Arrays",
    "CheckRequest",
    "ConnectionLostError",
    "Message",
    "ProtocolError",
    "payload_bytes",
]

MAX_HEAD_BYTES = 4 * 2**20  # Some 30,000 arrays.
_MAX_BUFFERS = 512  # Of one system call; Linux takes 1024.
_DISCARD_BYTES = 2**16

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
        clock: gives seconds, and is not set back.

    Attributes:
        address: of the other end.
        sent: bytes that were sent.
        received: bytes that were received.
    """

    def __init__(
        self, connected: socket.socket, silence_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket, self._clock = connected, clock
        self.address = configure(connected)
        self.sent = self.received = 0
        self.set_timeout(silence_seconds)

    def set_timeout(self, silence_seconds: float | None) -> None:
        """Set the limit of the wait for the next byte, in both directions; None: only the system's own."""
        self._deadline: float | None = None
        self._socket.settimeout(silence_seconds)

    def set_deadline(self, seconds: float) -> None:
        """Limit everything from now on, together, to ``seconds``, until :meth:`set_timeout` is called."""
        self._deadline = self._clock() + seconds

    def limit_unacknowledged(self, seconds: float) -> None:
        """See :func:`lockstep.distributed.control.transport.limit_unacknowledged`."""
        limit_unacknowledged(self._socket, seconds)

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message and arrays; ConnectionLostError if they cannot be sent."""
        arrays = arrays or {}
        frame = encode(message | {"arrays": describe_arrays(arrays)}, MAX_HEAD_BYTES)
        self._send([memoryview(frame), *map(array_bytes, arrays.values())])

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message without arrays."""
        self._send([memoryview(frame)])

    def receive(self, check: CheckRequest, head_bytes: int = MAX_HEAD_BYTES) -> tuple[Message, dict[str, np.ndarray]]:
        """Return the next message and its arrays.

        Args:
            check: gets the message and the description of its arrays, and raises if they are not wanted; no memory is taken before.
            head_bytes: limit of the message without arrays.

        Raises:
            ConnectionLostError: nothing more can come.
            ProtocolError: the received bytes are no message.
        """
        message, specs = self.receive_head(head_bytes)
        check(message, specs)
        return message, {spec.name: self._array(spec) for spec in specs}

    def receive_head(self, head_bytes: int = MAX_HEAD_BYTES) -> tuple[Message, tuple[ArraySpec, ...]]:
        """Return the next message and the description of its arrays, which must be received unless the connection is closed."""
        message = decode(self._bytes(body_length(self._bytes(HEADER_BYTES), head_bytes)))
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

    def _array(self, spec: ArraySpec) -> np.ndarray:
        array = np.empty(spec.shape, DTYPES[spec.dtype])
        self._fill(array.reshape(-1).view(np.uint8).data)
        return array

    def _bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            done += self._receive_some(buffer[done:])
        self.received += done

    def _receive_some(self, buffer: memoryview, flags: int = 0) -> int:
        try:
            self._apply_deadline()
            count = self._socket.recv_into(buffer, 0, flags)
        except TimeoutError:
            raise ConnectionLostError("it said nothing in time") from None
        except OSError as error:
            raise ConnectionLostError(f"{CLOSED} ({error.strerror or error})") from None
        if not count:
            raise ConnectionLostError(CLOSED)
        return count

    def _apply_deadline(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(1e-3, self._deadline - self._clock()))

    def _send(self, buffers: list[memoryview]) -> None:
        unsent = deque(buffer for buffer in buffers if len(buffer))
        while unsent:
            try:
                self._apply_deadline()
                count = self._socket.sendmsg(itertools.islice(unsent, _MAX_BUFFERS))
            except TimeoutError:
                raise ConnectionLostError("it took nothing in time") from None
            except OSError as error:
                raise ConnectionLostError(f"{CLOSED} ({error.strerror or error})") from None
            self.sent += count
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:
                unsent[0] = unsent[0][count:]


def payload_bytes(specs: tuple[ArraySpec, ...]) -> int:
    """Return the bytes of all arrays together."""
    return sum(spec.nbytes for spec in specs)
