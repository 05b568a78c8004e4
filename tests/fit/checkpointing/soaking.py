"""Kills at random, each followed by a resume, until the training has come to its end; then another training begins.

A kill is at a random place of the program, or a random time after the processes were started; with two workers it hits one of them
or both, in other jobs any process. ``benchmarks/soak.py`` runs this long, and a test briefly.
"""

import os
import random
import signal
import time
from dataclasses import dataclass, field

from tests.faults.matrix import PHASES, ROLES, START, Attempt, Cell, leader_code, undisturbed
from tests.fit.checkpointing.attempts import KILLED, LOST, Training
from tests.support.waiting import has_ended

PLACES = {  # and how often a process may come by before it is killed there
    "training begins": 1,
    "a step begins": 6,
    "a step runs": 6,
    "a step has ended": 6,
    "validation": 2,
    "an epoch ends": 2,
    "training ends": 1,
    "fit has returned": 1,
}
OF_THE_CHIEF = {
    "the arrays are written": 5,
    "before it has its name": 5,
    "between rename and cleanup": 5,
    "before an old one goes": 3,
    "an old one is deleted": 3,
}
EPOCHS, JOB_EPOCHS = 20, 10
OUT_OF_TIME, LONGEST = 0.3, 4.0  # the share of kills that come after a time, of so many seconds at most


@dataclass
class Soaked:
    """What came of it."""

    kills: int = 0
    missed: int = 0  # A process had come to its end before.
    trainings: int = 0
    differ: int = 0  # trainings whose digest is another
    steps_in_weights: int = 0  # more or fewer than belong there
    rows: int = 0  # trainings in which a row did not count once in each epoch
    done_again: int = 0  # steps that were started again, because they were after the last checkpoint
    other_codes: int = 0  # workers that were not killed, and ended with another code than 75 or 0
    places: dict = field(default_factory=dict)


class Soak:
    """Trainings under random kills.

    Args:
        forks: start processes.
        folder: for everything.
        workers: number of processes.
        save_freq: of the backups.
        seed: of the kills.
        strategy: options that change no bit: the digest must be that of a training without them.
    """

    def __init__(self, forks, folder, workers, save_freq, seed, strategy=None):
        self.forks, self.folder, self.workers, self.rng = forks, folder, workers, random.Random(seed)
        self.config = {
            "net": "cnn",
            "uneven": True,
            "epochs": EPOCHS,
            "backup": {"save_freq": save_freq},
            "deterministic": strategy is not None,
        }
        self.strategy = {"strategy": strategy, "shard_from": 3} if strategy else {}
        self.found = Soaked()

    def run(self, kills):
        """Go on until so many kills have hit."""
        (self.folder / "whole").mkdir(parents=True)
        whole = Training(self.forks, self.folder / "whole", self.workers, **self.config)
        expected = whole.finished_as_a_whole()
        while self.found.kills < kills:
            self.train(kills, expected)
        return self.found

    def train(self, kills, expected):
        """One training, with as many kills as it takes to its end."""
        folder = self.folder / f"training{self.found.trainings}"
        folder.mkdir()
        run = Training(self.forks, folder, self.workers, **self.config, **self.strategy)
        try:
            told = None
            while told is None and self.found.kills < kills:
                told = self.attempt(run)
            self.judge(run, told or run.finished(), expected)
        finally:
            run.clean()

    def attempt(self, run):
        """Gives what was told where the training came to its end."""
        victims = self.rng.choice([(0,), (1,), (0, 1)]) if self.workers > 1 else (0,)
        if self.rng.random() < OUT_OF_TIME:
            place, processes = "at a random time", run.begin()
            limit = self.rng.uniform(0, LONGEST)
            if not processes[victims[0]].ended.wait(limit):
                for victim in victims:
                    processes[victim].send_if_there(signal.SIGKILL)
        else:
            places = PLACES | (OF_THE_CHIEF if victims == (0,) else {})
            place = self.rng.choice(list(places))
            processes = run.begin({"at": place, "nth": self.rng.randint(1, places[place])}, on=victims)
        codes = [process.end() for process in processes]
        self.found.other_codes += sum(code not in (KILLED, LOST, 0) for code in codes)
        if KILLED in codes:
            self.found.kills += 1
            self.found.places[place] = self.found.places.get(place, 0) + 1
            return None
        assert codes == [0] * len(codes), "\n\n".join(process.said for process in processes)
        self.found.missed += 1
        return processes[0].told

    def judge(self, run, told, expected):
        found = self.found
        found.trainings += 1
        found.differ += told["digest"] != expected
        found.steps_in_weights += abs(told["steps"] - run.steps)
        found.rows += not run.counts_each_row_once(told)
        found.done_again += run.done_again


