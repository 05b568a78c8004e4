"""Frames of JSON over TCP: the codec, the non-blocking connection that every process of a job uses, and its event loop.

A frame is four bytes of length and one JSON object in UTF-8, a dict with its ``"kind"``. Nothing that is received is executed: no
pickle, no names of code. The handshake (``handshake.py``) rejects unauthenticated peers; if the job has a secret, each frame after it
is followed by its MAC. Nothing is encrypted.

An event loop is one thread that serves connections, timers and calls of other threads. Only that thread touches its state.
"""

import contextlib
import errno
import functools
import hashlib
import heapq
import hmac
import itertools
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lockstep._errors import MAX_WAIT_SECONDS, OptionError
from lockstep.distributed.cluster.addresses import is_loopback, join_address, unmapped

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


class MacCounter:
    """Gives each unit of one direction, a frame or the arrays that follow it, its message authentication code (HMAC-SHA-256), by the key of this
    direction of this connection only. A unit that is repeated, left out or moved has a wrong one.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def begin(self) -> hmac.HMAC:
        """Return the MAC of the next unit, whose parts are to be added."""
        mac = hmac.new(self._key, _COUNT.pack(self._count), hashlib.sha256)
        self._count += 1
        return mac

    def of(self, frame: bytes | bytearray) -> hmac.HMAC:
        """Return the MAC of the next unit, which is a frame."""
        mac = self.begin()
        mac.update(frame)
        return mac


def verify_mac(mac: hmac.HMAC, received: bytes) -> None:
    """Raise ProtocolError if the received code is another one."""
    if not hmac.compare_digest(received, mac.digest()):
        raise ProtocolError("its MAC is wrong: it was changed, or sent before")


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
        raise OptionError(
            f"{len(text):,} bytes are too many for one message to other workers: at most {limit:,}. Fix: send less at once."
        )
    return _LENGTH.pack(len(text)) + text


def as_json(value: Any) -> Any:
    """Return ``value`` as a receiver gets it: tuples become lists, keys become strings; OptionError as in :func:`encode`."""
    return json.loads(as_text(value))


def as_text(value: Any) -> bytes:
    """Return a value as JSON; OptionError if that cannot express it."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"Only values of JSON can be sent to other workers: {error}. Fix: send None, numbers and texts, in lists and dicts."
        ) from None


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
    """Cuts a stream of bytes into messages; those of more than ``limit`` bytes are refused at their header.

    Attributes:
        macs: MACs of the messages from now on; None: they have none.
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
                verify_mac(self.macs.of(self._bytes[:end]), bytes(self._bytes[end:behind]))
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
        return all(is_loopback(unmapped(name[0])) for name in (connected.getsockname(), connected.getpeername()))
    return False


def limit_unacknowledged(connected: socket.socket, seconds: float) -> None:
    """Have Linux close a connection whose other end has not acknowledged sent data for ``seconds``; its default is 15 minutes."""
    if sys.platform == "linux" and connected.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # Closed already.
            connected.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * min(seconds, MAX_WAIT_SECONDS))
            )


class FramedSocket:
    """One end of a connection, which owns its socket; used by one thread at a time.

    It sends and receives messages without blocking; those that it receives have at most ``limit`` bytes.

    Attributes:
        ended: why no more messages can come; None while they can.
        address: address of the other end.
        session: authenticates the messages; None: they are not authenticated.
    """

    def __init__(self, connected: socket.socket, limit: int = MAX_BYTES) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._frames = FrameDecoder(limit)
        self._unsent = bytearray()
        self._is_send_closed = False
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
        """Authenticate all messages from now on; arrays only if the other end may be on another machine."""
        self.session = replace(session, covers_arrays=not is_local(self._socket))
        self._frames.macs = session.received

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
                selector.select(min(max(0.0, seconds), MAX_WAIT_SECONDS))
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


Received = Callable[[FramedSocket, dict[str, Any]], None]
Closed = Callable[[FramedSocket], None]
Work = Callable[[], None]

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.5


class EventLoop:
    """A daemon thread that serves connections, runs calls of other threads, and runs timers."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[FramedSocket, tuple[Received, Closed]] = {}
        self._listeners: list[socket.socket] = []
        self._work: deque[Work] = deque()
        self._later: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._stopped = False
        self._wakeup_r, self._wakeup_w = socket.socketpair()
        self._wakeup_r.setblocking(False)
        self._wakeup_w.setblocking(False)
        self._selector.register(self._wakeup_r, selectors.EVENT_READ, self._drain_wakeup)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        _started.add(self)
        _close_in_children()
        self._thread.start()

    def call(self, work: Work) -> None:
        """Run ``work`` in the loop's thread soon; may be called from any thread."""
        self._work.append(work)
        with contextlib.suppress(OSError):  # Full: the loop wakes up anyway. Closed: it has ended.
            self._wakeup_w.send(b"\0")

    def later(self, seconds: float, work: Work) -> None:
        """Run ``work`` after ``seconds``; to be called from the loop's thread, or before it starts."""
        heapq.heappush(self._later, (self._clock() + seconds, next(self._order), work))

    def add(self, connection: FramedSocket, received: Received, closed: Closed) -> None:
        """Serve a connection: ``received`` gets each message, and ``closed`` is called once if the other end closes it.

        For a connection that is served already, this replaces both functions.
        """
        if connection not in self._handlers:
            self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(connection, events))
        self._handlers[connection] = (received, closed)

    def listen(
        self, listener: socket.socket, accepted: Callable[[socket.socket], None], log: Callable[[str], None]
    ) -> None:
        """Call ``accepted`` with each new connection to a listening socket.

        While this process can open no more descriptors, new connections wait. ``log`` takes a line about the first time.
        """
        listener.setblocking(False)
        self._listeners.append(listener)
        has_logged = False

        def resume() -> None:
            self._selector.register(listener, selectors.EVENT_READ, accept)

        def accept(events: int) -> None:
            nonlocal has_logged
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # The connection stays, and would wake this loop at once.
                    self._selector.unregister(listener)
                    self.later(_PAUSE_SECONDS, resume)
                    if not has_logged:
                        log(f"new connections wait: {error.strerror}. Fix: raise the limit of open files (ulimit -n).")
                    has_logged = True
                return  # Else it was closed again.
            accepted(connected)

        resume()

    def remove(self, connection: FramedSocket) -> None:
        """Send what can be sent and close a connection."""
        if self._handlers.pop(connection, None):
            connection.flush()
            self._selector.unregister(connection)
            connection.close()

    def release(self, connection: FramedSocket) -> None:
        """Serve a connection no more, and leave it open."""
        self._handlers.pop(connection)
        self._selector.unregister(connection)

    def stop(self) -> None:
        """Send what can be sent, close everything and end the thread; may be called from any thread."""
        if self._thread.ident is None:
            self._close()
        self.call(self._stop)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(1.0)

    def close_descriptors(self) -> None:
        """Close all descriptors and do nothing else: for the copies that a fork makes in a child process."""
        for connection in self._handlers:
            connection.close()
        for held in (*self._listeners, self._wakeup_r, self._wakeup_w):
            held.close()
        self._selector.close()
        self._handlers.clear()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        finally:  # Also after an error of ours: the other ends see their connections close.
            self._close()

    def _turn(self) -> None:
        due = self._later[0][0] - self._clock() if self._later else None
        wait = None if due is None else min(max(0.0, due), MAX_WAIT_SECONDS)
        for key, events in self._selector.select(wait):
            key.data(events)
        while self._work:
            self._work.popleft()()
        while self._later and self._later[0][0] <= self._clock() and not self._stopped:
            heapq.heappop(self._later)[2]()
        for connection in self._handlers:
            unsent = selectors.EVENT_WRITE if connection.has_unsent else 0
            self._selector.modify(connection, selectors.EVENT_READ | unsent, self._selector.get_key(connection).data)

    def _serve(self, connection: FramedSocket, events: int) -> None:
        if connection not in self._handlers:
            return  # Removed by an earlier event of the same turn.
        connection.flush()
        for message in connection.receive() if events & selectors.EVENT_READ else ():
            if connection in self._handlers:  # A message may replace the functions or remove the connection.
                self._handlers[connection][0](connection, message)
        if connection.ended is not None and connection in self._handlers:
            closed = self._handlers[connection][1]
            self.remove(connection)
            closed(connection)

    def _drain_wakeup(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup_r.recv(4096):
                pass

    def _stop(self) -> None:
        self._stopped = True

    def _close(self) -> None:
        for connection in tuple(self._handlers):
            self.remove(connection)
        self.close_descriptors()


_started: weakref.WeakSet[EventLoop] = weakref.WeakSet()


@functools.cache  # Handlers of forks stay as long as the process.
def _close_in_children() -> None:
    """Have forked children close their copies of all sockets, which would hide the death of this process from the other ends."""

    def close() -> None:
        for loop in list(_started):
            loop.close_descriptors()

    os.register_at_fork(after_in_child=close)
