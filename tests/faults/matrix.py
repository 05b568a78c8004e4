"""The matrix of faults: each signal to each role of a job in each phase, on loopback, with what must come of it.

A cell starts a real job, whose ``holder`` holds it in the phase until the signal is sent. The other processes must end within their
limit, name whom they lost, and leave no process. The job either comes to the bits of one that nothing happened to, or its next start
does. ``benchmarks/faults.py`` runs all cells; tests run some.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import FOR_TESTS, NOT_INHERITED, PYTHON_PATH, Job, own_host
from tests.support.waiting import has_ended, state_of

PROGRAM = Path(__file__).with_name("training.py")
TIMEOUT = 6.0  # seconds, the limit of each wait of a job
SILENT = 8.0  # of a node, in place of 60
SLACK = 30.0  # for starts, restarts and a busy machine, beyond the limits
START = 90.0  # for a job to come to its phase

SIGNALS = {name: getattr(signal, name) for name in ("SIGSTOP", "SIGKILL", "SIGTERM", "SIGINT")}
PHASES = ("rendezvous", "compile", "step", "validation", "checkpoint", "end")
ROLES = {  # of each kind of job: the process that gets the signal
    "workers": {"chief": "worker0", "worker": "worker1"},
    "servers": {"chief": "chief0", "worker": "worker1", "parameter server": "ps0", "evaluator": "evaluator0"},
    "launcher": {"supervisor": "supervisor"},
    "nodes": {"supervisor of another node": "node1", "host of the rendezvous": "node0"},
}
IMPOSSIBLE = {  # cells in which the role itself takes no part in the phase; there another process holds the job
    ("workers", "worker", "checkpoint"): "only the chief writes checkpoints",
    ("servers", "chief", "compile"): "the chief compiles no step",
    ("servers", "chief", "validation"): "the evaluator validates",
    ("servers", "worker", "validation"): "the evaluator validates",
    ("servers", "worker", "checkpoint"): "only the chief writes checkpoints",
    ("servers", "parameter server", "validation"): "the evaluator validates",
    ("servers", "parameter server", "checkpoint"): "only the chief writes checkpoints",
    ("servers", "evaluator", "step"): "the evaluator runs no training step",
    ("servers", "evaluator", "checkpoint"): "only the chief writes checkpoints",
}
HOLDERS = {"compile": "worker0", "step": "worker0", "validation": "evaluator0", "checkpoint": "chief0"}  # with servers
NAMES = {  # of the target, in what others say
    "worker0": r"worker 0 of 2|chief",
    "worker1": r"worker 1 of 2",
    "chief0": r"chief",
    "ps0": r"ps 0",
    "evaluator0": r"evaluator",
    "node0": r"node 0 \(|rendezvous at \S+ (was lost|sent nothing|has ended)|could not be reached",
    "node1": r"node 1 \(",
}


@dataclass(frozen=True)
class Cell:
    """One signal to one role in one phase.

    Args:
        job: one of ``ROLES``.
        role: one of ``ROLES[job]``.
        signal: one of ``SIGNALS``.
        phase: one of ``PHASES``.
    """

    job: str
    role: str
    signal: str
    phase: str

    @property
    def key(self):
        return f"{self.job}, {self.role}, {self.signal}, {self.phase}"

    @property
    def target(self):
        return ROLES[self.job][self.role]

    @property
    def holder(self):
        """The process that holds the job in the phase: the target itself, if it takes part in it."""
        if self.job in ("launcher", "nodes"):
            return "worker0"
        if (self.job, self.role, self.phase) not in IMPOSSIBLE:
            return self.target
        return HOLDERS[self.phase] if self.job == "servers" else "worker0"


def cells(job):
    """All cells of a kind of job."""
    return [Cell(job, *rest) for rest in itertools.product(ROLES[job], SIGNALS, PHASES)]


class Supervisor:
    """A ``lockstep run`` as a process of a job; as ``tests.support.processes.Process``, as far as it is used here."""

    def __init__(self, folder, name, words, config):
        patch = (
            "import lockstep.launch.rendezvous as a, lockstep.launch.rendezvous_state as b, lockstep.cli as c, sys\n"
        )
        patch += f"a.SILENT_SECONDS = b.SILENT_SECONDS = {SILENT}\nsys.exit(c.main())"
        environ = {key: value for key, value in os.environ.items() if key not in (*NOT_INHERITED, "TF_CONFIG")}
        environ |= FOR_TESTS | {"PYTHONPATH": PYTHON_PATH, "KERAS_BACKEND": "jax"}
        self.err = folder / f"{name}.err"
        command = [sys.executable, "-c", patch, "run", "--grace", "10", *map(str, words), str(PROGRAM)]
        with self.err.open("wb") as err, (folder / f"{name}.out").open("wb") as out:
            self._process = subprocess.Popen([*command, json.dumps(config)], stdout=out, stderr=err, env=environ)
        self.pid = self._process.pid

    @property
    def code(self):
        return self._process.poll()

    @property
    def said(self):
        return self.err.read_text()

    def send_if_there(self, number):
        if self.code is None:
            self._process.send_signal(number)

    def clean(self):
        self._process.kill()
        self._process.wait(SLACK)


class Attempt:
    """One start of a job.

    Args:
        forks: start processes.
        folder: of this attempt.
        cell: what to do; None: the job runs undisturbed.
        job: kind of the job.
        checkpoints: folder that all attempts share.
        epochs: to train.
    """

    def __init__(self, forks, folder, cell, job, checkpoints, epochs=3):
        folder.mkdir(parents=True)
        self.forks, self.folder, self.cell, self.job = forks, folder, cell, job
        self.config = {"kind": "servers" if job == "servers" else "workers", "checkpoints": str(checkpoints)}
        self.config |= {
            "folder": str(folder),
            "timeout": TIMEOUT,
            "launched": job in ("launcher", "nodes"),
            "epochs": epochs,
        }
        if cell is not None:
            self.config |= {"phase": cell.phase, "holder": cell.holder}
        self.processes, self._late, self._job = {}, [], None

    def start(self):
        """Start all processes, but those that come after the signal."""
        if self.job == "workers":
            self._start_job(Job(self.forks, self.folder, 2))
        elif self.job == "servers":
            others = {"chief": 1, "ps": 1, "evaluator": 1}
            self._start_job(Job(self.forks, self.folder, 2, others, environ={"LOCKSTEP_SECRET": "known" * 8}))
        elif self.job == "launcher":
            self.processes["supervisor"] = Supervisor(self.folder, "supervisor", ["-n", 2], self.config)
        else:
            self._start_nodes()

    def _start_job(self, job):
        self._job = job
        job.start_all(PROGRAM, **self.config)
        self.processes = dict(job.processes)

    def _start_nodes(self):
        limits = ("--nnodes", "1:2", "--join-seconds", 5, "--start-seconds", 20, "--max-restarts", 2)
        common = (*limits, "--coordinator", f"{own_host()}:12421")

        def start(rank):
            words = (*common, "--node-rank", rank)
            self.processes[f"node{rank}"] = Supervisor(self.folder, f"node{rank}", words, self.config)

        if self.cell is not None and self.cell.phase == "rendezvous":  # The target alone, so that the rendezvous lasts.
            rank = int(self.cell.target[-1])
            start(rank)
            self._late = [lambda: start(1 - rank)]
        else:
            start(1)
            start(0)

    def comes_to_phase(self):
        """Wait until the job is in the phase of its cell; False if it has come to an end without."""
        until = time.monotonic() + START
        while not self._is_in_phase():
            codes = self.codes.values()
            if any(codes) or None not in codes:
                return False
            assert time.monotonic() < until, f"the phase was not reached in {START:g} s\n{self.said}"
            time.sleep(0.01)
        return True

    def _is_in_phase(self):
        if self._late:
            return "rendezvous at" in self.processes[self.cell.target].said
        return (self.folder / "reached").exists()

    def strike(self):
        """Send the signal, wait for its effect, and let the job go on."""
        target, number = self.processes[self.cell.target], SIGNALS[self.cell.signal]
        os.kill(target.pid, number)
        effects = {"SIGSTOP": lambda: state_of(target.pid) == "T", "SIGKILL": lambda: has_ended(target.pid)}
        until = time.monotonic() + SLACK
        while not effects.get(self.cell.signal, lambda: True)():
            assert time.monotonic() < until, "the signal has no effect"
            time.sleep(0.01)
        (self.folder / "go").touch()
        for start in self._late:
            start()

    def wait(self, names, seconds):
        """Wait until processes have ended; gives the names of those that have not."""
        until = time.monotonic() + seconds
        while True:
            left = [name for name in names if self.processes[name].code is None]
            if not left or time.monotonic() >= until:
                return left
            time.sleep(0.01)

    def wait_for_trainings(self, seconds):
        """Wait until all processes that train have ended; gives the numbers of those that have not."""
        until = time.monotonic() + seconds
        while True:
            pids = [path.name.split(".")[1] for path in self.folder.glob("*.pid")]
            left = [int(pid) for pid in pids if not has_ended(pid)]
            if not left or time.monotonic() >= until:
                return left
            time.sleep(0.02)

    @property
    def codes(self):
        return {name: process.code for name, process in sorted(self.processes.items())}

    @property
    def digests(self):
        return {path.read_text() for path in self.folder.glob("*.digest")}

    @property
    def said(self):
        return "\n\n".join(f"{name}:\n{process.said}" for name, process in self.processes.items())

    def clean(self):
        for process in self.processes.values():
            process.clean()
        for path in self.folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.split(".")[1]), signal.SIGKILL)


def undisturbed(forks, folder, job, epochs=3):
    """The digest of a job that nothing happens to."""
    attempt = Attempt(forks, folder / "attempt", None, job, folder / "checkpoints", epochs)
    try:
        return finished(attempt)
    finally:
        attempt.clean()


def finished(attempt):
    attempt.start()
    left = attempt.wait(list(attempt.processes), START)
    assert not left, f"{left} do not end\n{attempt.said}"
    assert not any(attempt.codes.values()), f"{attempt.codes}\n{attempt.said}"
    (digest,) = attempt.digests
    return digest


def run(forks, folder, cell, expected):
    """Run a cell; gives what was seen, for the table, with ``wrong``: what must not be."""
    attempt = Attempt(forks, folder / "attempt", cell, cell.job, folder / "checkpoints")
    again = Attempt(forks, folder / "again", None, cell.job, folder / "checkpoints")
    try:
        attempt.start()
        assert attempt.comes_to_phase(), f"the phase was not reached: {attempt.codes}\n{attempt.said}"
        attempt.strike()
        found = ends(attempt)
        found["said"] = last_lines(attempt)
        found["named"] = is_named(attempt)
        if attempt.digests == {expected} and leader_code(attempt) == 0:
            found["bits"] = "same"
        elif attempt.digests - {expected}:
            found["bits"] = "other"
        else:
            found["bits"] = "same after a restart" if finished(again) == expected else "other after a restart"
        found["wrong"] = wrong(cell, found)
        return found
    finally:
        attempt.clean()
        again.clean()


def ends(attempt):
    """Wait for the ends of all processes; a stopped one goes on when the others have ended."""
    cell, began = attempt.cell, time.monotonic()
    limit = TIMEOUT + SLACK + (SILENT if cell.job == "nodes" else 0)
    late = attempt.wait([name for name in attempt.processes if name != cell.target], limit)
    if cell.job == "launcher":
        late += attempt.wait_for_trainings(limit)
    found = {"seconds": round(time.monotonic() - began, 1)}
    if cell.signal == "SIGSTOP":
        attempt.processes[cell.target].send_if_there(signal.SIGCONT)
    late += attempt.wait([cell.target], limit)
    late += attempt.wait_for_trainings(SLACK)
    return {"codes": attempt.codes, **found, "late": late}


def leader_code(attempt):
    """The code of the process whose end is that of the job."""
    leaders = {"workers": "worker0", "servers": "chief0", "launcher": "supervisor", "nodes": "node0"}
    return attempt.processes[leaders[attempt.job]].code


def last_lines(attempt):
    """The last line of each process that did not get the signal, with paths within the job's folder."""
    folder = f"{attempt.folder}/"
    others = {name: process.said.replace(folder, "").splitlines() for name, process in attempt.processes.items()}
    return {name: lines[-1] for name, lines in sorted(others.items()) if lines and name != attempt.cell.target}


