"""A socket that carries messages and never blocks: what cannot be sent yet waits here."""

import contextlib
import selectors
import socket
from collections.abc import Iterator
from typing import Any

from lockstep.distributed.cluster.addresses import join_address
from lockstep.distributed.control.protocol import MAX_BYTES, FrameDecoder, ProtocolError

__all__ = ["CLOSED", "FramedSocket"]

CLOSED = "its connection closed"
_CHUNK = 2**18

# Seconds until the system begins to ask an idle peer, between two questions, and unanswered questions before it gives up.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))


class FramedSocket:
    """One end of a connection; used by one thread at a time.

    Args:
        connected: the socket, which belongs to this object from now on.
        limit: bytes of a message that is received.

    Attributes:
        ended: why nothing more will come; None as long as something may.
        address: of the other end.
    """

    def __init__(self, connected: socket.socket, limit: int = MAX_BYTES) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frames = FrameDecoder(limit)
        self._unsent = bytearray()
        self._is_deaf = False
        self.ended: str | None = None
        self.address = _prepare(connected)

    def fileno(self) -> int:
        """Number of the socket, for a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether :meth:`flush` has something to do."""
        return bool(self._unsent)

    def allow(self, limit: int) -> None:
        """Take messages of up to ``limit`` bytes."""
        self._frames.limit = limit

    def give_up_after(self, seconds: float) -> None:
        """Have the system end it when what was sent is not confirmed for so long (Linux): else that takes a quarter of an hour."""
        option = vars(socket).get("TCP_USER_TIMEOUT")
        if option is not None and self._socket.family in (socket.AF_INET, socket.AF_INET6):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, round(1000 * seconds))

    def send(self, frame: bytes) -> None:
        """Send an encoded message, now or when there is room for it."""
        if not self._is_deaf:
            self._unsent += frame
            self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except (
            OSError
        ):  # Nothing more after half a message. What the other end has said can still be read, and tells why.
            self._is_deaf = True
            self._unsent.clear()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages that are here; sets :attr:`ended` where nothing more will come."""
        try:
            yield from self._frames.feed(self._read())
        except ProtocolError as error:
            self.ended = f"it sent what is no message: {error}"

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None where none comes within ``seconds`` or the connection has ended."""
        self.flush()
        message = next(self.receive(), None)
        if message is None and self.ended is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
                selector.select(max(0.0, seconds))
            message = next(self.receive(), None)
        return message

    def close(self) -> None:
        """Give the socket back."""
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


def _prepare(connected: socket.socket) -> str:
    """Small messages go at once, and a link that was cut is found by the system too; gives the other end's address."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return "this process"
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    known = vars(socket)
    options += [(socket.IPPROTO_TCP, known[name], value) for name, value in _KEEPALIVE if name in known]
    with contextlib.suppress(OSError):
        for option in options:
            connected.setsockopt(*option)
    with contextlib.suppress(OSError):
        return join_address(*connected.getpeername()[:2])
    return "an unknown address"
