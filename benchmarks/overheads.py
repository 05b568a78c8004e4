"""Host time of a step, time of the first step, and memory of a run: Lockstep compared with plain Keras.

Host time: the wall time of a step of ``fit`` less that of the bare compiled step in a loop, on a model that computes almost nothing
(``steps.py``), on one CPU device. Both programs of a row take turns; a figure is the median of the turns, and so is the
ratio of the host times. First step and memory: each in a fresh process, in turns, for the nets and batches of ``peers.py``, each kept as soon as it is measured; the first step is
the time from building the model to the end of a ``fit`` of one batch (it traces and compiles), a step that of later calls, the memory
the process's greatest after them. How many rows the input delivers is in ``feed.py``.

The host takes half an hour, most of it for compiling 5,000 variables, and the first steps an hour, half of it for MobileNetV2. ``--quick`` uses fewer variables and turns, and keeps no results.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import keras
import numpy as np
import results_file
from curves import Panel, draw
from steps import Steps, scalars

import lockstep

ROWS, SECONDS = 64, 0.3  # of a batch; of an epoch
REPLICAS, VARIABLES = (1, 2, 8, 64), (10, 20, 100, 1000, 5000)
USUAL = 2, 20  # replicas, and variables where it is the replicas that grow
GOALS = {(2, 20): 150, (2, 5000): 3000}  # us of the host a step
MILLISECONDS = {0.01: "0.01", 0.1: "0.1", 1.0: "1", 10.0: "10", 100.0: "100"}
# The rows of a batch, and steps that are timed; the first step is that of the first of them. These are the cases of peers.py.
NETS = {
    "mnist": {64: 400, 256: 200, 512: 100},
    "reuters": {32: 100, 256: 20},
    "cifar": {128: 15},
    "transformer": {64: 15},
    "mobilenet": {32: 15},
}
ONE, TWO = ["cpu:0"], ["cpu:0", "cpu:1"]
WAYS = {"Keras": None, "1 replica": (ONE, 1), "2 replicas": (ONE, 2), "4 replicas": (ONE, 4), "2 devices": (TWO, 2)}
COLUMNS = ("replicas", "variables", "fit, us", "bare step, us", "host, us", "Keras: fit, us", "Keras: bare step, us")
COLUMNS += ("Keras: host, us", "host / Keras's", "goal", "reached")
COLUMNS_OF_FIRST = ("net", "way", "first step, s", "first step / Keras's", "its CPU time / Keras's")
COLUMNS_OF_FIRST += ("memory, MB", "memory / Keras's")
COLUMNS_OF_FIRST += ("rows: step, ms", "rows: step / Keras's")


# --- the host's side of a step --------------------------------------------------------------------------------------------


def steps_of(variables, replicas):
    """The model with so many variables; plain Keras where ``replicas`` is None."""
    strategy = replicas and lockstep.MirroredStrategy(["cpu:0"], replicas=replicas)
    if strategy is None:
        model = compiled(variables)
    else:
        with strategy.scope():
            model = compiled(variables)
    x = np.zeros((ROWS, 1), "float32")
    steps = Steps(model, strategy, x, x, ROWS)
    wanted = max(50, min(500, int(SECONDS / steps.bare())))
    steps.data, steps.batches = (np.zeros((ROWS * wanted, 1), "float32"),) * 2, wanted
    return steps


def compiled(variables):
    model = scalars(variables)
    model.compile("sgd", "mse")
    return model


def host_times(variables, replicas, turns):
    """For each number of replicas, and for None (plain Keras), a list of (fit, bare, host) in microseconds."""
    ways = {number: steps_of(variables, number) for number in (None, *replicas)}
    found = {number: [] for number in ways}
    for _ in range(turns):
        for number, steps in ways.items():
            fit, bare = 1e6 * steps.in_fit(), 1e6 * steps.bare()
            found[number].append((fit, bare, fit - bare))
    return found


def row(replicas, variables, ours, keras_times, host_of_one=None):
    """One line of the table; ``host_of_one`` is the host time of one replica, where that is compared."""
    own, plain = ([statistics.median(each) for each in zip(*times, strict=True)] for times in (ours, keras_times))
    ratio = statistics.median(a[2] / b[2] for a, b in zip(ours, keras_times, strict=True))
    goal, is_reached = "", ""
    if (replicas, variables) in GOALS:
        limit = GOALS[replicas, variables]
        goal, is_reached = f"at most {limit:,} us", "yes" if own[2] <= limit else "no"
    elif host_of_one is not None:
        goal = f"less than {replicas} x one replica"
        is_reached = "yes" if own[2] < replicas * host_of_one else "no"
    numbers = [round(number) for number in (*own, *plain)]
    return dict(zip(COLUMNS, (replicas, variables, *numbers, round(ratio, 2), goal, is_reached), strict=True))


def host_rows(variables, turns):
    usual_replicas, usual_variables = USUAL
    times = host_times(usual_variables, REPLICAS, turns)
    of_one = statistics.median(host for _, _, host in times[1])
    rows = [row(n, usual_variables, times[n], times[None], of_one if n > 1 else None) for n in REPLICAS]
    for count in variables:
        if count != usual_variables:
            times = host_times(count, (usual_replicas,), turns)
            rows.append(row(usual_replicas, count, times[usual_replicas], times[None]))
    return rows


# --- the first step, and memory -------------------------------------------------------------------------------------------


def child(net, way):
    """In a process of its own: train, and print the seconds to the end of the first step, milliseconds of a later one and the greatest memory in MB."""
    from nets import build
    from rows import rows

    topology = WAYS[way]
    first_batch, *_ = NETS[net]
    x, y = rows(net, max(batch * steps for batch, steps in NETS[net].items()))
    strategy = topology and lockstep.MirroredStrategy(topology[0], replicas=topology[1])
    keras.random.uniform(())  # JAX has started.
    begun, cpu_begun = time.perf_counter(), time.process_time()
    if strategy:
        with strategy.scope():
            model = build(net)
    else:
        model = build(net)
    model.fit(x[:first_batch], y[:first_batch], batch_size=first_batch, verbose=0)
    found = {"first": time.perf_counter() - begun, "first on CPUs": time.process_time() - cpu_begun}
    for batch, steps in NETS[net].items():
        times = []
        for _ in range(4):  # The first of them may compile.
            begun = time.perf_counter()
            model.fit(x[: batch * steps], y[: batch * steps], batch_size=batch, verbose=0)
            times.append(1000 * (time.perf_counter() - begun) / steps)
        found[f"step of {batch}"] = min(times)
    print(json.dumps(found | {"memory": greatest_memory()}))


def greatest_memory():
    """Megabytes that this program has had at most; ``ru_maxrss`` would also count what its parent had when it started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def first_rows(net, turns):
    """The rows of one net."""
    found = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            command = [sys.executable, __file__, "--child", net, way]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
            found[way].append(json.loads(ended.stdout.splitlines()[-1]))
    rows = []
    for way, each in found.items():
        figures = {
            name: _figures([one[name] for one in each], [one[name] for one in found["Keras"]]) for name in each[0]
        }
        (first, first_ratio), (memory, memory_ratio) = figures["first"], figures["memory"]
        steps = {batch: figures[f"step of {batch}"] for batch in NETS[net]}
        times = "; ".join(f"{batch}: {step:.3g}" for batch, (step, _) in steps.items())
        ratios = "; ".join(f"{batch}: {ratio:.2f}" for batch, (_, ratio) in steps.items())
        ratios_of_first = round(first_ratio, 2), round(figures["first on CPUs"][1], 2)
        rows.append((net, way, round(first, 2), *ratios_of_first, round(memory), round(memory_ratio, 2), times, ratios))
    return rows


