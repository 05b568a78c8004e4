"""``lockstep run`` as a process of its own, with tiny programs, and with a deadline for everything."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DEADLINE = 60.0
COMMAND = (sys.executable, "-m", "lockstep.cli", "run")
HEADER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
rank = int(os.environ.get("RANK", -1))
here = Path(__file__).parent
def write(name, text=""):
    (here / f"{name}.{os.getpid()}").write_text(text)
    (here / f"{name}.{os.getpid()}").rename(here / name)
def wait_for(condition):
    until = time.monotonic() + 50
    while not condition():
        if time.monotonic() > until:
            sys.exit("waited in vain")
        time.sleep(0.005)
def is_there(name):
    return (here / name).exists()
def has_ended(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
"""


def program(folder, code, name="program.py"):
    """A script of these lines, which may use the helpers above."""
    path = folder / name
    path.write_text(HEADER + code)
    return str(path)


def environment(**variables):
    """Without what would say that these tests are workers themselves, and with Python's own buffers."""
    left_out = ("TF_CONFIG", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**own, **variables}


def run(*arguments, deadline=DEADLINE, **variables):
    """Run to the end; stdout and stderr as text."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=deadline, env=environment(**variables)
    )
    done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return done


@contextlib.contextmanager
def started(*arguments, output=subprocess.PIPE, before=(), **variables):
    """Run in the background, with a command ``before`` it; it is killed at the end of the block."""
    process = subprocess.Popen(
        [*before, *COMMAND, *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def wait_until(condition, what):
    """Wait for something that must come."""
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"waited {DEADLINE:g} s in vain for {what}"
        time.sleep(0.01)


def text_of(path):
    """What a worker has written to a file, as soon as it is there."""
    wait_until(path.exists, path.name)
    return path.read_text()


def has_ended(process):
    """Whether a process is gone, or only waits to be collected by the system's first one."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def send(process, number=signal.SIGTERM):
    """Send a signal to a process that was started here."""
    os.kill(int(process), number)
