"""Every end of a run, by exit, signal, timeout or SIGKILL: it takes limited time and leaves no process."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launching import COMMAND, environment, program, run, send, started, text_of, wait_for_message
from tests.support.marks import diagonal_first
from tests.support.waiting import has_ended, wait_until

pytestmark = pytest.mark.waits

TWO_GENERATIONS = """
own = rank + 1
grandchild = [sys.executable, "-c", "import time; time.sleep(100)"]
write(f"{rank}.child", str(subprocess.Popen(grandchild).pid))
write(f"{rank}.session", str(subprocess.Popen(grandchild, start_new_session=True).pid))
daemon = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=2).pid)"
write(f"{rank}.daemon", subprocess.run([sys.executable, "-c", daemon, *grandchild], stdout=-1, text=True).stdout.strip())
write(f"{rank}.worker", str(os.getpid()))
"""
KINDS = ("child", "session", "daemon", "worker")


def processes_of(folder, workers):
    return [int(text_of(folder / f"{rank}.{kind}")) for rank in range(workers) for kind in KINDS]


@pytest.mark.parametrize("last", ["time.sleep(100)", "import ctypes; ctypes.PyDLL(None).sleep(100)"])
def test_a_killed_supervisor_leaves_no_process(tmp_path, last):
    """Also not of a program that holds the GIL forever, and not a process in its own session."""
    with started("-n", 2, program(tmp_path, TWO_GENERATIONS + last)) as supervisor:
        processes = processes_of(tmp_path, 2)
        assert not any(has_ended(process) for process in processes)
        supervisor.kill()
        wait_until(lambda: all(has_ended(process) for process in processes), "the end of all processes")


def test_a_stopped_worker_of_a_killed_supervisor_ends_too(tmp_path):
    with started(program(tmp_path, TWO_GENERATIONS + "os.kill(os.getpid(), signal.SIGSTOP)")) as supervisor:
        processes = processes_of(tmp_path, 1)
        supervisor.kill()
        wait_until(lambda: all(has_ended(process) for process in processes), "the end of all processes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("os.kill(os.getpid(), 40)", 168, id="a signal without a name"),
        ("raise ValueError", 13),
        pytest.param("raise ValueError('caf' + chr(0xDCE9))", 13, id="a byte that is no text"),
    ],
)
def test_what_a_worker_leaves_behind_ends_with_it(tmp_path, last, code):
    done = run(program(tmp_path, TWO_GENERATIONS + last))
    assert done.returncode == code
    assert all(has_ended(process) for process in processes_of(tmp_path, 1))


@pytest.mark.slow
def test_a_killed_reaper_leaves_no_process(tmp_path):
    code = TWO_GENERATIONS + "write(f'{rank}.reaper', str(os.getppid()))\ntime.sleep(100)"
    with started("-n", 2, program(tmp_path, code)) as supervisor:
        processes = processes_of(tmp_path, 2)
        send(text_of(tmp_path / "1.reaper"), signal.SIGKILL)
        assert supervisor.wait(timeout=60) == 137
        assert all(has_ended(process) for process in processes)


@pytest.mark.slow
def test_a_stopped_reaper_does_not_keep_a_run_from_ending(tmp_path):
    code = (
        TWO_GENERATIONS + "write('0.reaper', str(os.getppid())); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(100)"
    )
    with started("--grace", "0.1", program(tmp_path, code)) as supervisor:
        processes = [*processes_of(tmp_path, 1), int(text_of(tmp_path / "0.reaper"))]
        supervisor.terminate()
        assert supervisor.wait(timeout=60) == 143
        assert all(has_ended(process) for process in processes)


def test_a_worker_ends_also_where_both_above_it_are_killed(tmp_path):
    code = "write('reaper', str(os.getppid())); write('worker', str(os.getpid())); time.sleep(100)"
    with started(program(tmp_path, code)) as supervisor:
        worker, reaper = text_of(tmp_path / "worker"), text_of(tmp_path / "reaper")
        supervisor.send_signal(signal.SIGSTOP)  # So that it cannot see the exit of the reaper.
        send(reaper, signal.SIGKILL)
        wait_until(lambda: has_ended(worker), "the end of the worker")


def test_what_ends_by_itself_right_after_a_worker_may_do_so(tmp_path):
    """Python's resource tracker removes the shared memory of a program that has exited."""
    code = "from multiprocessing.shared_memory import SharedMemory; memory = SharedMemory(create=True, size=1)\n"
    code += "write('memory', memory.name); memory.close()"
    done = run(program(tmp_path, code))
    assert done.returncode == 0
    assert "leaked shared_memory" in done.stdout
    assert not os.path.exists(f"/dev/shm/{text_of(tmp_path / 'memory')}")


