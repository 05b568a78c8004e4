"""Claim: `lockstep plan` says before a machine is rented which of these nets fit on it, how they are sharded best, and how fast they are.

Each net is compiled for each target and strategy, for a whole batch and for the last, uneven one; nothing is run. The largest batch is
searched for nets and targets that compile in seconds. ``python benchmarks/plan.py [TARGET [NET ...]]`` in the environment of
``./scripts/test-accelerators``. Rows of other targets and nets stay in the table.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
sys.path[:0] = [str(Path(__file__).parents[1])]

import keras
import numpy as np
from keras import layers
from results_file import write
from sharded import GPT2_MEDIUM, Positions, made

import lockstep
from benchmarks.accelerator import nets
from lockstep.tools.plan import estimate
from lockstep.tools.plan.hardware import parse_target
from lockstep.tools.plan.render import tables_of

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("target", "net", "strategy", "batch", "fits", "needs", "which is", "of", "largest batch"),
    *("weights", "optimizer", "gradients", "activations", "workspace"),
    *("TFLOP a device", "all-reduce", "all-gather", "reduce-scatter", "a step", "limited by"),
)
TARGETS = ("v5e:1", "v5e:2x4", "h100:1", "h100:8", "t4:1")
STRATEGIES = "replicated", "optimizer", "variables", "recompute"
LARGE = "GPT of 6.9 billion weights"  # It is planned on eight GPUs only.
# A step for TPUs, or of the large net, compiles for minutes.
OTHERS = {"v5e:2x4": ("replicated", "recompute"), LARGE: ("replicated", "recompute", "model-recompute")}
NOTE = (
    "Memory is that of one device. Time is an estimate from data sheets that no device has verified. Collectives: number, and "
    "bytes of their results on a device. A largest batch that is missing was not searched."
)


def vision_transformer():
    """ViT-B/16 on images of 224 x 224, after Dosovitskiy and others, 2021."""
    inputs = keras.Input((224, 224, 3))
    x = layers.Reshape((196, 768))(layers.Conv2D(768, 16, strides=16)(inputs))
    x = Positions()(x)
    for _ in range(12):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(12, 64)(normalized, normalized)
        x = x + layers.Dense(768)(layers.Dense(3072, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(inputs, layers.Dense(1000)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))))


def small_gpt2():
    """GPT-2 small: 12 blocks of width 768, 12 heads, 1,024 positions."""
    return nets.language(False, length=1024, width=768, blocks=12, heads=12)[0]


def large_gpt():
    """A decoder of the size of Llama 2 7B: 32 blocks of width 4,096, 1,024 positions; computes in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, _ = nets.language(False, length=1024, width=4096, blocks=32, heads=32)
    keras.config.set_dtype_policy("float32")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def of_net(name):
    """Return a compiled model, or a function that makes it, and arrays of one row."""
    keras.utils.set_random_seed(0)
    if name == LARGE:
        row = np.zeros((1, 1024), "int32")
        return large_gpt, row, row
    if name == "GPT-2 medium":
        model, row = made(GPT2_MEDIUM)
        return model, row, row
    if name in nets.NETS:
        model, batch = nets.compiled(name, False)
        return (model, *batch(1))
    model = small_gpt2() if name == "GPT-2 small" else vision_transformer()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.zeros((1, *model.input_shape[1:]), model.inputs[0].dtype)
    return model, x, np.zeros(x.shape if x.dtype == "int32" else 1, "int32")


# Rows of a device, and whether the largest batch is searched on one device.
NETS = {"MLP": 256, "CNN": 128, "ResNet50": 64, "ViT-B/16": 32, "GPT-2 small": 8, "GPT-2 medium": 8, LARGE: 8}
SEARCHED = {
    ("v5e:1", "MLP"),
    ("v5e:1", "GPT-2 medium"),
    ("t4:1", "MLP"),
    ("t4:1", "CNN"),
    *(("h100:1", net) for net in NETS),
}


def planned(target, net):
    """Return the rows of the table for one target and net."""
    devices = 8 if ":8" in target or "2x4" in target else 1
    model, x, y = of_net(net)
    batch = devices * NETS[net]
    rows = 4 * batch + batch // 2 + 1  # The last batch is uneven.
    data = np.broadcast_to(x, (rows, *x.shape[1:])), np.broadcast_to(y, (rows, *y.shape[1:]))
    plan = lockstep.plan(
        model,
        data,
        hardware=target,
        batch=batch,
        strategy=OTHERS.get(net) or OTHERS.get(target, STRATEGIES),
        search=(target, net) in SEARCHED,
    )
    cells = {}
    for _, columns, lines in tables_of(plan):
        for line in lines:
            cells.setdefault(line[:3], {}).update(zip(columns, line, strict=True))
    found = []
    for row in plan.rows:
        own = cells[row.target, row.strategy, f"{row.batch:,}"]
        own |= {"net": net, "limited by": row.estimate.bound if row.estimate else row.reason}
        own = {column: cell.replace("\N{EN DASH}", "-") for column, cell in own.items()}
        found.append(tuple(own.get(column, "-") for column in COLUMNS))
        print(found[-1], flush=True)
    return found


def record(rows):
    """Write rows in place of those of the same target and net."""
    file = RESULTS / "plan.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {row[:2] for row in rows}
    kept = [row for row in (tuple(row[column] for column in COLUMNS) for row in before) if row[:2] not in new]
    order = [parse_target(name).name for name in TARGETS], list(NETS), list(estimate.STRATEGIES)
    rows = sorted(
        [*kept, *rows], key=lambda row: tuple(names.index(cell) for names, cell in zip(order, row, strict=False))
    )
    title = "Plans of seven nets on hardware that is only described"
    write("plan", title, COLUMNS, rows, NOTE, arguments=())


if __name__ == "__main__":
    for target in sys.argv[1:2] or TARGETS:
        for net in sys.argv[2:] or [one for one in NETS if one != LARGE or target == "h100:8"]:
            record(planned(target, net))
