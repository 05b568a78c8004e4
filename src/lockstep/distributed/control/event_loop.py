"""Event loop: one thread that serves connections, timers and calls of other threads. Only that thread touches its state."""

import contextlib
import errno
import functools
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

from lockstep.distributed.control.transport import FramedSocket

Received = Callable[[FramedSocket, dict[str, Any]], None]
Closed = Callable[[FramedSocket], None]
Work = Callable[[], None]

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.5


class EventLoop:
    """A daemon thread that serves connections, runs calls of other threads, and runs timers.

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

    def stop(self, wait: bool = True) -> None:
        """Send what can be sent, close everything and end the thread; may be called from any thread."""
        if self._thread.ident is None:
            self._close()
        self.call(self._stop)
        if wait and threading.current_thread() is not self._thread and self._thread.is_alive():
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
