"""Claims: asynchronous training needs no more rows for the accuracy of synchronous training; a slow worker does not delay the others.

Each case is a job, ``lockstep run --workers W --servers 1``, which runs this file again (``--train``); the synchronous cases are one
process with as many replicas. Data, seed, epochs, batch and optimizer are the same. Accuracy is that on the test data. Needs LOCKSTEP_DATA.

For a slow worker each batch sleeps inside ``train_step``, between pull and push, so that two cores suffice for four workers. Rates are
those of the last epoch, after all compilation.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
ROOT = Path(__file__).parents[1]

NETS = {"mnist_table": {"batch_size": 128, "epochs": 3}, "reuters": {"batch_size": 32, "epochs": 5}}
SEEDS = (0, 1, 2)
SYNCHRONOUS = (1, 2, 4)  # replicas
ASYNCHRONOUS = ((1, None), (2, None), (4, None), (2, 2), (2, 0))  # workers, max_staleness
DEADLINE = 600.0  # seconds of one job

COMPUTE = 0.04  # seconds of a batch
STEPS = 600  # updates of an epoch
SLOW = {
    "3 workers": ([1, 1, 1], None),
    "3 workers and one 10 times slower": ([1, 1, 1, 10], None),
    "the same, max_staleness=4": ([1, 1, 1, 10], 4),
    "4 workers": ([1, 1, 1, 1], None),
}


# --- one job --------------------------------------------------------------------------------------------------------------


def train(given):
    """What each process does: train once, and let the chief say what has come of it."""
    import keras

    import lockstep

    keras.utils.set_random_seed(given.seed)
    if given.replicas:
        strategy = lockstep.MirroredStrategy(replicas=given.replicas)
    else:
        strategy = lockstep.ParameterServerStrategy(max_staleness=given.max_staleness)
    found = slow(given, strategy) if given.slow else accurate(given, strategy)
    if given.replicas or strategy.is_chief:
        Path(given.out).write_text(json.dumps(found))


def accurate(given, strategy):
    sys.path.insert(0, str(ROOT / "examples" / given.net))
    from model import build, load

    data = load()
    (x, y), (x_test, y_test) = data[0], data[-1]
    with strategy.scope():
        model = build()
    begun = time.perf_counter()
    history = model.fit(x, y, **NETS[given.net], verbose=0).history
    seconds = time.perf_counter() - begun
    accuracy = model.evaluate(x_test, y_test, batch_size=500, verbose=0)[1]
    return {"accuracy": accuracy, "seconds": seconds, "history": history}


def slow(given, strategy):
    import jax
    import keras
    import numpy as np

    factors = [int(each) for each in given.slow.split(",")]
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    seconds = COMPUTE * factors[task["index"]] if task["type"] == "worker" else 0.0

    def sleep(x):
        time.sleep(seconds)
        return np.asarray(x)

    class Sleeper(keras.Sequential):
        def train_step(self, state, data):
            x, y = data
            x = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return super().train_step(state, (x, y))

    with strategy.scope():
        model = Sleeper([keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(STEPS, 8)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=1, epochs=2, verbose=0).history
    return {"history": history}


def job(workers, *words):
    """Run one job, and give what its chief has said, with the lines about its epochs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        start = ["-m", "lockstep.cli", "run", "--workers", str(workers), "--servers", "1"] if workers else []
        command = [sys.executable, *start, __file__, "--train", "--out", str(out), *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE)
        if done.returncode:
            sys.exit(done.stdout)
        found = json.loads(out.read_text())
    found["spread"] = [histogram(line) for line in done.stdout.splitlines() if "by staleness:" in line]
    return found


def histogram(line):
    """How many gradients missed how many updates, in one epoch."""
    pairs = line.rpartition("by staleness: ")[2].split(", ")
    return {} if pairs == ["none"] else {int(age): int(count) for age, count in (pair.split(": ") for pair in pairs)}


# --- tables ---------------------------------------------------------------------------------------------------------------


def measure_accuracy(net):
    """Rows of the table, and for the picture the accuracy of each way."""
    ways = {f"synchronous, {count} replica{'s' * (count > 1)}": (0, ["--replicas", count]) for count in SYNCHRONOUS}
    for workers, bound in ASYNCHRONOUS:
        name = f"{workers} worker{'s' * (workers > 1)}, max_staleness={bound}"
        ways[name] = workers, [] if bound is None else ["--max-staleness", bound]
    runs = {name: [] for name in ways}
    for seed in SEEDS:  # Ways take turns, as other work on the machine comes and goes.
        for name, (workers, words) in ways.items():
            runs[name].append(job(workers, "--net", net, "--seed", seed, *words))
            print(f"{net}, {name}, seed {seed}: {runs[name][-1]['accuracy']:.4f}", file=sys.stderr, flush=True)
    base = [run["accuracy"] for run in runs["synchronous, 1 replica"]]
    return [(net, name, *described(found, base)) for name, found in runs.items()]