def is_named(attempt):
    """Whether each other process that failed, or started its workers again, says who was lost; None if there is no such process.

    Where SIGTERM has all stop together, with a checkpoint, one of them says so.
    """
    pattern, target = NAMES.get(attempt.cell.target), attempt.cell.target
    if attempt.cell.signal == "SIGTERM" and attempt.processes[target].code == 75:
        return "SIGTERM" in attempt.said
    others = [process for name, process in attempt.processes.items() if name != target]
    harmed = [process for process in others if process.code or ": restart 1 of" in process.said]
    return all(re.search(pattern, process.said) for process in harmed) if harmed else None


def wrong(cell, found):
    """What must not be, in words."""
    others = {name: code for name, code in found["codes"].items() if name != cell.target}
    own = found["codes"][cell.target]
    expected = others_codes(cell) | (
        {own} if cell.target == "node0" else set()
    )  # Node 0 ends the job with its own code.
    faults = [f"{name} does not end" for name in found["late"]]
    faults += [f"{name} ended with {code}" for name, code in others.items() if code not in expected]
    if own not in target_codes(cell):
        faults.append(f"{cell.target} ended with {own}")
    faults += ["nobody names it"] if found["named"] is False else []
    faults += ["other bits"] if found["bits"].startswith("other") else []
    return faults


def others_codes(cell):
    """Exit codes that processes may have which did not get the signal, by docs/several_machines.md and docs/parameter_servers.md."""
    if cell.signal == "SIGINT":
        return {
            0,
            13,
            75,
            130,
        }  # Ctrl-C is an end of the program there, which others hear of; that of a chief with servers ends all.
    return {0, 75, 124} if (cell.job, cell.signal) == ("servers", "SIGSTOP") else {0, 75}


def target_codes(cell):
    """Exit codes of the process that gets the signal; it may have ended before it takes effect, or be restarted."""
    by_supervisor = cell.job in ("launcher", "nodes")
    return {
        "SIGSTOP": {0, 75, 124},
        "SIGKILL": {-signal.SIGKILL},
        "SIGTERM": {0, 75, 143} if by_supervisor else {0, 75, -signal.SIGTERM},
        "SIGINT": {0, 75, 130} if by_supervisor else {0, 130, -signal.SIGINT},
    }[cell.signal]