class JobSoak:
    """Jobs with servers, or of two nodes that join and leave, under random kills of any process.

    The digest of a training has its number of steps, its history and all variables, so it differs if a step is lost or repeated.

    Args:
        forks: start processes.
        folder: for everything.
        job: ``"servers"`` or ``"nodes"``.
        seed: of the kills.
    """

    def __init__(self, forks, folder, job, seed):
        self.forks, self.folder, self.job, self.rng = forks, folder, job, random.Random(seed)
        self.found, self._expected, self._seconds = Soaked(), None, 0.0

    def run(self, kills):
        """Go on until so many kills have hit."""
        began = time.monotonic()
        self._expected = undisturbed(self.forks, self.folder / "whole", self.job, JOB_EPOCHS)
        self._seconds = time.monotonic() - began
        while self.found.kills < kills:
            self.train()
        return self.found

    def train(self):
        """One training, with as many kills as it takes to its end."""
        folder, number, code = self.folder / f"training{self.found.trainings}", 0, None
        while code != 0:
            code, digests = self.attempt(folder / f"attempt{number}", folder / "checkpoints")
            number += 1
        self.found.trainings += 1
        self.found.differ += digests != {self._expected}

    def attempt(self, folder, checkpoints):
        """Gives the code of the job, and the digests that its processes leave."""
        role = self.rng.choice([*ROLES[self.job], *(["a worker of a node"] if self.job == "nodes" else [])])
        place = (
            "at a random time" if role not in ROLES[self.job] or self.rng.random() < 0.5 else self.rng.choice(PHASES)
        )
        cell = None if place == "at a random time" else Cell(self.job, role, "SIGKILL", place)
        attempt = Attempt(self.forks, folder, cell, self.job, checkpoints, JOB_EPOCHS)
        try:
            attempt.start()
            if cell is None:
                hit = self.kill_in_time(attempt, role)
            elif hit := attempt.comes_to_phase():
                attempt.strike()
            assert not attempt.wait([*attempt.processes], START), f"they do not end\n{attempt.said}"
            target = ROLES[self.job].get(role)
            others = [code for name, code in attempt.codes.items() if name != target or not hit]
            unexpected = sum(code not in (LOST, 0) for code in others)
            if unexpected:
                print(f"{role}, {place}: {attempt.codes}\n{attempt.said}", flush=True)
            self.found.other_codes += unexpected
            self.found.kills += hit
            self.found.missed += not hit
            self.found.places[f"{role}, {place}"] = self.found.places.get(f"{role}, {place}", 0) + hit
            return leader_code(attempt), attempt.digests
        finally:
            attempt.clean()

    def kill_in_time(self, attempt, role):
        """Kill a process after a random time; gives whether it was there."""
        until = time.monotonic() + self.rng.uniform(0, self._seconds)
        while time.monotonic() < until and any(process.code is None for process in attempt.processes.values()):
            time.sleep(0.01)
        if role in ROLES[self.job]:
            pids = [attempt.processes[ROLES[self.job][role]].pid]
        else:
            pids = [int(path.name.split(".")[1]) for path in sorted(attempt.folder.glob("*.pid"))]
        alive = [pid for pid in pids if not has_ended(pid)]
        if alive:
            os.kill(self.rng.choice(alive), signal.SIGKILL)
        return bool(alive)