def _figures(ours, keras_ones):
    """The median, and the median of the ratios of the turns."""
    return statistics.median(ours), statistics.median(one / other for one, other in zip(ours, keras_ones, strict=True))


# --- keeping --------------------------------------------------------------------------------------------------------------


def picture(rows):
    usual_replicas, usual_variables = USUAL
    sights = (
        (f"Host's ms a step, {usual_replicas} replicas", "variables", "replicas", (10, 100, 1000, 10000)),
        (f"Host's ms a step, {usual_variables} variables", "replicas", "variables", REPLICAS),
    )
    panels = []
    for title, grows, stays, ticks in sights:
        chosen = [row for row in rows if row[stays] == dict(replicas=usual_replicas, variables=usual_variables)[stays]]
        chosen.sort(key=lambda row: row[grows])
        curves = {
            name: [(row[grows], max(0.01, row[column] / 1000)) for row in chosen]
            for name, column in (("Lockstep", "host, us"), ("Keras", "Keras: host, us"))
        }
        panels.append(Panel(title, grows, {tick: f"{tick:,}" for tick in ticks}, MILLISECONDS, curves))
    path = Path(__file__).parent / "results" / "overheads.svg"
    draw(path, "The host's side of a training step", panels, ("Lockstep", "Keras"))


def keep_host(rows):
    note = "Host: a step of `fit` less the bare compiled step; Keras runs on one device. 64 rows, SGD. Rows a second of the input: "
    note += "`feed.md`. First step and memory: `overheads_first_step.md`.\n\n![Host time](overheads.svg)"
    lines = [tuple(row.values()) for row in rows]
    results_file.write("overheads", "The host's side of a training step", COLUMNS, lines, note)
    picture(rows)


def keep_first(net, rows):
    """Keep the rows of a net beside those of the others."""
    note = "Medians of three turns; a ratio is the median of their ratios. The first step holds building, tracing and compiling; its CPU time is that of all threads, which other work on the machine changes less; a step is that of the fastest of four later calls of `fit`; memory is the "
    note += "greatest of the process, with Python, Keras and JAX in it."
    path = Path(__file__).parent / "results" / "overheads_first_step.json"
    known = [tuple(row.values()) for row in json.loads(path.read_text())["rows"] if tuple(row) == COLUMNS_OF_FIRST]
    order = {(net, way): number for number, (net, way) in enumerate((net, way) for net in NETS for way in WAYS)}
    lines = sorted([*(row for row in known if row[0] != net), *rows], key=lambda row: order[row[:2]])
    arguments = ["--only", "first_step"]
    results_file.write("overheads_first_step", "The first step, and memory", COLUMNS_OF_FIRST, lines, note, arguments)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer variables and turns; nothing is kept")
    parser.add_argument("--only", choices=("host", "first_step"), help="the other result stays as it is")
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="of the first step; the rows of others stay"
    )
    parser.add_argument("--child", nargs=2, metavar=("NET", "WAY"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(*chosen.child)
    else:
        measure(chosen.only, chosen.nets, is_quick=chosen.quick)


def measure(only, nets, *, is_quick):
    rows = [] if only == "first_step" else host_rows(VARIABLES[:3] if is_quick else VARIABLES, 2 if is_quick else 7)
    if rows and not is_quick:
        keep_host(rows)
    shown = list(rows)
    for net in [] if only == "host" else nets:
        first = first_rows(net, 1 if is_quick else 3)
        shown += [dict(zip(COLUMNS_OF_FIRST, line, strict=True)) for line in first]
        if not is_quick:
            keep_first(net, first)
    if is_quick:
        for line in shown:
            print(json.dumps(line))


if __name__ == "__main__":
    main()
