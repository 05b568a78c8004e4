"""Jobs of real processes: each worker runs a program of ``programs/``, has its ``TF_CONFIG`` and a deadline."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 240  # seconds, far more than any job here takes on a busy machine

NOT_INHERITED = ("PJRT_NPROC", "NPROC", "XLA_FLAGS")  # What the tests' own process has set for its eight devices.

LOGGED_BY_JAX = (
    *(f"{kind}{digit}" for kind in "IWEF" for digit in "01"),
    "Additional GRPC error",
    ":UNKNOWN:",
    "RPC: ",
)

_counter = itertools.count()


def own_host():
    """A loopback address that no other job on this machine has, so that all its ports are free."""
    pid = os.getpid()
    return f"127.{1 + pid // 250 % 250}.{1 + pid % 250}.{1 + next(_counter) % 250}"


class Forks:
    """Starts processes by way of ``forking.py``; ``before`` is what that is run with."""

    def __init__(self, before=()):
        environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._server = subprocess.Popen(
            [*before, sys.executable, str(Path(__file__).with_name("forking.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ | {"PYTHONPATH": path},
        )
        self._asked = []
        self._one_asks = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, folder, name, program, config, environ):
        process = Process(folder / f"{name}.out", folder / f"{name}.err")
        self._asked.append(process)
        request = {"number": len(self._asked) - 1, "program": str(program), "arguments": [json.dumps(config)]}
        request |= {"environ": environ, "out": str(process.out), "err": str(process.err)}
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        return process

    def start_python(
        self, folder, *, code=None, script=None, module=None, arguments=(), cwd=None, environ=None, warnings=()
    ):
        """Start what ``python -c code``, ``python script`` or ``python -m module`` would, without the time of its imports.

        JAX has not started there, and Keras and Lockstep are imported. As with ``subprocess``, the environment is that of
        this process; ``environ`` are changes to it, where None removes a variable. ``warnings`` are actions, as of ``-W``.
        ``folder`` holds the output; it is written there as it comes.
        """
        ((kind, program),) = (
            (kind, program)
            for kind, program in (("code", code), ("script", script), ("module", module))
            if program is not None
        )
        changes = os.environ | (environ or {})
        request = {
            "kind": kind,
            "program": str(program),
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or os.getcwd()),
            "environ": {name: value for name, value in changes.items() if value is not None},
            "warnings": list(warnings),
        }
        process = Process(Path(folder) / "out", Path(folder) / "err")
        with self._one_asks:
            self._asked.append(process)
            request |= {"number": len(self._asked) - 1, "out": str(process.out), "err": str(process.err)}
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
        return process

    def run_python(self, *, timeout=DEADLINE, **options):
        """Run Python as `start_python` says, to its end; what it leaves is given as ``subprocess.run`` gives it.

        After ``timeout`` seconds its process group is killed, and the test fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            process = self.start_python(folder, **options)
            try:
                code = process.end(timeout)
            except BaseException:
                process.clean()
                raise
            written = (path.read_text() if path.exists() else "" for path in (process.out, process.err))
            return subprocess.CompletedProcess(options, code, *written)

    def close(self):
        self._server.stdin.close()
        self._server.wait(DEADLINE)

    def _listen(self):
        for line in self._server.stdout:
            answer = json.loads(line)
            process = self._asked[answer["number"]]
            if "pid" in answer:
                process.pid = answer["pid"]
                process.begun.set()
            else:
                process.code, process.ended_at = answer["code"], time.monotonic()
                process.ended.set()
        self._server.stdout.close()


class Process:
    """One worker."""

    def __init__(self, out, err):
        self.out, self.err = out, err
        self.begun, self.ended = threading.Event(), threading.Event()
        self.pid = self.code = self.ended_at = None

    def end(self, deadline=DEADLINE):
        """Its exit code."""
        assert self.ended.wait(deadline), f"still runs after {deadline} s:\n{self.said}"
        return self.code

    @property
    def said(self):
        """Its standard error, without what JAX's own C++ code logs."""
        lines = self.err.read_text().splitlines() if self.err.exists() else []
        return "\n".join(line for line in lines if not line.startswith(LOGGED_BY_JAX))

    @property
    def told(self):
        """What the program has said with ``tell``, all of it in one dict."""
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return {k: v for line in lines if line.startswith("{") for k, v in json.loads(line).items()}

    def until(self, key):
        """Wait until the program has told something; gives that."""
        deadline = time.monotonic() + DEADLINE
        while key not in self.told:
            assert time.monotonic() < deadline, f"{key!r} was not told:\n{self.said}"
            assert not self.ended.wait(0.02) or key in self.told, f"ended with {self.code}:\n{self.said}"
        return self.told[key]

    def send(self, number):
        """A signal."""
        assert self.begun.wait(DEADLINE)
        os.kill(self.pid, number)

    def send_if_there(self, number):
        """A signal, unless it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            self.send(number)

    def clean(self):
        """End it and whatever it has started, if it still runs."""
        if self.begun.wait(DEADLINE):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.ended.wait(DEADLINE)


class Job:
    """Workers of one job, who take turns at the ``forks``."""

    def __init__(self, forks, folder, workers, hosts=None):
        self.forks, self.folder, self.workers = forks, folder, workers
        hosts = hosts or [own_host()] * workers
        self.cluster = {"worker": [f"{host}:{12421 + index}" for index, host in enumerate(hosts)]}
        self.processes = []

    @property
    def coordinator(self):
        return self.cluster["worker"][0]

    def start(self, index, program, *, task=None, cluster=None, environ=None, **config):
        """Start one worker; gives its process."""
        program = PROGRAMS / f"{program}.py" if isinstance(program, str) else program
        task = {"type": "worker", "index": index} if task is None else task
        tf_config = json.dumps({"cluster": cluster or self.cluster, "task": task})
        name = f"worker{len(self.processes)}"
        environ = {"TF_CONFIG": tf_config, "KERAS_HOME": str(self.folder / "keras"), **(environ or {})}
        process = self.forks[index % len(self.forks)].start(
            self.folder, name, program, config | {"index": index, "workers": self.workers}, environ
        )
        self.processes.append(process)
        return process

    def start_all(self, program, each=lambda index: {}, **config):
        """Start all workers; ``each(index)`` gives what one has for itself."""
        return [self.start(index, program, **{**config, **each(index)}) for index in range(self.workers)]

    def run(self, program, each=lambda index: {}, **config):
        """Start all workers, wait until they have ended in order, and give what they have told."""
        processes = self.start_all(program, each, **config)
        codes = [process.end() for process in processes]
        assert codes == [0] * self.workers, "\n\n".join(process.said for process in processes)
        return [process.told for process in processes]

    def clean(self):
        for process in self.processes:
            process.clean()
