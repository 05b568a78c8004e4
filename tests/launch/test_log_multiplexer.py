"""Output of workers arrives complete, for any bytes."""

import io
import os
import threading
import time

import pytest

from lockstep.launch import log_multiplexer
from lockstep.launch.log_multiplexer import LineSplitter, LogPump, TerminalWriter
from lockstep.launch.rank_assignment import ProcessName
from tests.launch.launching import program, run, started


@pytest.mark.slow
def test_bytes_of_any_kind_arrive_as_they_are(tmp_path):
    """Invalid UTF-8, escape sequences, and no newline at the end."""
    path = program(tmp_path, r"sys.stdout.buffer.write(b'\xff\x00\x1b[1m \xc3\xa4\n\ntail')")
    done = run(path, "--log-dir", "ignored: it is the program's")
    assert done.stdout == "[worker 0] \ufffd\x00\x1b[1m ä\n[worker 0] \n[worker 0] tail\n"
    logged = run("--log-dir", tmp_path / "logs", path)
    assert (logged.stdout, logged.returncode) == ("", 0)
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == b"\xff\x00\x1b[1m \xc3\xa4\n\ntail"


@pytest.mark.slow
def test_lines_of_several_workers_never_mix(tmp_path):
    done = run("-n", 3, program(tmp_path, "for _ in range(300): print(str(rank) * 3000)"))
    lines = done.stdout.splitlines()
    assert len(lines) == 900
    assert all(line == f"[worker {line[8]}] {line[8] * 3000}" for line in lines)


def test_long_lines_are_shown_in_pieces_and_logged_whole(tmp_path):
    done = run("--log-dir", tmp_path / "logs", "--tee", program(tmp_path, "print('x' * 1_000_000)"))
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == b"x" * 1_000_000 + b"\n"
    lines = done.stdout.splitlines()
    assert "".join(line.removeprefix("[worker 0] ") for line in lines) == "x" * 1_000_000
    assert max(map(len, lines)) < 70_000


@pytest.mark.slow
def test_the_beginning_of_a_line_is_shown_when_its_end_does_not_come(tmp_path):
    code = "print('waiting …', end='', flush=True); wait_for(lambda: is_there('go')); print(' done')"
    with started(program(tmp_path, code)) as supervisor:
        assert supervisor.stdout.readline() == "[worker 0] waiting …\n"
        (tmp_path / "go").touch()
        assert supervisor.stdout.readline() == "[worker 0]  done\n"


def test_lines_arrive_while_the_program_runs(tmp_path):
    with started(program(tmp_path, "print('first'); wait_for(lambda: is_there('seen'))")) as supervisor:
        assert supervisor.stdout.readline() == "[worker 0] first\n"
        (tmp_path / "seen").touch()
        assert supervisor.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("fed", "lines", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], []),
        ([b"a", b"b\nc"], [b"ab"], [b"c"]),
        ([b"a\r\nb\r\n"], [b"a", b"b"], []),
        ([b"10%\r20%\r", b"30%\n"], [b"30%"], []),
        ([b"10%\r20%\r"], [], [b"20%"]),
        ([b"1/9\b\b\b\r2/9\b\b\b\r"], [], [b"2/9"]),
        ([b"\n\r\n"], [b"", b""], []),
        ([b"x" * 70_000], [b"x" * 65_536], [b"x" * 4_464]),
        (["é".encode() * 35_000], ["é".encode() * 32_768], ["é".encode() * 2_232]),
        ([b"x" + "é".encode() * 35_000], [b"x" + "é".encode() * 32_767], ["é".encode() * 2_233]),
        ([b"1%".ljust(40_000) + b"\r" + b"2%".ljust(40_000)], [b"1%".ljust(40_000)], [b"2%".ljust(40_000)]),
        ([b"\xa9" * 70_000], [b"\xa9" * 65_536], [b"\xa9" * 4_464]),
    ],
)
def test_lines_are_those_that_a_terminal_would_show(fed, lines, rest):
    splitter = LineSplitter()
    assert [line for data in fed for line in splitter.feed(data)] == lines
    assert splitter.flush() == rest
    assert splitter.flush() == []


class Stream(io.RawIOBase):
    """Accepts a few bytes at a time, as a pipe may; fails after ``room`` bytes."""

    def __init__(self, is_terminal=False, room=10**6):
        self.taken, self.room, self._is_terminal = b"", room, is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, data):
        if len(self.taken) >= self.room:
            raise BrokenPipeError
        self.taken += bytes(data[:3])
        return len(data[:3])


@pytest.mark.parametrize(
    ("is_terminal", "colours", "prefix"),
    [(False, True, b"[worker 1] "), (True, False, b"[worker 1] "), (True, True, b"\033[33m[worker 1]\033[0m ")],
)
def test_colours_are_for_terminals(is_terminal, colours, prefix):
    assert TerminalWriter(Stream(is_terminal), lambda: None, colours).prefix(ProcessName("worker", 1)) == prefix


