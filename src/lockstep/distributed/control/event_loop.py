"""One thread that serves connections: all that it owns is touched by it alone, so nothing needs a lock."""

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from lockstep.distributed.control.framed_socket import FramedSocket

__all__ = ["EventLoop"]

Received = Callable[[FramedSocket, dict[str, Any]], None]
Closed = Callable[[FramedSocket], None]
Work = Callable[[], None]


class EventLoop:
    """A daemon thread that waits for connections, for work of other threads, and for the time of later work.

    Args:
        name: of the thread.
        clock: gives seconds, and is not set back.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[FramedSocket, tuple[Received, Closed]] = {}
        self._listeners: list[socket.socket] = []
        self._work: deque[Work] = deque()
        self._later: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._stopped = False
        self._bell, self._clapper = socket.socketpair()
        self._bell.setblocking(False)
        self._clapper.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._ring)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        _forget_in_children(self)
        self._thread.start()

    def call(self, work: Work) -> None:
        """Have ``work`` done in the thread, soon; from any thread."""
        self._work.append(work)
        with contextlib.suppress(OSError):  # Full: it rings already. Closed: nobody is there to hear it.
            self._clapper.send(b"\0")

    def later(self, seconds: float, work: Work) -> None:
        """Have ``work`` done after some time; from the thread itself, or before it starts."""
        heapq.heappush(self._later, (self._clock() + seconds, next(self._order), work))

    def add(self, connection: FramedSocket, received: Received, closed: Closed) -> None:
        """Serve a connection: ``received`` gets each message, and ``closed`` is told once of an end that is not ours.

        One that is served already changes hands.
        """
        if connection not in self._handlers:
            self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(connection, events))
        self._handlers[connection] = (received, closed)

    def listen(self, listener: socket.socket, accepted: Callable[[FramedSocket], None], limit: int) -> None:
        """Take in who connects; their messages may be of ``limit`` bytes."""
        listener.setblocking(False)
        self._listeners.append(listener)

        def accept(events: int) -> None:
            with contextlib.suppress(
                OSError
            ):  # Gone again, or no descriptors are left: others are served all the same.
                accepted(FramedSocket(listener.accept()[0], limit))

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def remove(self, connection: FramedSocket) -> None:
        """Close a connection."""
        if self._handlers.pop(connection, None):
            connection.flush()
            self._selector.unregister(connection)
            connection.close()

    def stop(self, wait: bool = True) -> None:
        """Send what can be sent, close everything and end; from any thread."""
        if self._thread.ident is None:
            self._close()
        self.call(self._stop)
        if wait and threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(1.0)

    def forget(self) -> None:
        """Close all descriptors, and nothing else: what a fork has copied into a child process."""
        for connection in self._handlers:
            connection.close()
        for held in (*self._listeners, self._bell, self._clapper):
            held.close()
        self._selector.close()
        self._handlers.clear()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        finally:  # Also after an error of ours: then the connections' ends tell everybody.
            self._close()

    def _turn(self) -> None:
        due = self._later[0][0] - self._clock() if self._later else None
        for key, events in self._selector.select(None if due is None else max(0.0, due)):
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
            return  # Removed by what came before in the same turn.
        connection.flush()
        for message in connection.receive() if events & selectors.EVENT_READ else ():
            if connection in self._handlers:  # A message may make it change hands, or be the last.
                self._handlers[connection][0](connection, message)
        if connection.ended is not None and connection in self._handlers:
            closed = self._handlers[connection][1]
            self.remove(connection)
            closed(connection)

    def _ring(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def _stop(self) -> None:
        self._stopped = True

    def _close(self) -> None:
        for connection in tuple(self._handlers):
            self.remove(connection)
        self.forget()


def _forget_in_children(loop: EventLoop) -> None:
    """A forked child's copies of our sockets would keep them open, and so hide this process's death: it closes them."""
    reference = weakref.ref(loop)

    def forget() -> None:
        held = reference()
        if held is not None:
            held.forget()

    os.register_at_fork(after_in_child=forget)
