"""``lockstep test``: check every pair of workers with an all-reduce, and measure bandwidth and clock offsets.

Every worker runs this module: ``lockstep run -n 2 -m lockstep.tools.cluster_check`` on one machine, or the command of a
scheduler. The chief prints the report.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TextIO

os.environ.setdefault("KERAS_BACKEND", "jax")  # This module runs as a program.

import jax
import numpy as np

from lockstep._errors import DONE, USER_ERROR
from lockstep.devices.placement import Placement, placement_on
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.worker_process_group import sum_over_workers

SIZES = (1_000, 1_000_000, 16_000_000)  # bytes of each worker's array
PAIR_SECONDS = 20.0  # limit for all measurements of one pair
_ROUNDS = 5

Reduce = Callable[[Placement, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ClusterMeasurement:
    """Result of an all-reduce over some workers.

    Args:
        workers: their numbers.
        seconds: for each size the median time of an all-reduce.
        error: description of a failure; None on success.
    """

    workers: tuple[int, ...]
    seconds: tuple[float, ...] = ()
    error: str | None = None


def measure(
    devices: list[jax.Device], workers: tuple[int, ...], index: int, reduce: Reduce = sum_over_workers
) -> ClusterMeasurement:
    """Check and time all-reduces over some workers, with one device of each."""
    placement = placement_on(devices, len(devices))
    medians = []
    for size in SIZES:
        own = np.full(size // 4, index + 1, np.float32)
        expected = sum(worker + 1 for worker in workers)
        times = []
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            found = reduce(placement, own)
            times.append(time.perf_counter() - begun)
            wrong = found[found != expected]
            if wrong.size:
                return ClusterMeasurement(
                    workers, error=f"{wrong.size} of {found.size} sums are wrong: expected {expected}, got {wrong[0]}"
                )
        medians.append(statistics.median(times))
    return ClusterMeasurement(workers, tuple(medians))


def _within_limit(
    measurement: Callable[[], ClusterMeasurement], workers: tuple[int, ...], seconds: float
) -> ClusterMeasurement:
    found: list[ClusterMeasurement] = []

    def run() -> None:
        try:
            found.append(measurement())
        except Exception as error:
            found.append(ClusterMeasurement(workers, error=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else ClusterMeasurement(workers, error=f"no result within {seconds:.0f} s")


def run_cluster_check(
    client: ControlClient, devices: list[jax.Device], reduce: Reduce = sum_over_workers, seconds: float = PAIR_SECONDS
) -> tuple[list[ClusterMeasurement], list[float]]:
    """Measure every pair of workers, then all workers, with one device of each, in their order; every worker calls this function.

    One measurement takes at most ``seconds``.

    Returns:
        The measurements, those of pairs first, and the offset of each clock from the chief's in seconds.
    """
    count, index = client.group.workers, client.group.index
    groups: list[tuple[int, ...]] = list(combinations(range(count), 2))
    groups += [tuple(range(count))] if count > 2 else []
    found = []
    for workers in groups:
        own = ClusterMeasurement(workers)
        if index in workers:
            chosen = [devices[worker] for worker in workers]
            own = _within_limit(partial(measure, chosen, workers, index, reduce), workers, seconds)
        every = client.gather(f"workers {workers}", [own.seconds, own.error], timeout_seconds=2 * seconds)
        errors = [f"worker {number}: {every[number][1]}" for number in workers if every[number][1]]
        found.append(ClusterMeasurement(workers, tuple(every[workers[0]][0]), "; ".join(errors) or None))
        if any("no result" in error for error in errors):
            break  # The hanging collective would block the remaining ones.
    client.barrier("the clocks")
    clocks = client.gather("the clocks", time.time())
    return found, [clock - clocks[0] for clock in clocks]


def report(measured: list[ClusterMeasurement], clocks: list[float], stream: TextIO) -> bool:
    """Write the report; return whether every measurement succeeded."""
    stream.write(f"{'workers':<12}" + "".join(f"{f'all-reduce of {size // 1000:,} kB':>25}" for size in SIZES) + "\n")
    for one in measured:
        name = "-".join(map(str, one.workers))
        if one.error:
            stream.write(f"{name:<12} FAILED: {one.error}\n")
            continue
        cells = [f"{1e3 * t:.2f} ms {size / t / 1e6:6.0f} MB/s" for t, size in zip(one.seconds, SIZES, strict=True)]
        stream.write(f"{name:<12}{''.join(f'{cell:>25}' for cell in cells)}\n")
    ahead = ", ".join(f"worker {number} {1e3 * seconds:+.1f} ms" for number, seconds in enumerate(clocks) if number)
    stream.write(f"clocks against worker 0: {ahead}\n")
    failed = [one for one in measured if one.error]
    for one in failed:
        stream.write(f"Workers {' and '.join(map(str, one.workers))} cannot connect, or computed wrong sums.\n")
    if not failed:
        stream.write("Every pair of workers computed correct sums.\n")
    stream.flush()
    return not failed


def main() -> int:
    """Join the cluster that the environment names, and test it; return the exit code."""
    from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(check_every=0)
    client = strategy._control_client
    if client is None:
        sys.stderr.write(
            "lockstep test: there is only one worker, so there is nothing to test. Fix: run lockstep test -n 2, or start it on each "
            "machine by your scheduler.\n"
        )
        return 2
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    measured, clocks = run_cluster_check(client, [firsts[worker] for worker in range(client.group.workers)])
    is_right = report(measured, clocks, sys.stdout) if client.group.is_chief else not any(one.error for one in measured)
    if not is_right:
        client.barrier("the report")
        os._exit(USER_ERROR)  # A thread may hang in a collective.
    return DONE


if __name__ == "__main__":
    sys.exit(main())
