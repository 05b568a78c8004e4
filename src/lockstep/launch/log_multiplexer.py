"""What workers print, on its way to the terminal and to their log files. All of it is bytes: a worker may print anything."""

import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from lockstep.launch.process_names import ProcessName

__all__ = ["LineSplitter", "LogPump", "TerminalWriter"]

_CHUNK = 65536
_LONGEST_LINE = 65536  # bytes; a longer one is shown in pieces
_PAUSE_SECONDS = 1.0  # After this, the beginning of a line is shown without its end.
_LAST_LINES = 30
_COLOURS = (36, 33, 32, 35, 34, 31)


class TerminalWriter:
    """A stream that each line is written to in one piece, so that lines of several workers never mix.

    Args:
        stream: unbuffered.
        on_gone: is called once when nobody reads the stream any more; from then on nothing is written.
        colours: whether names of workers are coloured where the stream is a terminal.
    """

    def __init__(self, stream: io.RawIOBase, on_gone: Callable[[], None], colours: bool = True) -> None:
        self._stream = stream
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._is_gone = False
        self._is_coloured = colours and stream.isatty()

    def prefix(self, task: ProcessName) -> bytes:
        """What stands before each line of a process."""
        name, colour = f"[{task.name}]", _COLOURS[task.colour % len(_COLOURS)]
        return (f"\033[{colour}m{name}\033[0m " if self._is_coloured else f"{name} ").encode()

    def write(self, data: bytes) -> None:
        """Write all of it, however long that takes."""
        with self._lock:
            if self._is_gone:
                return
            try:
                self._write(memoryview(data))
            except OSError:
                self._is_gone = True
                self._on_gone()

    def _write(self, data: memoryview) -> None:
        while data:
            written = self._stream.write(data)
            if written is None:  # Somebody has made the stream a non-blocking one, and it is full.
                select.select([], [self._stream], [])
            else:
                data = data[written:]


class LineSplitter:
    r"""Cuts a stream of bytes into the lines that a terminal would show.

    Example:
        >>> lines = LineSplitter()
        >>> lines.feed(b"one\ntwo: 10%\rtwo: 20%\nthr"), lines.rest()
        ([b'one', b'two: 20%'], [b'thr'])
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_unfinished(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in what has come."""
        *lines, rest = (self._rest + data).split(b"\n")
        *pieces, self._rest = _pieces(rest)
        return [_shown(piece) for line in lines for piece in _pieces(line)] + [_shown(piece) for piece in pieces]

    def rest(self) -> list[bytes]:
        """What there is of a line that has not ended; it counts as one then."""
        rest, self._rest = self._rest, b""
        shown = _shown(rest)
        return [shown] if shown else []


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + _LONGEST_LINE] for start in range(0, len(line) or 1, _LONGEST_LINE)]


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a progress bar, which overwrites itself."""
    return line.rstrip(b"\r\b").rpartition(b"\r")[2].lstrip(b"\b")


class LogPump:
    """A thread that carries what one worker prints.

    Args:
        source: read end of the worker's pipe; it is closed at its end.
        log: takes every byte as it comes; None: nothing is logged.
        show: takes each line; None: nothing is shown.
    """

    def __init__(self, source: int, log: io.RawIOBase | None, show: Callable[[bytes], None] | None) -> None:
        self._source = source
        self._log = log
        self._show = show
        self._lines = LineSplitter()
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.log_error: OSError | None = None  # Why the log is not complete.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def last_lines(self) -> str:
        """The end of the output, for a report."""
        return "".join(line.decode(errors="replace") + "\n" for line in list(self._last))

    def join(self, seconds: float) -> None:
        """Wait until the worker's pipe has ended and all is written, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        flush_at = None  # When to show a line that has begun and does not end.
        while True:
            if flush_at is not None and not _comes(self._source, flush_at - time.monotonic()):
                self._take(self._lines.rest())
                flush_at = None
                continue
            data = os.read(self._source, _CHUNK)
            if not data:
                break
            self._write_log(data)
            self._take(self._lines.feed(data))
            if not self._lines.is_unfinished:
                flush_at = None
            elif flush_at is None:
                flush_at = time.monotonic() + _PAUSE_SECONDS
        self._finish()

    def _finish(self) -> None:
        self._take(self._lines.rest())
        os.close(self._source)
        if self._log is not None:
            self._log.close()

    def _take(self, lines: list[bytes]) -> None:
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


def _comes(source: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
