"""A small checkpoint with something of everything, and what it means that two are equal."""

import contextlib
import tracemalloc

import ml_dtypes
import numpy as np

from lockstep import cli
from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore


def said(capsys, *arguments, code=0):
    assert cli.main(["checkpoint", *map(str, arguments)]) == code
    return capsys.readouterr()


def small(step=1):
    arrays = {
        "model/dense/kernel": np.arange(6, dtype=np.float32).reshape(2, 3) + step,
        "optimizer/dense/kernel/momentum": np.asarray([0.5, -1.5, step], ml_dtypes.bfloat16),
        "seed/Zufall «ω»": np.asarray(step, np.uint32),
        "metrics/empty": np.zeros((0, 4), np.int64),
    }
    facts = {"epoch": step // 10, "batch": step % 10, "replicas": 4, "best": float("inf"), "losses": [1.5, None, True]}
    return Snapshot(arrays, facts | {"versions": {"jax": "0.10.2", "keras": "3.15.1"}, "name": "Füße \ud800"})


def filled(step, numbers=1000):
    """One that shows by itself whether all of it belongs together."""
    return Snapshot({f"part {n}": np.full(numbers, step, np.int64) for n in range(4)}, {"step": step})


def is_filled(loaded):
    arrays = loaded.arrays
    return (
        loaded.metadata == {"step": loaded.step}
        and list(arrays) == [f"part {n}" for n in range(4)]
        and all((array == loaded.step).all() for array in arrays.values())
    )


def assert_equal(one, other):
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        theirs = other.arrays[name]
        assert (array.dtype, array.shape) == (theirs.dtype, theirs.shape), name
        assert array.tobytes() == theirs.tobytes(), name
    assert repr(one.metadata) == repr(other.metadata)  # Where NaN equals NaN, and 1 is not True.


def silent(line):
    raise AssertionError(f"nothing should be said, but was: {line}")


def store_in(directory, *steps, keep=3, log=silent):
    """A store with these small checkpoints, in this order."""
    store = CheckpointStore(directory, keep, log=log)
    for step in steps:
        store.write(step, small(step))
    return store


@contextlib.contextmanager
def traced_memory():
    """Gives a function that tells how many bytes were taken at most."""
    found = []
    tracemalloc.start()
    try:
        yield lambda: found[0]
    finally:
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def names_in(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")
