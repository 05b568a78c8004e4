"""Claim: with sharded variables and recomputed blocks a step needs a fraction of the memory, and gathers each weight twice.

Blocks of a transformer (width 1024, 8 heads, Adam, 4 sequences of 256 positions on each device), compiled for devices that are only
described; nothing is run. ``python benchmarks/sharded.py [TARGET [BLOCKS]]`` in the environment of ``./scripts/test-accelerators``; the
targets are those of ``tests/accelerators/steps.py``. Rows of other targets and numbers of blocks stay in the table.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "KERAS_BACKEND": "jax",
}
sys.path[:0] = [str(Path(__file__).parents[1])]

import keras
import numpy as np
from bars import draw
from keras import layers, ops
from results_file import write

import lockstep
from lockstep._keras import trainer
from tests.accelerators.steps import devices
from tests.support.hlo import collectives

WIDTH, HEADS, LENGTH, ROWS, MIB = 1024, 8, 256, 4, 1 << 20
PLANS = {
    "replicated": {},
    "optimizer": {"shard": "optimizer"},
    "variables": {"shard": "variables"},
    "variables, recomputed": {"shard": "variables", "recompute": "blocks"},
}
NAMES = "all-gather", "reduce-scatter", "all-reduce"
COLUMNS = ("target", "blocks", "plan", "arguments", "temporaries", "ratio", *NAMES)
RESULTS = Path(__file__).parent / "results"
NOTE = (
    "MiB on each device. Arguments: weights, the optimizer's variables, and the batch; all of the state is donated. The ratio is that of arguments "
    "and temporaries to those of the replicated plan. Collectives of a step: their number, and the MiB of their results on a device.\n\n"
    "![Memory of a training step on each device](sharded.svg)"
)


class Block(layers.Layer):
    """A transformer block without biases and normalization."""

    def __init__(self, **options):
        super().__init__(**options)
        sizes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH, "down": WIDTH}
        self.parts = {name: layers.Dense(size, use_bias=False, name=name) for name, size in sizes.items()}

    def build(self, shape):
        """Make the weights."""
        for name, part in self.parts.items():
            part.build((*shape[:-1], 4 * WIDTH if name == "down" else WIDTH))

    def call(self, x):
        """Return the results for ``x``, ``(rows, LENGTH, WIDTH)``."""
        query, key, value = (self._heads(part) for part in ops.split(self.parts["qkv"](x), 3, axis=-1))
        weights = ops.softmax(query @ ops.swapaxes(key, -1, -2) / np.sqrt(WIDTH // HEADS))
        x = x + self.parts["out"](ops.reshape(ops.transpose(weights @ value, (0, 2, 1, 3)), (-1, LENGTH, WIDTH)))
        return x + self.parts["down"](ops.gelu(self.parts["up"](x)))

    def _heads(self, x):
        return ops.transpose(ops.reshape(x, (-1, LENGTH, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))


def compiled(target, blocks, plan):
    """Compile a training step."""
    places = devices(target)
    strategy = lockstep.MirroredStrategy(places, **PLANS[plan])
    with strategy.scope():
        inputs = x = keras.Input((LENGTH, WIDTH))
        for _ in range(blocks):
            x = Block()(x)
        model = keras.Model(inputs, x)
        model.compile("adam", "mse")
    functions = strategy._functions_of(model)
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    batch = (np.zeros((ROWS * len(places), LENGTH, WIDTH), "float32"),) * 2
    return step.compile_for(trainer.training_state(model, batch), strategy._placement.abstract_batch(batch))


def measured(target, blocks):
    """Return the rows of the table for one target and number of blocks."""
    rows, whole = [], None
    for plan in PLANS:
        program = compiled(target, blocks, plan)
        memory = program.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB
        whole = whole or arguments + temporaries
        ratio = round((arguments + temporaries) / whole, 3)
        found = collectives(program.as_text())
        rows.append((target, blocks, plan, round(arguments), round(temporaries), ratio, *map(listed(found), NAMES)))
        print(rows[-1], flush=True)
    return rows


def listed(found):
    """Return a function from the name of a collective to its cell: number and MiB."""

    def cell(name):
        sizes = [one.bytes for one in found if one.name == name]
        return f"{len(sizes)}: {sum(sizes) / MIB:.1f}" if sizes else "none"

    return cell


def record(rows):
    """Add rows to the table in place of those of the same targets and numbers of blocks, and draw it."""
    file = RESULTS / "sharded.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {row[:2] for row in rows}
    kept = [row for row in (tuple(row[column] for column in COLUMNS) for row in before) if row[:2] not in new]
    rows = sorted([*kept, *rows], key=lambda row: row[:2])
    title = "Memory of a step with sharded variables, compiled for devices that are only described"
    write("sharded", title, COLUMNS, rows, NOTE, arguments=())
    groups = {}
    for row in rows:
        groups.setdefault(f"{row[0]}, {row[1]} blocks", {})[row[2]] = row[5]
    draw(RESULTS / "sharded.svg", "Memory of a training step on each device, beside replicated variables", groups)


if __name__ == "__main__":
    record(measured(sys.argv[1] if len(sys.argv) > 1 else "v5e 2x4", int(sys.argv[2]) if len(sys.argv) > 2 else 6))
