"""Kills at random, each followed by a resume, until the training has come to its end; then another training begins.

A kill is at a random place of the program, or a random time after the processes were started; with two workers it hits one of them
or both. ``benchmarks/soak.py`` runs this long, and a test briefly.
"""

import random
import signal
import statistics
from dataclasses import dataclass, field

from tests.fit.checkpointing.attempts import KILLED, LOST, Training

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
EPOCHS = 20
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
    seconds: list = field(default_factory=list)  # from the start of a process that goes on to the end of its first step

    @property
    def median_seconds(self):
        return statistics.median(self.seconds) if self.seconds else float("nan")


class Soak:
    """Trainings under random kills.

    Args:
        forks: start processes.
        folder: for everything.
        workers: number of processes.
        save_freq: of the backups.
        seed: of the kills.
    """

    def __init__(self, forks, folder, workers, save_freq, seed):
        self.forks, self.folder, self.workers, self.rng = forks, folder, workers, random.Random(seed)
        self.config = {
            "net": "cnn",
            "uneven": True,
            "epochs": EPOCHS,
            "backup": {"save_freq": save_freq},
        }
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
        run = Training(self.forks, folder, self.workers, **self.config)
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
        self.seconds(processes[0])
        self.found.other_codes += sum(code not in (KILLED, LOST, 0) for code in codes)
        if KILLED in codes:
            self.found.kills += 1
            self.found.places[place] = self.found.places.get(place, 0) + 1
            return None
        assert codes == [0] * len(codes), "\n\n".join(process.said for process in processes)
        self.found.missed += 1
        return processes[0].told

    def seconds(self, process):
        if "resumes from" in process.said and "seconds" in process.told:
            self.found.seconds.append(process.told["seconds"])

    def judge(self, run, told, expected):
        found = self.found
        found.trainings += 1
        found.differ += told["digest"] != expected
        found.steps_in_weights += abs(told["steps"] - run.steps)
        found.rows += not run.counts_each_row_once(told)
        found.done_again += run.done_again
