"""Jobs of real processes: each runs a program, has its ``TF_CONFIG`` and a deadline, and is ended with its test."""

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
from importlib.metadata import version
from pathlib import Path

from tests.support import compile_cache

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "distributed" / "jobs" / "programs"
DEADLINE = 240  # seconds, far more than any job here takes on a busy machine
TASKS = ("chief", "worker", "ps", "evaluator")

NOT_INHERITED = ("PJRT_NPROC", "NPROC", "XLA_FLAGS")  # What the tests' own process has set for its eight devices.

# XLA compiles with these in a third of the time. What processes say to each other, and what is left of them, does not depend
# on it; where the bits that users get are looked at, a test says AS_FOR_USERS.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):  # A flag that XLA does not know ends the process.
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
FOR_TESTS = {"XLA_FLAGS": " ".join(_FLAGS)}
AS_FOR_USERS = {"XLA_FLAGS": ""}
STARTUP = str(Path(__file__).with_name("startup"))  # In PYTHONPATH it makes new interpreters start in half the time.
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT), STARTUP])  # for processes with an environment of their own

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


class ForkServer:
    """A process of ``fork_server.py``, which forks others; ``before`` is the command that runs it, if any."""

    def __init__(self, before=()):
        environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        inherited = os.environ.get("PYTHONPATH", "").replace(STARTUP, "")  # A fork may need what is left out there.
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), inherited])
        self._server = subprocess.Popen(
            [*before, sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ | {"PYTHONPATH": path},
        )
        self._asked, self._lock = [], threading.Lock()
        self._compiled = compile_cache.shared_folder("children")
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, folder, name, program, config, environ, compiles=False):
        """Start a program; with ``compiles`` it compiles everything for itself."""
        request = {"program": str(program), "arguments": [json.dumps(config)], "environ": FOR_TESTS | environ}
        return self._start(folder, name, request, compiles)

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
        return self._start(Path(folder), "python", request)

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

    def _start(self, folder, name, request, compiles=False):
        process = Process(folder / f"{name}.out", folder / f"{name}.err", folder / f"{name}.compiled")
        process.compiled.mkdir()
        if not compiles:
            compile_cache.fill(process.compiled, self._compiled)
        request |= {"out": str(process.out), "err": str(process.err), "compiled": str(process.compiled)}
        with self._lock:
            self._asked.append(process)
            request["number"] = len(self._asked) - 1
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
        return process

    def _listen(self):
        for line in self._server.stdout:
            answer = json.loads(line)
            process = self._asked[answer["number"]]
            if "pid" in answer:
                process._pid = answer["pid"]
                process.begun.set()
            else:
                process.code, process.ended_at = answer["code"], time.monotonic()
                if process.code == 0:
                    compile_cache.publish(process.compiled, self._compiled)
                process.ended.set()
        self._server.stdout.close()


class Process:
    """A process that a fork server starts."""

    def __init__(self, out, err, compiled):
        self.out, self.err, self.compiled = out, err, compiled
        self.begun, self.ended = threading.Event(), threading.Event()
        self._pid = self.code = self.ended_at = None

    @property
    def pid(self):
        """Its number, as soon as it has one."""
        assert self.begun.wait(DEADLINE), "the fork server did not start it"
        return self._pid

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
        self._wait_for(lambda: key in self.told, key)
        return self.told[key]

    def until_said(self, text):
        """Wait for a line on standard error that begins with a text."""
        self._wait_for(lambda: any(line.startswith(text) for line in self.said.splitlines()), text)

    def _wait_for(self, condition, what):
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"waited {DEADLINE} s in vain for {what!r}:\n{self.said}"
            assert not self.ended.wait(0.02) or condition(), f"ended with {self.code} before {what!r}:\n{self.said}"

    def send(self, number):
        """A signal."""
        os.kill(self.pid, number)

    def send_if_there(self, number):
        """A signal, unless it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            self.send(number)

    def clean(self):
        """End it and whatever it has started, if it still runs."""
        if self.begun.wait(DEADLINE):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            self.ended.wait(DEADLINE)


class Job:
    """Processes of one job, which take turns at the ``forks``: workers, and by ``others`` so many of the tasks ``chief``, ``ps``,
    ``evaluator``. ``program`` is what they run by default, ``environ`` their further environment variables.
    """

    def __init__(self, forks, folder, workers, others=None, hosts=None, program=None, environ=None):
        self.forks, self.folder, self.workers, self.program = forks, folder, workers, program
        self.environ = {"KERAS_HOME": str(folder / "keras"), **(environ or {})}
        counts = {"worker": workers, **(others or {})}
        hosts = hosts or [own_host()] * sum(counts.values())
        addresses = (f"{host}:{12421 + number}" for number, host in enumerate(hosts))
        self.cluster = {task: [next(addresses) for _ in range(counts[task])] for task in TASKS if counts.get(task)}
        self.processes = {}

    @property
    def coordinator(self):
        return self.cluster["worker"][0]

    def start(self, task, index, program=None, *, cluster=None, environ=None, compiles=False, **config):
        """Start one process, of a file or a name in ``PROGRAMS``; gives it. The task ``alone`` is in no cluster.

        With ``compiles`` it compiles everything for itself.
        """
        program = program or self.program
        program = PROGRAMS / f"{program}.py" if isinstance(program, str) else program
        tf_config = json.dumps({"cluster": cluster or self.cluster, "task": {"type": task, "index": index}})
        environ = {**({} if task == "alone" else {"TF_CONFIG": tf_config}), **self.environ, **(environ or {})}
        place = {"index": index, "workers": self.workers, "folder": str(self.folder), "name": f"{task}{index}"}
        count = sum(place["name"] == known.partition("-")[0] for known in self.processes)
        name = f"{place['name']}-{count}" if count else place["name"]
        forks = self.forks[index % len(self.forks)]
        self.processes[name] = forks.start(self.folder, name, program, place | config, environ, compiles)
        return self.processes[name]

    def start_all(self, program=None, *, each=lambda task, index: {}, but=(), **config):
        """Start all processes but those named; ``each(task, index)`` gives what one has for itself."""
        return [
            self.start(task, index, program, **{**config, **each(task, index)})
            for task, addresses in self.cluster.items()
            for index in range(len(addresses))
            if f"{task}{index}" not in but
        ]

    def run(self, program=None, **options):
        """Start all processes, wait until they have ended in order, and give what they have told."""
        self.start_all(program, **options)
        self.end()
        return [process.told for process in self.processes.values()]

    def end(self, but=()):
        """Wait until all processes have ended in order, but those named."""
        codes = {name: process.end() for name, process in self.processes.items() if name not in but}
        assert not any(codes.values()), f"{codes}\n\n" + "\n\n".join(p.said for p in self.processes.values())

    def clean(self):
        for process in self.processes.values():
            process.clean()
