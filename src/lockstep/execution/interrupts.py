"""Ctrl-C in ``fit``, ``evaluate`` and ``predict``: while a step holds the only copy of the model's values, it is deferred until the step has
returned the new ones.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from lockstep.execution.spmd import is_donated


class InterruptGuard:
    """Defers SIGINT within the ``with`` statement of :meth:`running`, once: the next one is handled at once.

    Attributes:
        is_installed: whether SIGINT may be deferred now.
    """

    def __init__(self) -> None:
        self.is_installed = False
        self._state: Any = None  # that the running step was given
        self._deferred: Callable[[], Any] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT while this context is open, in the main thread, if Python handles it; its handler is called as before, but later."""
        before = signal.getsignal(signal.SIGINT)
        if not callable(before) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self._deferred or self._state is None or not is_donated(self._state):
                before(number, frame)
            else:
                self._deferred = lambda: before(number, frame)

        signal.signal(signal.SIGINT, handle)
        outer, self.is_installed = self.is_installed, True
        try:
            yield
        finally:
            self.is_installed = outer
            if signal.getsignal(signal.SIGINT) is handle:
                signal.signal(signal.SIGINT, before)

    def running(self, state: Any) -> "InterruptGuard":
        """Return the context in which a step runs that may take the arrays of ``state``; what was deferred is handled at its end."""
        self._state = state
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = None
        deferred, self._deferred = self._deferred, None
        if deferred and error is None:
            deferred()
