"""Forwarding of the workers' output to the terminal and to log files. It is bytes throughout: a worker may print anything."""

import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from lockstep.launch.rank_assignment import ProcessName

_CHUNK = 65536
_MAX_LINE_BYTES = 65536  # A longer one is shown in chunks
_PARTIAL_LINE_SECONDS = 1.0  # After this, the beginning of a line is shown without its end.
_LAST_LINES = 30
_MAX_CLOSE_SECONDS = 60.0  # For a reader that is slow.
_ROOM = 2**22  # bytes; more than the longest failure report
_COLOURS = (36, 33, 32, 35, 34, 31)


class TerminalWriter:
    """Writes each line to a stream as a whole, so that lines of several workers do not mix.

    A thread of its own writes, so that a stream that is not read holds up only those that wait for room in its queue.

    Args:
        stream: unbuffered.
        on_closed: is called once when the reader of the stream is gone; from then on nothing is written.
        colours: whether names of workers are coloured if the stream is a terminal.
        room: bytes that may be queued.

    Attributes:
        error: why nothing is written any more, if the reader of the stream is not gone: its disk is full, for example.
    """

    def __init__(
        self, stream: io.RawIOBase, on_closed: Callable[[], None], colours: bool = True, room: int = _ROOM
    ) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self._room = room
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._unwritten = 0  # Bytes that are queued or being written.
        self._written = 0
        self._is_closed = False
        self._is_coloured = colours and stream.isatty()
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    def prefix(self, process: ProcessName) -> bytes:
        """Return the prefix of each line of a process."""
        name, colour = f"[{process.name}]", _COLOURS[process.colour % len(_COLOURS)]
        return (f"\033[{colour}m{name}\033[0m " if self._is_coloured else f"{name} ").encode()

    def write(self, data: bytes, waits: bool = True) -> bool:
        """Queue data, and return whether they are accepted; nothing is after the end of the stream or :meth:`close`.

        Args:
            data: one or several lines.
            waits: whether to wait for room as long as it takes; else the data are dropped if there is none.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._is_closed or self._has_room_for(data))
            if self._is_closed or not self._has_room_for(data):
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-terminal", daemon=True)
                self._thread.start()
            self._queue.append(data)
            self._unwritten += len(data)
            self._changed.notify_all()
            return True

    def flush(self, seconds: float) -> bool:
        """Wait until all is written or the reader is gone, at most ``seconds``; return whether nothing is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, seconds)

    def close(self, seconds: float) -> int:
        """Write nothing from now on but what is queued, as long as the reader takes some of it each ``seconds``, a minute at most.

        Returns:
            The number of bytes that are lost.
        """
        until = time.monotonic() + _MAX_CLOSE_SECONDS
        with self._changed:
            while self._unwritten and self._progresses(min(seconds, until - time.monotonic())):
                pass
            self._is_closed = True
            self._changed.notify_all()
            return self._unwritten

    def _progresses(self, seconds: float) -> bool:
        before = self._written
        return self._changed.wait_for(lambda: not self._unwritten or self._written > before, seconds)

    def _has_room_for(self, data: bytes) -> bool:
        return not self._unwritten or self._unwritten + len(data) <= self._room

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(memoryview(data))
            except OSError as error:
                self._end(error)
                return
            with self._changed:
                self._unwritten -= len(data)
                self._written += len(data)
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            return None if self._is_closed else self._queue.popleft()

    def _end(self, error: OSError) -> None:
        """Note that the stream takes nothing more. ``on_closed`` is not called after :meth:`close`."""
        with self._changed:
            if not isinstance(error, BrokenPipeError):  # A full disk must not stop the workers.
                self.error = error
            elif not self._is_closed:
                self._on_closed()
            self._is_closed, self._unwritten = True, 0
            self._changed.notify_all()

    def _write(self, data: memoryview) -> None:
        while data:
            written = self._stream.write(data)
            if written is None:  # The stream is full, and another process has made it non-blocking.
                select.select([], [self._stream], [])
            else:
                data = data[written:]


class LineSplitter:
    r"""Splits a stream of bytes into the lines that a terminal would show.

    Example:
        >>> lines = LineSplitter()
        >>> lines.feed(b"one\ntwo: 10%\rtwo: 20%\nthr"), lines.flush()
        ([b'one', b'two: 20%'], [b'thr'])
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_unfinished(self) -> bool:
        """Whether there is the beginning of a line without its end."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Add data, and return the lines that it completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        *full, self._rest = _chunks(rest)
        return [_visible(chunk) for line in lines for chunk in _chunks(line)] + [_visible(chunk) for chunk in full]

    def flush(self) -> list[bytes]:
        """Remove the unfinished line and return it as a line, if there is one."""
        rest, self._rest = self._rest, b""
        visible = _visible(rest)
        return [visible] if visible else []


def _chunks(line: bytes) -> list[bytes]:
    chunks = []
    while len(line) > _MAX_LINE_BYTES:
        end = _end_of_chunk(line)
        chunks.append(line[:end])
        line = line[end:]
    return [*chunks, line]


def _end_of_chunk(line: bytes) -> int:
    """Return where to cut a long line: after a carriage return, else before a character of UTF-8."""
    end = line.rfind(b"\r", 0, _MAX_LINE_BYTES) + 1
    if end:
        return end
    starts = (end for end in range(_MAX_LINE_BYTES, _MAX_LINE_BYTES - 4, -1) if line[end] & 0xC0 != 0x80)
    return next(starts, _MAX_LINE_BYTES)


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows in the end of a line that overwrites itself, such as a progress bar."""
    return line.rstrip(b"\r\b").rpartition(b"\r")[2].lstrip(b"\b")


class LogPump:
    """Thread that forwards the output of a worker, and closes ``source`` at its end.

    ``log`` gets each byte at once, ``show`` each line; None: nothing does.
    """

    def __init__(self, source: int, log: io.RawIOBase | None, show: Callable[[bytes], object] | None) -> None:
        self._source = source
        self._log = log
        self._show = show
        self._lines = LineSplitter()
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.log_error: OSError | None = None  # Why the log is incomplete.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def last_lines(self) -> str:
        """The end of the output, for a report."""
        return "".join(line.decode(errors="replace") + "\n" for line in list(self._last))

    def join(self, seconds: float) -> None:
        """Wait until the worker's pipe is closed and all is written, at most ``seconds``."""
        self._thread.join(seconds)

    def _run(self) -> None:
        flush_at = None  # When to show an unfinished line.
        while True:
            if flush_at is not None and not _is_readable(self._source, flush_at - time.monotonic()):
                self._emit(self._lines.flush())
                flush_at = None
                continue
            data = os.read(self._source, _CHUNK)
            if not data:
                break
            self._write_log(data)
            self._emit(self._lines.feed(data))
            if not self._lines.is_unfinished:
                flush_at = None
            elif flush_at is None:
                flush_at = time.monotonic() + _PARTIAL_LINE_SECONDS
        self._finish()

    def _finish(self) -> None:
        self._emit(self._lines.flush())
        os.close(self._source)
        if self._log is not None:
            self._log.close()

    def _emit(self, lines: list[bytes]) -> None:
        for line in lines:
            self._last.append(line)
            if self._show is not None:
                self._show(line)

    def _write_log(self, data: bytes) -> None:
        if self._log is None or self.log_error is not None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # A full disk must not stop the worker.
            self.log_error = error


def _is_readable(source: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
