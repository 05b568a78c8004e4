"""Claim: compressing a checkpoint costs far more time than it saves, and sha256 costs less than writing.

Weights and the two moments of Adam, 96 MB of float32 in 12 arrays, are written to disk (with fsync) and read back in several formats
in turn, for five rounds. The result is the best time of each, and its ratio to ``numpy.savez`` in the same run. Decision 16 is based on this.
"""

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from results_file import write

from lockstep.checkpoint.serialization import Snapshot
from lockstep.checkpoint.store import CheckpointStore

ROUNDS = 5


def state() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {f"layer {n}": random.normal(0, 0.05, (1000, 2000)).astype(np.float32) for n in range(4)}
    moments = {f"{kind} {name}": array * 1e-3 for kind in ("momentum", "velocity") for name, array in weights.items()}
    return weights | moments


def to_disk(save: Callable, path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        save(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def from_disk(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def each(function: Callable, arrays: dict[str, np.ndarray]) -> None:
    for array in arrays.values():
        function(array.data.cast("B"))


def main() -> None:
    arrays = state()
    folder = tempfile.TemporaryDirectory(dir=".")
    plain, deflated = Path(folder.name) / "plain.npz", Path(folder.name) / "deflated.npz"
    store = CheckpointStore(Path(folder.name) / "store", keep=1)
    ways = {
        "write: numpy.savez": lambda: to_disk(np.savez, plain, arrays),
        "write: numpy.savez_compressed": lambda: to_disk(np.savez_compressed, deflated, arrays),
        "write: a checkpoint": lambda: store.write(1, Snapshot(arrays)),
        "of which crc32": lambda: each(zlib.crc32, arrays),
        "of which sha256": lambda: each(lambda data: hashlib.sha256(data).digest(), arrays),
        "read: numpy.savez": lambda: from_disk(plain),
        "read: numpy.savez_compressed": lambda: from_disk(deflated),
        "read: a checkpoint": store.newest,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - start)
    size = plain.stat().st_size
    sizes = {"write: numpy.savez": 1.0, "write: numpy.savez_compressed": deflated.stat().st_size / size}
    sizes["write: a checkpoint"] = (store.paths()[-1] / "arrays.npz").stat().st_size / size
    rows = []
    for name, seconds in best.items():
        base = best["read: numpy.savez" if name.startswith("read") else "write: numpy.savez"]
        share = f"{sizes[name]:.2f}" if name in sizes else ""
        rows.append((name, f"{1e3 * seconds:.0f}", f"{seconds / base:.2f}", share))
    write("checkpoint_formats", "Formats of a checkpoint of 96 MB", ("way", "ms", "ratio", "size"), rows)
    store.close()
    folder.cleanup()


main()
