"""Helpers that run ``lockstep run`` in a subprocess with tiny programs and deadlines."""

import contextlib
import inspect
import os
import signal
import subprocess
import sys

from tests.support.processes import FOR_TESTS
from tests.support.waiting import DEADLINE, has_ended, state_of, wait_until

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
            sys.exit("timed out")
        time.sleep(0.005)
def is_there(name):
    return (here / name).exists()
"""
HEADER += inspect.getsource(state_of) + inspect.getsource(has_ended)


def program(folder, code, name="program.py"):
    """Write a script with this code, which may use the helpers in HEADER; return its path."""
    path = folder / name
    path.write_text(HEADER + code)
    return str(path)


def environment(**variables):
    """Return the environment without the variables of a worker and with Python's default buffering."""
    left_out = ("TF_CONFIG", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**own, **FOR_TESTS, **variables}


def run(*arguments, deadline=DEADLINE, **variables):
    """Run to the end; stdout and stderr are text."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=deadline, env=environment(**variables)
    )
    done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return done


@contextlib.contextmanager
def started(*arguments, output=subprocess.PIPE, before=(), **variables):
    """Run in the background, after the prefix ``before``; the process is killed at the end of the block."""
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


def wait_for_message(supervisor, text):
    """Wait until a supervisor prints a message that contains the text, and return the line."""
    for line in supervisor.stderr:
        if text in line:
            return line
    raise AssertionError(f"it ended without the message {text!r}")


def text_of(path):
    """Wait for a file that a worker writes, and return its text."""
    wait_until(path.exists, path.name)
    return path.read_text()


def send(process, number=signal.SIGTERM):
    """Send a signal to a process that the test has started."""
    os.kill(int(process), number)
