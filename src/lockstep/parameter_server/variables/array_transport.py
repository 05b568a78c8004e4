"""How arrays travel: a frame as on the control channel (``distributed/control/protocol.py``), whose JSON says which arrays follow, then their bytes.

The receiver sees what follows before it takes memory for it, and may refuse. Bytes are those of the numbers in little-endian order,
rows first. Nothing that is received is ever executed; a secret is proved before (``door.py``), what follows is neither signed nor encrypted.
"""

import itertools
import math
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep.checkpoint.snapshot import DTYPES
from lockstep.distributed.cluster.addresses import join_address
from lockstep.distributed.control.protocol import FrameDecoder, ProtocolError, encode
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = [
    "MAX_HEAD_BYTES",
    "ArrayConnection",
    "Arrays",
    "ConnectionLostError",
    "Message",
    "ProtocolError",
    "payload_bytes",
]

MAX_HEAD_BYTES = 4 * 2**20  # Some 30,000 arrays.
_MAX_AXES = 32
_MAX_BUFFERS = 512  # Of one system call; Linux takes 1024.
_SCRAP_BYTES = 2**16
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]
Arrays = Mapping[str, np.ndarray]
Judge = Callable[[Message, tuple[VariableSpec, ...]], None]


class ConnectionLostError(Exception):
    """Nothing more comes: the other end has closed the connection, is silent, or cannot be reached."""


class ArrayConnection:
    """One end of a connection over which arrays travel; used by one thread at a time, which waits.

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
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket, self._clock = connected, clock
        self.address = "an unknown address"
        with suppress(OSError):
            self.address = join_address(*connected.getpeername()[:2])
        self.sent = self.received = 0
        self.wait_at_most(silence_seconds)

    def wait_at_most(self, silence_seconds: float | None) -> None:
        """Another limit of the wait for the next byte, in both directions; None: none, but for the system's own."""
        self._deadline: float | None = None
        self._socket.settimeout(silence_seconds)

    def hurry(self, seconds: float) -> None:
        """Everything from now on, together, may take so long, until :meth:`wait_at_most` is called."""
        self._deadline = self._clock() + seconds

    def give_up_after(self, seconds: float) -> None:
        """Have the system end it when the other end's machine does not confirm what was sent for so long (Linux)."""
        option = vars(socket).get("TCP_USER_TIMEOUT")
        if option is not None:
            with suppress(OSError):  # Cut already.
                self._socket.setsockopt(socket.IPPROTO_TCP, option, round(1000 * seconds))

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message and arrays; ConnectionLostError where they cannot be sent."""
        described: list[list[Any]] = []
        buffers: list[memoryview] = []
        for name, array in (arrays or {}).items():
            described.append([name, array.dtype.name, list(array.shape), array.nbytes])
            buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._send([memoryview(encode(message | {"arrays": described}, MAX_HEAD_BYTES)), *buffers])

    def send_frame(self, frame: bytes) -> None:
        """Send a message of the control channel that is encoded already."""
        self._send([memoryview(frame)])

    def receive(self, judge: Judge, head_bytes: int = MAX_HEAD_BYTES) -> tuple[Message, dict[str, np.ndarray]]:
        """The next message and its arrays.

        Args:
            judge: gets the message and what arrays follow, and raises where they are not wanted; no memory is taken before.
            head_bytes: limit of the message without arrays.

        Raises:
            ConnectionLostError: nothing more comes.
            ProtocolError: what comes is no message.
        """
        message, specs = self.receive_head(head_bytes)
        judge(message, specs)
        return message, {spec.name: self._array(spec) for spec in specs}

    def receive_head(self, head_bytes: int = MAX_HEAD_BYTES) -> tuple[Message, tuple[VariableSpec, ...]]:
        """The next message, and what arrays follow; they must be received or the link be closed."""
        frames = FrameDecoder(head_bytes)
        length = self._bytes(_LENGTH.size)
        for _ in frames.feed(length):
            pass  # A length alone is no message, but may be refused.
        message = next(frames.feed(self._bytes(*_LENGTH.unpack(length))))
        return message, _specs(message.pop("arrays", []))

    def refuse(self, message: Message, seconds: float = 1.0) -> None:
        """Send a last message to one who may be sending still, and close: what comes is thrown away, or it could not hear us."""
        with suppress(ConnectionLostError, OSError):
            self.hurry(seconds)
            self.send(message)
            self._socket.shutdown(socket.SHUT_WR)
            scrap = memoryview(bytearray(_SCRAP_BYTES))
            while True:
                self._some(scrap)
        self.close()

    def expect(self) -> None:
        """Wait for the first byte of the next message; ConnectionLostError as for others."""
        self._some(memoryview(bytearray(1)), socket.MSG_PEEK)

    def is_closed(self) -> bool:
        """Whether the other end has closed the connection and has said nothing before; does not wait."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                return bool(selector.select(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # A closed socket has no number.
            return True

    def cut(self) -> None:
        """End it, from any thread: the one that uses it gets ConnectionLostError, and closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _array(self, spec: VariableSpec) -> np.ndarray:
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
            done += self._some(buffer[done:])
        self.received += done

    def _some(self, buffer: memoryview, flags: int = 0) -> int:
        try:
            self._mind_the_deadline()
            count = self._socket.recv_into(buffer, 0, flags)
        except TimeoutError:
            raise ConnectionLostError("it said nothing in time") from None
        except OSError as error:
            raise ConnectionLostError(f"its connection closed ({error.strerror or error})") from None
        if not count:
            raise ConnectionLostError("its connection closed")
        return count

    def _mind_the_deadline(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(1e-3, self._deadline - self._clock()))

    def _send(self, buffers: list[memoryview]) -> None:
        waiting = deque(buffer for buffer in buffers if len(buffer))
        while waiting:
            try:
                self._mind_the_deadline()
                count = self._socket.sendmsg(itertools.islice(waiting, _MAX_BUFFERS))
            except TimeoutError:
                raise ConnectionLostError("it took nothing in time") from None
            except OSError as error:
                raise ConnectionLostError(f"its connection closed ({error.strerror or error})") from None
            self.sent += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.popleft())
            if count:
                waiting[0] = waiting[0][count:]


def payload_bytes(specs: tuple[VariableSpec, ...]) -> int:
    """Bytes of the arrays together."""
    return sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in specs)


def _specs(described: Any) -> tuple[VariableSpec, ...]:
    """What arrays follow a message, as it says itself; ProtocolError where that cannot be."""
    if not isinstance(described, list):
        raise ProtocolError("it does not say which arrays follow")
    specs = tuple(_spec(item) for item in described)
    if len({spec.name for spec in specs}) < len(specs):
        raise ProtocolError("two arrays have one name")
    return specs


def _spec(described: Any) -> VariableSpec:
    match described:
        case [str(name), str(dtype), list(shape), int(length)] if dtype in DTYPES and len(shape) <= _MAX_AXES:
            if all(type(size) is int and size >= 0 for size in shape):
                spec = VariableSpec(name, tuple(shape), dtype)
                if payload_bytes((spec,)) == length:
                    return spec
    raise ProtocolError(f"{str(described)[:80]} describes no array")