COUNTING = """
seen = []
signal.signal({number}, lambda *_: seen.append(1))
write(f"ready{{rank}}")
wait_for(lambda: seen)
time.sleep(0.2)
print("seen", len(seen))
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "end", "code"),
    diagonal_first(
        [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        [("", 0), ("sys.exit(75 if rank else 0)", 75), ("sys.exit(1)", None)],
    ),
)
def test_a_signal_to_the_supervisor_reaches_each_worker_once(tmp_path, number, end, code):
    with started("-n", 2, program(tmp_path, COUNTING.format(number=int(number), end=end))) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(number)
        printed, messages = supervisor.communicate(timeout=60)
    assert sorted(printed.splitlines()) == ["[worker 0] seen 1", "[worker 1] seen 1"]
    assert supervisor.returncode == (128 + number if code is None else code)
    assert f"{number.name}: the workers have 30 s to exit" in messages
    assert "Traceback" not in messages


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_are_handed_on_and_end_nothing(tmp_path, number):
    with started("-n", 2, program(tmp_path, COUNTING.format(number=int(number), end=""))) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(number)
        printed, _ = supervisor.communicate(timeout=60)
    assert sorted(printed.splitlines()) == ["[worker 0] seen 1", "[worker 1] seen 1"]
    assert supervisor.returncode == 0


def test_usr2_shows_where_each_program_is(tmp_path):
    code = "def wait_here():\n    write(f'ready{rank}'); wait_for(lambda: is_there('go'))\nwait_here()"
    with started("-n", 2, program(tmp_path, code)) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(signal.SIGUSR2)
        shown = ""
        while shown.count("in wait_here") < 2:
            shown += supervisor.stdout.readline()
        (tmp_path / "go").touch()
        assert supervisor.wait(timeout=60) == 0
    assert all(f"[worker {rank}]   File" in shown for rank in range(2))


def test_a_signal_that_comes_too_early_kills_nobody(tmp_path):
    with started("-n", 2, program(tmp_path, "write(f'ready{rank}'); wait_for(lambda: is_there('go'))")) as supervisor:
        assert "2 workers on this machine" in supervisor.stderr.readline()
        while not ((tmp_path / "ready0").exists() and (tmp_path / "ready1").exists()):
            assert supervisor.poll() is None
            supervisor.send_signal(signal.SIGUSR2)
            time.sleep(0.002)
        (tmp_path / "go").touch()
        assert supervisor.wait(timeout=60) == 0


def test_ctrl_c_ends_programs_as_python_ends_them(tmp_path):
    with started("-n", 2, program(tmp_path, "write(f'ready{rank}'); time.sleep(100)")) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(signal.SIGINT)
        printed, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 130
    assert printed.count("KeyboardInterrupt") == 2
    assert "lockstep" not in printed


IGNORING = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
IGNORING += TWO_GENERATIONS + "time.sleep(100)"


@pytest.mark.slow
def test_who_does_not_end_in_time_is_killed(tmp_path):
    with started("-n", 2, "--grace", "0.3", program(tmp_path, IGNORING)) as supervisor:
        processes = processes_of(tmp_path, 2)
        supervisor.terminate()
        assert supervisor.wait(timeout=60) == 143
        assert all(has_ended(process) for process in processes)
        messages = supervisor.stderr.read()
    assert "workers 0, 1 did not exit within 0.3 s: killed." in messages
    assert messages.count("killed") == 1


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with started("-n", 2, "--grace", "1000", program(tmp_path, IGNORING)) as supervisor:
        processes = processes_of(tmp_path, 2)
        supervisor.send_signal(signal.SIGINT)
        wait_for_message(supervisor, "again kills them at once")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(timeout=60) == 130
        assert all(has_ended(process) for process in processes)


@pytest.mark.slow
def test_ctrl_c_kills_who_does_not_end_after_a_failure(tmp_path):
    code = "if rank == 1: wait_for(lambda: is_there('0.worker')); sys.exit(5)\n" + IGNORING
    with started("-n", 2, "--grace", "1000", program(tmp_path, code)) as supervisor:
        wait_for_message(supervisor, "the other processes have 1000 s to exit")
        supervisor.send_signal(signal.SIGINT)
        wait_for_message(supervisor, "SIGINT: the workers are ending; again kills them at once.")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(timeout=60) == 5


@pytest.mark.slow
def test_ctrl_c_that_also_ends_the_reader_leaves_the_time_to_save(tmp_path):
    """As with ``| tee``: the reader is gone before the signal comes."""
    code = "def save(*_):\n    time.sleep(0.5); write('saved'); os._exit(75)\n"
    code += "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
    code += "while True: print('line'); time.sleep(0.01)"
    with started(program(tmp_path, code)) as supervisor:
        supervisor.stdout.readline()
        supervisor.stdout.close()
        supervisor.stdout = None
        wait_for_message(supervisor, "SIGPIPE: the workers have 30 s to exit.")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(timeout=60) == 75
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "before", ["signal(SIGCHLD, SIG_IGN)", "pthread_sigmask(SIG_BLOCK, [SIGCHLD])"], ids=["ignored", "blocked"]
)
def test_a_parent_that_does_without_sigchld_changes_nothing(tmp_path, before):
    begin = f"import os, sys; from signal import *; {before}; os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", begin, *COMMAND, program(tmp_path, "print('done')")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stdout) == (0, "[worker 0] done\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "says"),
    [(">&-", ""), ("2>&-", ""), ("> /dev/full", "the output cannot be written ([Errno 28] No space left on device)")],
)
def test_output_that_cannot_be_written_stops_nothing(tmp_path, where, says):
    path = program(tmp_path, "print('line'); time.sleep(0.2); print('line'); write('done')")
    command = f"exec {sys.executable} -m lockstep.cli run {path} {where}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr
    assert says in done.stderr
    assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_nohup_is_respected(tmp_path):
    with started(program(tmp_path, COUNTING.format(number=int(signal.SIGUSR1), end="")), before=("nohup",)) as process:
        text_of(tmp_path / "ready0")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == "[worker 0] seen 1\n"


@pytest.mark.slow
def test_a_run_has_a_limit_and_shows_where_it_was(tmp_path):
    code = "def too_long():\n    time.sleep(100)\nif rank == 1: too_long()"
    done = run("-n", 2, "--timeout", "1.5", program(tmp_path, code))
    assert done.returncode == 124
    assert "the run takes longer than --timeout allows" in done.stderr
    assert "[worker 1]   File" in done.stdout
    assert "in too_long" in done.stdout


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    """As with ``| head``."""
    with started(
        "-n", 2, program(tmp_path, TWO_GENERATIONS + "while True: print('line'); time.sleep(0.01)")
    ) as supervisor:
        processes = processes_of(tmp_path, 2)
        supervisor.stdout.readline()
        supervisor.stdout.close()
        supervisor.stdout = None
        assert supervisor.wait(timeout=60) == 141
        assert all(has_ended(process) for process in processes)


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_nothing_up(tmp_path):
    reader, writer = os.pipe()
    code = TWO_GENERATIONS + "while True: print('x' * 1000)"
    with started("-n", 2, program(tmp_path, code), output=writer) as supervisor:
        os.close(writer)
        processes = processes_of(tmp_path, 2)
        supervisor.terminate()
        assert supervisor.wait(timeout=60) == 143
        assert all(has_ended(process) for process in processes)
    os.close(reader)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "signals", "code"),
    [
        ((), (signal.SIGTERM,), 143),
        ((), (signal.SIGINT, signal.SIGINT), 130),
        (("--timeout", "2"), (), 124),
    ],
)
def test_a_run_whose_output_and_messages_nobody_reads_can_be_ended(options, signals, code, tmp_path):
    """Both go to one full pipe, as with ``2>&1 | reader`` whose reader is stopped."""
    reader, writer = os.pipe()
    code_of_workers = TWO_GENERATIONS + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: print('x' * 1000)"
    command = [*COMMAND, "-n", "2", *options, program(tmp_path, code_of_workers)]
    supervisor = subprocess.Popen(command, stdout=writer, stderr=writer, env=environment())
    try:
        processes = processes_of(tmp_path, 2)
        wait_until(lambda: not select.select([], [writer], [], 0)[1], "a full pipe")
        for number in signals:
            supervisor.send_signal(number)
            time.sleep(0.2)  # Both signals count, also if they are not merged.
        assert supervisor.wait(timeout=30) == code
        assert all(has_ended(process) for process in processes)
    finally:
        supervisor.kill()
        supervisor.wait(timeout=30)
        os.close(reader)
        os.close(writer)


def test_processes_that_the_shell_had_started_before_are_left_alone(tmp_path):
    """``monitor & exec lockstep run``: the monitor is a child of the supervisor."""
    path = program(tmp_path, "print('done')")
    command = f"sleep 100 > /dev/null & echo $!; exec {sys.executable} -m lockstep.cli run {path}"
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60, env=environment())
    sleeper = int(done.stdout.splitlines()[0])
    try:
        assert "[worker 0] done" in done.stdout
        assert not has_ended(sleeper)
    finally:
        send(sleeper, signal.SIGKILL)


def test_the_start_costs_little(tmp_path):
    """A worker is a fork of its reaper, not a second Python, and the reaper is small."""
    with started(program(tmp_path, "write('reaper', str(os.getppid())); time.sleep(100)")):
        reaper = text_of(tmp_path / "reaper")
        pages = Path(f"/proc/{reaper}/smaps_rollup").read_text()
        assert int(re.search(r"Private_Dirty: +(\d+) kB", pages)[1]) < 10_000


def test_time_is_not_wasted_between_the_end_of_the_workers_and_that_of_the_run(tmp_path):
    done = run("-n", 2, program(tmp_path, "print(time.monotonic())"))
    ended = max(float(line.rpartition(" ")[2]) for line in done.stdout.splitlines())
    assert time.monotonic() - ended < 15  # A run gives its workers 30 s to end.
