"""Signals of this process as something to wait for, together with deadlines and with files."""

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType

__all__ = ["SignalPipe"]


class SignalPipe:
    """From here to ``close``, these signals only wait to be read.

    Args:
        numbers: the signals. One that this process was started to ignore, as ``nohup`` does, stays ignored.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, _note) for number in taken}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wait(self, seconds: float | None, files: Iterable[int] = ()) -> tuple[list[int], set[int]]:
        """Wait for signals.

        Args:
            seconds: limit of the wait; None: there is none.
            files: that end the wait, too, when there is something to read or their other end is closed.

        Returns:
            The numbers of the signals, in their order, and the files that are ready.
        """
        poll = select.poll()
        for file in (self._reader, *files):
            poll.register(file, select.POLLIN)
        ready = {file for file, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)}
        return self._read(), ready - {self._reader}

    def post(self, number: int) -> None:
        """Have ``wait`` return this number, too; for other threads of this process."""
        os.write(self._writer, bytes([number]))

    def close(self) -> None:
        """Let signals do again what they did before."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> list[int]:
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []


def _note(number: int, frame: FrameType | None) -> None:
    """Python's own handler has written the number to the pipe already."""
