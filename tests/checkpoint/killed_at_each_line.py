"""Writes a checkpoint, and is killed before the 1st, the 2nd, the 3rd … line of the code that writes; then looks at what is left.

A program of its own, because it forks: ``python killed_at_each_line.py DIRECTORY STEP KEEP``. There are checkpoints of steps 1
and 2; STEP is written. It prints how many lines there are, and how often the new one was the newest.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

import lockstep._atomic_files
import lockstep.checkpoint.store
from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore

OURS = str(Path(lockstep.checkpoint.store.__file__).parent), lockstep._atomic_files.__file__
STANDARD = (shutil.__file__,)  # It deletes file by file.


os.fsync = lambda file: None  # A kill loses nothing that was written; only a power cut would.


def state(step, which):
    return Snapshot({name: np.full(50, 10 * step + which) for name in ("a", "b")}, {"step": step, "which": which})


def which(loaded):
    """0: the older one of its step; 1: the newer one. All of it belongs together."""
    arrays, found = loaded.arrays, loaded.metadata["which"]
    expected = 10 * loaded.step + found
    if not all((arrays[name] == expected).all() and len(arrays[name]) == 50 for name in ("a", "b")):
        raise SystemExit(f"a mixture at {loaded.path}")
    return found


def write_and_die(directory, step, keep, line):
    left = itertools.count(line, -1)

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith((*OURS, *STANDARD)):
            return None
        if event == "line" and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    store = CheckpointStore(directory, keep, log=lambda line: None)
    sys.settrace(trace)
    store.write(step, state(step, 1))
    sys.settrace(None)
    store.close()


def look(directory, step, keep):
    """What a resumed run would find, and what it leaves after its next checkpoint; gives whether that was the new one."""
    said = []
    store = CheckpointStore(directory, keep, log=said.append)
    problems = [problem for path in store.paths() for problem in store.verify(path)]
    loaded = store.newest()
    is_new = which(loaded) == 1
    if problems or said or loaded.step not in (2, step) or (is_new and loaded.step != step):
        raise SystemExit(f"{os.listdir(directory)}: {problems} {said}")
    store.write(4, state(4, 0))
    names = sorted(name for name in os.listdir(directory) if name != ".lock")
    if len(names) != keep or any(name.startswith(".") for name in names) or said:
        raise SystemExit(f"afterwards there are {names}: {said}")
    return is_new


def main(directory, step, keep):
    first = directory / "first"
    with CheckpointStore(first, keep=2) as store:
        for number in (1, 2):
            store.write(number, state(number, 0))
    found = []
    for line in itertools.count():
        copy = directory / str(line)
        shutil.copytree(first, copy)
        child = os.fork()
        if not child:
            write_and_die(copy, step, keep, line)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(look(copy, step, keep))
        shutil.rmtree(copy)
        if status == 0:
            break
    if found != sorted(found) or not found[-1]:
        raise SystemExit(f"the new one came and went: {found}")
    print(len(found), sum(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