def described(found, base):
    own = [100 * run["accuracy"] for run in found]
    off = round(statistics.mean(own) - 100 * statistics.mean(base), 2) + 0.0  # No -0.00.
    accuracy = (f"{statistics.mean(own):.2f}", f"{min(own):.2f} … {max(own):.2f}", f"{off:+.2f}")
    seconds = f"{statistics.median(run['seconds'] for run in found):.0f}"
    if "updates_per_sec" not in found[0]["history"]:
        return (*accuracy, seconds, "", "", "", "")
    last = {
        key: statistics.median(run["history"][key][-1] for run in found) for key in ("updates_per_sec", "bytes_per_sec")
    }
    return *accuracy, seconds, f"{last['updates_per_sec']:.0f}", f"{last['bytes_per_sec'] / 1e6:.1f}", *ages(found)


def ages(found):
    """Mean staleness, and its spread in percent, over all epochs but the first."""
    total = {}
    for run in found:
        for spread in run["spread"][1:]:
            for age, count in spread.items():
                total[age] = total.get(age, 0) + count
    if not total:
        return "", ""
    every = sum(total.values())
    shown = {str(age): total.get(age, 0) for age in range(6)}
    shown["more"] = every - sum(shown.values())
    shares = ", ".join(f"{age}: {100 * count / every:.1f}" for age, count in shown.items() if count)
    return f"{sum(age * count for age, count in total.items()) / every:.2f}", shares


def measure_slow():
    rows = []
    for name, (factors, bound) in SLOW.items():
        words = [] if bound is None else ["--max-staleness", bound]
        found = job(len(factors), "--slow", ",".join(map(str, factors)), *words)
        rate, spread = found["history"]["updates_per_sec"][-1], found["spread"][-1]
        mean = sum(age * count for age, count in spread.items()) / sum(spread.values())
        rows.append((name, f"{rate:.1f}", f"{mean:.1f}", max(spread)))
        print(*rows[-1], file=sys.stderr, flush=True)
    alone = float(rows[0][1])
    return [(*row, f"{float(row[1]) / alone:.2f}") for row in rows]


# --- picture --------------------------------------------------------------------------------------------------------------


def picture(rows):
    """For each net the share of errors of each way, by the number of workers."""
    from curves import Panel, draw

    panels = []
    for net in NETS:
        errors = {name: 100 - float(mean) for own, name, mean, *_ in rows if own == net}
        curves = {
            "synchronous": [
                (count, errors[f"synchronous, {count} replica{'s' * (count > 1)}"]) for count in SYNCHRONOUS
            ],
            "asynchronous": [
                (count, errors[f"{count} worker{'s' * (count > 1)}, max_staleness=None"]) for count in (1, 2, 4)
            ],
            "asynchronous, max_staleness=2": [(2, errors["2 workers, max_staleness=2"])],
            "asynchronous, max_staleness=0": [(2, errors["2 workers, max_staleness=0"])],
        }
        low, high = math.floor(min(errors.values())) - 0.5, math.ceil(max(errors.values())) + 0.5
        ticks = {low + (high - low) * part / 4: "" for part in range(5)}
        ticks = {value: f"{value:.2f}" for value in ticks}
        title = f"{net}: % of test rows that are wrong"
        panels.append(Panel(title, "workers or replicas", {1: "1", 2: "2", 4: "4"}, ticks, curves))
    path = Path(__file__).parent / "results" / "asynchronous.svg"
    draw(path, "Errors after as many rows", panels, tuple(panels[0].curves))


def write_accuracy():
    from results_file import write

    rows = [row for net in NETS for row in measure_accuracy(net)]
    columns = ("net", "way", "accuracy, %", "of all seeds", "against 1 replica", "seconds", "updates/s", "MB/s")
    columns += ("mean staleness", "gradients in % by the updates that they missed")
    nets = "; ".join(f"{net}: batches of {how['batch_size']}, {how['epochs']} epochs" for net, how in NETS.items())
    note = (
        f"{nets}; seeds {', '.join(map(str, SEEDS))}. Accuracy: mean over seeds, the lowest and the highest, and the difference of means. "
        "Seconds are those of fit, with compiling, in the median: all processes share the cores of one machine, and other work ran on it, "
        "so they do not tell what workers on machines of their own would do. Rates are those of the last epoch; staleness that of all "
        "epochs but the first, in which workers compile at different times.\n\n![Errors](asynchronous.svg)"
    )
    write("asynchronous", "Workers that do not wait for each other", columns, rows, note)
    picture(rows)


def write_slow():
    from results_file import write

    columns = ("case", "updates/s", "mean staleness", "largest", "against the three alone")
    note = (
        f"Batches of {1000 * COMPUTE:.0f} ms, {STEPS} updates. At the end of an epoch the chief waits for the last batch of the slow worker, "
        "which is in these rates."
    )
    write("asynchronous_slow_worker", "fit with one slow worker", columns, measure_slow(), note)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=("accuracy", "slow"), help="one of the two tables; both by default")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--net", choices=NETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument("--slow")
    return parser.parse_args()


def main():
    given = arguments()
    if given.train:
        train(given)
        return
    if given.part != "accuracy":
        write_slow()
    if given.part != "slow":
        write_accuracy()


if __name__ == "__main__":
    main()