def test_a_terminal_writes_all_and_says_once_that_its_reader_is_gone():
    gone = []
    stream = Stream(room=7)
    terminal = TerminalWriter(stream, lambda: gone.append(1))
    for _ in range(3):
        terminal.write(b"1234")
    assert terminal.flush(20)
    assert stream.taken == b"1234123"
    assert gone == [1]


@pytest.fixture
def unread():
    """The two ends of a full pipe."""
    reader, end = os.pipe()
    os.set_blocking(end, False)
    with open(reader, "rb", buffering=0) as source, open(end, "wb", buffering=0) as stream:
        while stream.write(b"x" * 4096):
            pass
        os.set_blocking(end, True)
        yield source, stream


def test_a_full_terminal_drops_messages_and_holds_only_those_who_write_lines(unread):
    source, stream = unread
    terminal = TerminalWriter(stream, lambda: None, room=10)
    assert terminal.write(b"12345", waits=False)
    assert terminal.write(b"6789", waits=False)
    assert not terminal.write(b"too long", waits=False)
    held = threading.Thread(target=terminal.write, args=(b"a line\n",), daemon=True)
    held.start()
    assert not terminal.flush(0.1)
    assert held.is_alive()
    found = source.read(2**20)
    held.join(20)
    assert terminal.flush(20)
    assert (found + source.read(2**20)).endswith(b"x123456789a line\n")
    assert terminal.close(20) == 0


def test_a_closed_terminal_holds_nobody_and_says_how_much_was_lost(unread):
    source, stream = unread
    terminal = TerminalWriter(stream, lambda: None, room=10)
    assert terminal.write(b"12345")
    held = threading.Thread(target=terminal.write, args=(b"678901",), daemon=True)
    held.start()
    assert terminal.close(0.1) == 5
    held.join(20)
    assert not held.is_alive()
    assert not terminal.write(b"late")
    source.read(2**20)


class SlowStream(Stream):
    """Takes each line after some time, as a slow connection does."""

    def write(self, data):
        time.sleep(0.04)
        self.taken += bytes(data)
        return len(data)


def test_a_closed_terminal_waits_for_a_slow_reader_as_long_as_it_reads():
    stream, lines = SlowStream(), [b"%d\n" % number for number in range(40)]
    terminal = TerminalWriter(stream, lambda: None)
    for line in lines:
        terminal.write(line)
    assert terminal.close(1.0) == 0
    assert stream.taken == b"".join(lines)


def test_a_closed_terminal_does_not_wait_forever_for_a_slow_reader(monkeypatch):
    monkeypatch.setattr(log_multiplexer, "_MAX_CLOSE_SECONDS", 0.2)
    stream = SlowStream()
    terminal = TerminalWriter(stream, lambda: None)
    for _ in range(1000):
        terminal.write(b"line\n")
    assert 0 < terminal.close(20) < 5000
    assert 0 < len(stream.taken) < 5000


def test_a_full_disk_does_not_stop_a_worker():
    shown = []
    with open("/dev/full", "ab", buffering=0) as log:
        reader, writer = os.pipe()
        pump = LogPump(reader, log, shown.append)
        os.write(writer, b"one\n")
        os.write(writer, b"two\n")
        os.close(writer)
        pump.join(20)
    assert shown == [b"one", b"two"]
    assert pump.last_lines == "one\ntwo\n"
    assert isinstance(pump.log_error, OSError)


def test_a_pump_takes_all_that_many_threads_write():
    shown = []
    reader, writer = os.pipe()
    pump = LogPump(reader, None, shown.append)
    threads = [threading.Thread(target=os.write, args=(writer, b"x" * 500 + b"\n")) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    os.close(writer)
    pump.join(20)
    assert shown == [b"x" * 500] * 50


def test_log_files_are_named_after_workers_and_tee_shows_them_too(tmp_path):
    path = program(tmp_path, "print('from', rank)")
    done = run("-n", 2, "--log-dir", tmp_path / "a" / "b", "--tee", path)
    assert sorted(done.stdout.splitlines()) == ["[worker 0] from 0", "[worker 1] from 1"]
    assert [(tmp_path / "a" / "b" / f"worker-{rank}.log").read_text() for rank in range(2)] == ["from 0\n", "from 1\n"]
    assert f"the output of the workers goes to {tmp_path}/a/b/*.log" in done.stderr


def test_the_last_lines_of_a_worker_without_a_traceback_are_shown_also_from_its_log(tmp_path):
    done = run("--log-dir", tmp_path / "logs", program(tmp_path, "for n in range(99): print('line', n)\nsys.exit(3)"))
    assert done.stderr.endswith("Its last lines:\n\n" + "".join(f"line {number}\n" for number in range(69, 99)))
