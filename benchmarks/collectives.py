"""Claim: the time of each all-reduce follows from its bytes and rounds; ``jax.lax.psum`` in the same run is the reference.

Four logical CPU devices. Sizes and algorithms take turns in rounds; the result is the median of each. The time of a program without an
all-reduce is subtracted before the cost model is fitted. The model then predicts 8 to 4,096 devices on a network whose values are
stated below.
"""

import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from curves import Panel, decades, draw
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from results_file import write

import lockstep
from lockstep.collectives import ALGORITHMS, ops_from_argument
from lockstep.collectives.cost_model import (
    FORMULAS,
    AllReduceMeasurement,
    Network,
    NetworkLink,
    fit_network,
    predict_seconds,
)

DEVICES, ROUNDS, SECONDS = 4, 25, 0.02  # Each measurement repeats a call for at least so many seconds.
SIZES = {1_000: "1 KB", 10_000: "10 KB", 100_000: "100 KB", 1_000_000: "1 MB", 10_000_000: "10 MB"}
TIMES = {10.0**-e: t for e, t in ((5, "10 µs"), (4, "100 µs"), (3, "1 ms"), (2, "10 ms"), (1, "100 ms"), (0, "1 s"))}
TIMES |= {1e1: "10 s", 1e2: "100 s", 1e3: "1000 s"}
PSUM, NOTHING = "jax.lax.psum", "nothing"
RESULTS, DOCS = Path(__file__).parent / "results", Path(__file__).parents[1] / "docs"
SENT = ("halving_doubling", "hierarchical_copy", "reduce_to_one", "ring")  # Made of messages, so the model is theirs.
# Stated, not measured: machines on a network of 10 Gbit/s; and eight GPUs a machine joined at 200 GB/s, machines at 400 Gbit/s.
ETHERNET = NetworkLink(50e-6, 1 / 1.25e9)
ACCELERATORS = Network(NetworkLink(5e-6, 1 / 200e9), NetworkLink(20e-6, 1 / 50e9), 8, seconds_per_added_byte=1 / 1000e9)


def program(name, devices):
    """A compiled all-reduce of one vector, and how to lay a vector over the devices."""
    mesh, cut = Mesh(np.asarray(devices), ("device",)), PartitionSpec("device")
    ops = ops_from_argument(name if name in ALGORITHMS else None)

    def meet(pieces):
        if name == NOTHING:
            return pieces
        if name == PSUM:
            return jax.lax.psum(pieces, "device")
        return ops.all_reduce([pieces[0]], "device", devices)[0][None]

    run = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    return run, NamedSharding(mesh, cut)


def measure():
    """Median seconds by name and size."""
    devices = jax.local_devices()[:DEVICES]
    calls = {}
    for name in (NOTHING, PSUM, *ALGORITHMS):
        run, cut = program(name, devices)
        for size in SIZES:
            vector = jax.device_put(np.ones((DEVICES, size // 4), "float32"), cut)
            jax.block_until_ready(run(vector))
            calls[name, size] = (run, vector)
    times = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, (run, vector) in calls.items():
            times[key].append(once(run, vector))
    return {key: statistics.median(found) for key, found in times.items()}


def once(run, vector):
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        jax.block_until_ready(run(vector))
        count += 1
    return (time.perf_counter() - start) / count


def fitted(times):
    """The cost model of the messages, from what an algorithm takes beyond a program that adds nothing."""
    return fit_network(
        [
            AllReduceMeasurement(name, size, DEVICES, max(1e-7, beyond(times, name, size)))
            for name in SENT
            for size in SIZES
        ]
    )


def beyond(times, name, size):
    return times[name, size] - times[NOTHING, size]


def table(times, network):
    """Rows of milliseconds, effective bandwidth (bytes of the vector a second), ratio to psum, and what the model says."""
    rows = []
    for name in (PSUM, *ALGORITHMS):
        for size, text in SIZES.items():
            seconds = times[name, size]
            model = times[NOTHING, size] + predict_seconds(name, size, DEVICES, network) if name in SENT else None
            rows.append(
                (
                    name,
                    text,
                    round(1e3 * seconds, 3),
                    round(size / seconds / 1e9, 3),
                    round(seconds / times[PSUM, size], 2),
                    round(1e3 * model, 3) if model else "",
                )
            )
    return rows


def draw_measured(times, title):
    names = (PSUM, *ALGORITHMS)
    seconds = {name: [(size, times[name, size]) for size in SIZES] for name in names}
    rates = {name: [(size, size / times[name, size]) for size in SIZES] for name in names}
    speeds = {
        10.0**e: text for e, text in ((6, "1 MB/s"), (7, "10 MB/s"), (8, "100 MB/s"), (9, "1 GB/s"), (10, "10 GB/s"))
    }
    panels = [
        panel("Time of an all-reduce", "bytes on each device", SIZES, TIMES, seconds),
        panel("Effective bandwidth", "bytes on each device", SIZES, speeds, rates),
    ]
    draw(RESULTS / "collectives.svg", title, panels, (PSUM, *ALGORITHMS))


def draw_predicted(path, network, sizes):
    counts = {8: "8", 64: "64", 512: "512", 4096: "4096"}
    steps = [2**power for power in range(3, 13)]
    names = [name for name in FORMULAS if name not in ("auto", "nccl")]
    panels = []
    for size, text in sizes.items():
        curves = {name: [(n, predict_seconds(name, size, n, network)) for n in steps] for name in names}
        panels.append(panel(f"Predicted time for {text}", "devices", counts, TIMES, curves))
    draw(path, "Predicted time of an all-reduce for 8 to 4,096 devices", panels, (PSUM, *ALGORITHMS))


def panel(title, x_label, x_ticks, y_ticks, curves):
    values = [y for points in curves.values() for _, y in points]
    return Panel(title, x_label, x_ticks, decades(values, y_ticks), curves)


def describe(network, error):
    within = network.within
    return (
        f"The cost model of {', '.join(SENT)}, fitted to what they take beyond a program that adds nothing: "
        f"{1e6 * within.latency:.1f} µs a message, {1e9 * within.seconds_per_byte:.3f} ns a byte sent, "
        f"{1e9 * network.seconds_per_added_byte:.3f} ns a byte added; median error {100 * error:.0f} % on the same times. The others call "
        "the platform's collectives, which between CPU devices send no messages: threads add what lies in common memory."
        "\n\n![Time and bandwidth by size](collectives.svg)"
    )


def main():
    lockstep.config.set_logical_cpu_devices(DEVICES)
    times = measure()
    network, error = fitted(times)
    columns = ("algorithm", "bytes on each device", "ms", "GB/s", "time / psum", "model, ms")
    title = f"All-reduce on {DEVICES} logical CPU devices"
    write("collectives", title, columns, table(times, network), describe(network, error))
    draw_measured(times, title)
    per_byte, added = network.within.seconds_per_byte, network.seconds_per_added_byte
    cluster = Network(NetworkLink(network.within.latency, per_byte), ETHERNET, DEVICES, added)
    draw_predicted(DOCS / "collectives_cpus.svg", cluster, {10_000: "10 KB", 100_000_000: "100 MB"})
    draw_predicted(DOCS / "collectives_accelerators.svg", ACCELERATORS, {10_000: "10 KB", 100_000_000: "100 MB"})


if __name__ == "__main__":
    main()
