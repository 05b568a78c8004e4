"""Accuracy lost with a large batch, and the part that a scaled learning rate recovers.

MNIST with the net of the tutorial's table (784-256-256-10): Adam with the square root of the batch ratio and SGD with momentum 0.9 with
the batch ratio, each against an unscaled rate. The first 10,000 images of CIFAR-10 with the CNN of ``examples/cifar10``: Adam only. All
runs of a data set train on the same rows equally often, so a larger batch makes fewer steps. Two replicas on one device. Accuracy is that
on the 10,000 test images after the last epoch: the mean of the seeds, in brackets minimum and maximum. Needs LOCKSTEP_DATA.

``--net mnist`` or ``--net cifar10`` runs one of them; ``--quick`` runs one batch and one seed, and keeps no results.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from curves import Panel, decades, draw
from results_file import write

import lockstep
from lockstep.callbacks import LearningRateScaling

ROOT = Path(__file__).parents[1]
NETS = {  # example, batches, epochs, epochs of the warm-up, seeds, optimizers
    "mnist": ("mnist_table", (64, 128, 256, 512, 1024, 2048, 4096), 5, 1, (0, 1), ("Adam", "SGD")),
    "cifar10": ("cifar10", (64, 512), 5, 2, (0,), ("Adam",)),
}
OPTIMIZERS = {  # how it is made, and its rule
    "Adam": (lambda: keras.optimizers.Adam(1e-3), "sqrt"),
    "SGD": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), "linear"),
}
COLUMNS = ("net", "optimizer", "batch", "steps", "rate stays", "scaled", "rate at the end", "gained, points", "s a run")


def example(net):
    """Data and function that builds the model, of the example that has them."""
    name = NETS[net][0]
    sys.path.insert(0, str(ROOT / "examples" / name))
    sys.modules.pop("model", None)
    try:
        import model
    finally:
        sys.path.pop(0)
    loaded = model.load()
    return loaded[0], loaded[-1], model.build


def trained(net, data, optimizer, batch, seed, *, is_scaled):
    """Accuracy on the test data, the last learning rate, and seconds."""
    training, test, build = data
    _, batches, epochs, warm_up, *_ = NETS[net]
    make, rule = OPTIMIZERS[optimizer]
    keras.utils.set_random_seed(seed)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = build()
        model.compile(make(), model.loss, metrics=["accuracy"])
    callbacks = [LearningRateScaling(batches[0], rule, warm_up)] if is_scaled else []
    begun = time.perf_counter()
    model.fit(*training, batch_size=batch, epochs=epochs, verbose=0, callbacks=callbacks)
    seconds = time.perf_counter() - begun
    accuracy = model.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    return accuracy, float(model.optimizer.learning_rate), seconds


def rows_of(net, *, is_quick):
    """A line of the table for each optimizer and batch, as dicts with all accuracies."""
    data = example(net)
    _, batches, epochs, _, seeds, optimizers = NETS[net]
    if is_quick:
        batches, seeds = batches[1:2], seeds[:1]
    found = []
    for optimizer in optimizers:
        for batch in batches:
            ways = {}
            for is_scaled in (
                (False, True) if batch != NETS[net][1][0] else (False,)
            ):  # At the base batch both are one run.
                runs = [trained(net, data, optimizer, batch, seed, is_scaled=is_scaled) for seed in seeds]
                ways[is_scaled] = list(zip(*runs, strict=True))
            steps = epochs * -(-len(data[0][0]) // batch)
            found.append({"net": net, "optimizer": optimizer, "batch": batch, "steps": steps, "ways": ways})
            print(json.dumps(line(found[-1])), flush=True)
    return found


def line(row):
    """One line of the table."""
    stays, scaled = row["ways"][False], row["ways"].get(True)
    seconds = statistics.median([*stays[2], *(scaled[2] if scaled else ())])
    gained = "" if scaled is None else f"{100 * (statistics.mean(scaled[0]) - statistics.mean(stays[0])):+.1f}"
    rate = f"{(scaled or stays)[1][0]:.4g}"
    shown = (percent(stays[0]), percent(scaled[0]) if scaled else "", rate, gained, f"{seconds:.0f}")
    return tuple(row[name] for name in COLUMNS[:4]) + shown


def percent(accuracies):
    mean = f"{100 * statistics.mean(accuracies):.1f} %"
    return mean if len(accuracies) == 1 else f"{mean} ({100 * min(accuracies):.1f} … {100 * max(accuracies):.1f})"


def picture(net, rows):
    """Shares of wrong answers over batches, one panel an optimizer."""
    panels = []
    for optimizer in NETS[net][-1]:
        own = [row for row in rows if row["optimizer"] == optimizer]
        curves = {"the rate stays": [], "scaled": []}
        for row in own:
            for name, is_scaled in (("the rate stays", False), ("scaled", True)):
                accuracies = row["ways"].get(is_scaled, row["ways"][False])[0]
                curves[name].append((row["batch"], 100 * (1 - statistics.mean(accuracies))))
        errors = [error for points in curves.values() for _, error in points]
        is_wide = max(errors) > 10 * min(errors)  # The finer ticks would stand on each other.
        values = (1, 2, 5, 10, 20, 50, 100) if is_wide else (1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 100)
        shown = decades(errors, {value: f"{value} %" for value in values})
        panels.append(Panel(f"{optimizer}: wrong", "rows of a batch", {b: str(b) for b in NETS[net][1]}, shown, curves))
    path = Path(__file__).parent / "results" / f"learning_rate_scaling_{net}.svg"
    draw(path, f"Large batches on {net}, with and without scaling", panels, ("the rate stays", "scaled"))


def keep(net, rows):
    name, batches, epochs, warm_up, seeds, optimizers = NETS[net]
    rules = ", ".join(f"{optimizer} {rule}" for optimizer, (_, rule) in OPTIMIZERS.items() if optimizer in optimizers)
    note = f"The net and data of `examples/{name}`; {epochs} epochs, the first {warm_up} of which warm up; rules: {rules}, from a batch of "
    note += f"{batches[0]}; seeds: {', '.join(map(str, seeds))}. The machine had other work, so seconds are no more than a hint.\n\n"
    note += f"![Wrong answers](learning_rate_scaling_{net}.svg)"
    title = f"Accuracy of large batches on {net}, with and without scaling"
    write(f"learning_rate_scaling_{net}", title, COLUMNS, [line(row) for row in rows], note, arguments=["--net", net])
    picture(net, rows)


def cost():
    """Microseconds of a step of fit, on the net of MNIST with 64 rows, without the callback and within its warm-up."""
    training, _, build = example("mnist")
    x, y = (part[: 64 * 200] for part in training)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = build()
    found = {"without": [], "in the warm-up": []}
    for number in range(8):
        for name, times in found.items():
            callbacks = [] if name == "without" else [LearningRateScaling(8, "sqrt", 1)]
            begun = time.perf_counter()
            model.fit(x, y, batch_size=64, verbose=0, callbacks=callbacks)
            if number:  # The first also compiles.
                times.append((time.perf_counter() - begun) / 200 * 1e6)
            model.optimizer.learning_rate = 1e-3
    medians = tuple(round(statistics.median(times)) for times in found.values())
    note = "Medians of 7 turns of 200 steps, 64 rows, on one device; the machine had other work."
    title = "A step of fit with LearningRateScaling"
    write("learning_rate_scaling_cost", title, ("without, us", "in the warm-up, us"), [medians], note)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=[*NETS], help="by default all")
    parser.add_argument("--quick", action="store_true", help="one batch and one seed; nothing is kept")
    parser.add_argument("--cost", action="store_true", help="what a step of the warm-up costs, instead")
    chosen = parser.parse_args()
    if chosen.cost:
        cost()
        return
    for net in [chosen.net] if chosen.net else NETS:
        rows = rows_of(net, is_quick=chosen.quick)
        if not chosen.quick:
            keep(net, rows)


if __name__ == "__main__":
    main()
