"""A training that goes through any number of processes: each attempt goes on where the one before was ended by its fault."""

import signal
from pathlib import Path

from tests.support.processes import DEADLINE, Job
from tests.support.waiting import state_of, wait_until

PROGRAM = Path(__file__).parent / "programs" / "trains.py"
EPOCHS, STEPS = 5, 3  # STEPS of an epoch, as the program has them
ROWS, ROWS_IF_UNEVEN, HELD_OUT = 24, 23, 8
KILLED, LOST = -signal.SIGKILL, 75


class Training:
    """One training, in one directory.

    Args:
        forks: start processes.
        folder: for what processes say, and for checkpoints unless ``directory`` is given.
        workers: number of processes.
        config: further settings of the program, the same in all attempts unless an attempt has its own.
    """

    def __init__(self, forks, folder, workers=1, **config):
        self.forks, self.folder, self.workers = forks, folder, workers
        config = {"net": "mlp", "epochs": EPOCHS, "backup": {"save_freq": 1}, "timeout": 60} | config
        config |= {"devices": 3 - workers, "log": str(folder / "steps.log")}
        self.config = {"directory": str(folder / "checkpoints")} | config
        self.jobs = []

    @property
    def directory(self):
        return Path(self.config["directory"])

    @property
    def steps(self):
        """How many steps belong to it."""
        return self.config["epochs"] * STEPS

    @property
    def started(self):
        """How many steps were started, in all attempts together."""
        log = Path(self.config["log"])
        return log.read_text().split().count("0") if log.exists() else 0

    @property
    def done_again(self):
        """How many steps were started more than once, when the training has come to its end."""
        return self.started - self.steps

    def begin(self, fault=None, on=(0,), **config):
        """Start the processes of an attempt.

        Args:
            fault: arguments of ``places.Fault``.
            on: the workers that have it.
            **config: what is different in this attempt.
        """
        folder = self.folder / f"attempt{len(self.jobs)}"
        folder.mkdir(parents=True)
        config = self.config | config
        job = Job(self.forks, folder, config.get("workers", self.workers))
        self.jobs.append(job)
        return job.start_all(PROGRAM, each=lambda _, index: {"fault": fault if index in on else None}, **config)

    def killed(self, at, nth=1, on=(0,), **config):
        """An attempt in which workers are killed at a place; the others end by themselves, also one that was yet to be killed."""
        processes = self.begin({"at": at, "nth": nth}, on, **config)
        codes = [process.end() for process in processes]
        said = "\n\n".join(process.said for process in processes)
        assert any(codes[index] == KILLED and processes[index].told["happens"] == at for index in on), said
        ends = {KILLED, LOST} if len(on) > 1 else {LOST}
        assert all(code == KILLED if on == (index,) else code in ends for index, code in enumerate(codes)), said

    def finished(self, **config):
        """An attempt that comes to the end; gives what the chief tells of it."""
        processes = self.begin(**config)
        codes = [process.end() for process in processes]
        assert codes == [0] * len(processes), "\n\n".join(process.said for process in processes)
        told = processes[0].told
        assert all(process.told["digest"] == told["digest"] for process in processes)
        return told

    def finished_as_a_whole(self, **config):
        """The digest of :meth:`finished`, where as many steps are in the weights as belong there, and each row was trained on, and
        looked at, once an epoch."""
        told = self.finished(**config)
        assert told["steps"] == self.steps
        assert self.counts_each_row_once(told), told["rows"]
        return told["digest"]

    def counts_each_row_once(self, told):
        """Whether in each epoch all rows were trained on, and all others looked at, once."""
        rows = ROWS_IF_UNEVEN if self.config.get("uneven") else ROWS
        counts = {"rows": rows, "rows once": rows, "val_rows": HELD_OUT, "val_rows once": HELD_OUT}
        return told["rows"] == {name: [count] * self.config["epochs"] for name, count in counts.items()}

    def clean(self):
        for job in self.jobs:
            job.clean()


def until_stopped(process):
    """Wait until a process has stopped itself."""
    process.until("happens")
    wait_until(lambda: state_of(process.pid) == "T", "its stop", DEADLINE)
