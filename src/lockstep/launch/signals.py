"""Signals as events: a pipe that tells which signals have come, and those that a job's processes forward."""

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType

from lockstep._errors import MAX_WAIT_SECONDS

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SignalPipe:
    """Queues signals from now until ``close``, without another effect. One that the process was started to ignore (``nohup``) stays ignored."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, _do_nothing) for number in handled}
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wait(self, seconds: float | None, files: Iterable[int] = ()) -> tuple[list[int], set[int]]:
        """Wait for signals.

        Args:
            seconds: limit of the wait, which ends after 25 days at the latest; None: no limit.
            files: descriptors that end the wait, too, when they are readable or their other end is closed.

        Returns:
            The numbers of the signals, in their order, and the files that are ready.
        """
        poll = select.poll()
        for file in (self._reader, *files):
            poll.register(file, select.POLLIN)
        limit = None if seconds is None else min(max(0.0, seconds), MAX_WAIT_SECONDS) * 1000
        ready = {file for file, _ in poll.poll(limit)}
        return self._read(), ready - {self._reader}

    def post(self, number: int) -> None:
        """Have ``wait`` return this number, too; for other threads of this process."""
        os.write(self._writer, bytes([number]))

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> list[int]:
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python's own handler has already written the number to the pipe."""
