"""Jobs of workers for tests: as threads of this process, and as processes of their own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from lockstep.cluster.group import WorkerGroup
from lockstep.cluster.joining import join

ROOT = Path(__file__).parents[2]
DEADLINE = 60  # seconds after which a test gives up; nothing here should come near


def listening():
    """A socket that listens at a port of its own, and the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


class Job:
    """Workers in threads. ``each`` gives the arguments of ``join`` that one worker has for itself."""

    def __init__(self, workers, each=lambda index: {}, missing=(), **options):
        self.listener, self.coordinator = listening()
        self.workers, self.options, self.each = workers, {"timeout_seconds": 20, **options}, each
        self.lines = [[] for _ in range(workers)]
        self.failures = [[] for _ in range(workers)]
        self.sessions, self.errors = {}, {}
        self._threads = [
            threading.Thread(target=self._join, args=(index,), daemon=True)
            for index in range(workers)
            if index not in missing
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        return self

    def __exit__(self, *error):
        self.everyone(lambda session: session.leave())
        self.listener.close()

    def arguments(self, index):
        own = {
            "identity": {"jax": "1"},
            "announce": self.lines[index].append,
            "on_failure": self.failures[index].append,
            "listener": self.listener if index == 0 else None,
            "group": WorkerGroup(workers=self.workers, index=index, coordinator=self.coordinator),
        }
        return {**own, **self.options, **self.each(index)}

    def everyone(self, work):
        """What ``work(session)`` gives on each worker at the same time, or the exception that it raises."""
        results = {}

        def run(index, session):
            try:
                results[index] = work(session)
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in self.sessions.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        return [results[index] for index in sorted(results)]

    def _join(self, index):
        try:
            self.sessions[index] = join(**self.arguments(index))
        except Exception as error:
            self.errors[index] = error


class Process:
    """A worker in a process of its own that runs ``worker.py``."""

    def __init__(self, folder, name, listener=None, **config):
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        descriptors = () if listener is None else (listener.fileno(),)
        config |= {"listener": descriptors[0] if descriptors else None}
        command = [sys.executable, str(ROOT / "tests" / "cluster" / "worker.py"), json.dumps(config)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=err, pass_fds=descriptors, env={**os.environ, "PYTHONPATH": path}
            )
        self.pid = self._process.pid

    def until(self, text):
        """Wait for a line on standard output that begins with ``text``; gives what follows."""
        return self._until(self.out, text)

    def until_said(self, text):
        """Wait for such a line on standard error."""
        return self._until(self.err, text)

    def _until(self, file, text):
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for line in file.read_text().splitlines(keepends=True):
                if line.startswith(text) and line.endswith("\n"):
                    return line.removeprefix(text).strip()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)
        raise AssertionError(f"no {text!r} in {file.read_text()!r}")

    def send(self, number):
        self._process.send_signal(number)

    def end(self):
        """Its exit code, and what it said on standard error."""
        code = self._process.wait(DEADLINE)
        return code, self.err.read_text()

    def clean(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(DEADLINE)
