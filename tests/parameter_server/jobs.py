"""A job of real processes with servers of variables: a chief, workers and servers, and an evaluator where it is asked for."""

import json
from pathlib import Path

import numpy as np

from tests.workers.jobs import Forks, Process, own_host

PROGRAM = Path(__file__).parent / "programs" / "train.py"
ORDER = ("chief", "worker", "ps", "evaluator")


class ServerJob:
    """One job; nothing runs yet."""

    def __init__(self, forks: Forks, folder, workers, servers, evaluator=False, secret="known"):
        self.forks, self.folder, self.secret = forks, folder, secret
        host, counts = own_host(), {"chief": 1, "worker": workers, "ps": servers, "evaluator": int(evaluator)}
        addresses = iter([f"{host}:{12421 + number}" for number in range(sum(counts.values()))])
        self.cluster = {name: [next(addresses) for _ in range(counts[name])] for name in ORDER if counts[name]}
        self.processes: dict[str, Process] = {}

    def start(self, task, index, *, environ=None, **config):
        """Start one process."""
        name = f"{task}{index}"
        told = {"TF_CONFIG": json.dumps({"cluster": self.cluster, "task": {"type": task, "index": index}})}
        told = {} if task == "alone" else told
        environ = told | {"LOCKSTEP_SECRET": self.secret, "KERAS_HOME": str(self.folder / "keras"), **(environ or {})}
        config |= {"folder": str(self.folder), "name": name}
        count = sum(name == known.partition("-")[0] for known in self.processes)
        self.processes[f"{name}-{count}" if count else name] = process = self.forks.start(
            self.folder, f"{name}-{count}" if count else name, PROGRAM, config, environ
        )
        return process

    def start_all(self, but=(), each=lambda task, index: {}, **config):
        """Start all processes, but for those that are named."""
        for task, addresses in self.cluster.items():
            for index in range(len(addresses)):
                if f"{task}{index}" not in but:
                    self.start(task, index, **{**config, **each(task, index)})
        return self.processes

    def run(self, **options):
        """Start all, wait for their end in order; gives what the chief leaves."""
        self.start_all(**options)
        self.end()
        return self.arrays("chief", 0)

    def end(self, but=()):
        """Wait until all have ended in order, but for some."""
        codes = {name: process.end() for name, process in self.processes.items() if name not in but}
        assert not any(codes.values()), f"{codes}\n\n" + "\n\n".join(p.said for p in self.processes.values())

    def said(self, name="chief0"):
        return self.processes[name].said

    def arrays(self, task, index):
        """What a process has left: for each case its weights, other variables, optimizer, history."""
        with np.load(self.folder / f"{task}{index}.npz", allow_pickle=False) as found:
            return dict(found)

    def clean(self):
        for process in self.processes.values():
            process.clean()


def bits(arrays, *kinds):
    """The bytes of some kinds of values, of all by default."""
    return {name: value.tobytes() for name, value in arrays.items() if not kinds or name.split("/")[1] in kinds}


def assert_close(found, expected, tolerance=2e-5, but=()):
    """All that both have, within what another order of additions makes of float32."""
    names = [name for name in expected if not any(part in name for part in but)]
    assert set(names) <= set(found)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
