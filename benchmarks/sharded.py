"""Claim: with sharded variables and recomputed blocks a step needs a fraction of the memory, and gathers each weight twice.

Blocks of a transformer (width 1024, 8 heads, 4 sequences of 256 positions on each device) and GPT-2 medium (24 blocks, 16 heads, 50,257
words, 8 sequences of 1,024 positions), with Adam, compiled for devices that are only described; nothing is run.
``python benchmarks/sharded.py [TARGET [NET]]`` in the environment of ``./scripts/test-accelerators``; the targets are those of
``tests/accelerators/steps.py``, a net is a number of blocks or ``gpt2-medium``. Rows of other targets and nets stay in the table.

The peer is Keras's step under ``jax.jit``, with the same variables sharded by annotation, as a ``LayoutMap`` of ``keras.distribution`` does
it.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "KERAS_BACKEND": "jax",
}
sys.path[:0] = [str(Path(__file__).parents[1])]

import jax
import keras
import numpy as np
from bars import draw
from jax.sharding import Mesh
from keras import layers, ops
from results_file import write

import lockstep
from lockstep._keras import trainer
from lockstep.devices.placement import DEVICE_AXIS, Placement
from lockstep.tools.plan.hlo import collectives
from tests.accelerators.steps import devices
from tests.support.described import described

WIDTH, MIB = 1024, 1 << 20
WORDS = 50_257
PEER = "Keras, annotated"
PLANS = {
    "replicated": {},
    "optimizer": {"shard": "optimizer"},
    "variables": {"shard": "variables"},
    "variables, recomputed": {"shard": "variables", "recompute": "blocks"},
}
NAMES = "all-gather", "reduce-scatter", "all-reduce"
COLUMNS = ("target", "net", "plan", "arguments", "temporaries", "ratio", *NAMES)
RESULTS = Path(__file__).parent / "results"
NOTE = (
    "MiB on each device. Arguments: weights, the optimizer's variables, and the batch; all of the state is donated. The ratio is that of arguments "
    "and temporaries to those of the replicated plan. Collectives of a step: their number, and the MiB of their results on a device.\n\n"
    "![Memory of a training step on each device](sharded.svg)"
)


@dataclass(frozen=True)
class Net:
    """What is compiled: so many blocks, on rows of a device."""

    blocks: int
    heads: int
    length: int
    rows: int
    has_words: bool  # or blocks alone

    @property
    def name(self):
        """Its name in the table."""
        return "GPT-2 medium" if self.has_words else f"{self.blocks} blocks"


GPT2_MEDIUM = Net(blocks=24, heads=16, length=1024, rows=8, has_words=True)


class Block(layers.Layer):
    """A transformer block without biases; with normalization as in GPT-2."""

    def __init__(self, net, **options):
        super().__init__(**options)
        self.heads, self.length = net.heads, net.length
        sizes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH, "down": WIDTH}
        self.parts = {name: layers.Dense(size, use_bias=False, name=name) for name, size in sizes.items()}
        kind = layers.LayerNormalization if net.has_words else layers.Identity
        self.norms = [kind(), kind()]

    def build(self, shape):
        """Make the weights."""
        for name, part in self.parts.items():
            part.build((*shape[:-1], 4 * WIDTH if name == "down" else WIDTH))
        for norm in self.norms:
            norm.build(shape)

    def call(self, x):
        """Return the results for ``x``, ``(rows, length, WIDTH)``."""
        query, key, value = (self._heads(part) for part in ops.split(self.parts["qkv"](self.norms[0](x)), 3, axis=-1))
        weights = ops.softmax(query @ ops.swapaxes(key, -1, -2) / np.sqrt(WIDTH // self.heads))
        mixed = ops.reshape(ops.transpose(weights @ value, (0, 2, 1, 3)), (-1, self.length, WIDTH))
        x = x + self.parts["out"](mixed)
        return x + self.parts["down"](ops.gelu(self.parts["up"](self.norms[1](x))))

    def _heads(self, x):
        return ops.transpose(ops.reshape(x, (-1, self.length, self.heads, WIDTH // self.heads)), (0, 2, 1, 3))


class Positions(layers.Layer):
    """Adds an embedding of the position."""

    def build(self, shape):
        """Make the weights."""
        self.embedding = self.add_weight(shape=shape[1:], name="positions")

    def call(self, x):
        """Return ``x`` with the embedding."""
        return x + self.embedding


def made(net):
    """Return a compiled model, and one row of its input and target."""
    if not net.has_words:
        inputs = x = keras.Input((net.length, WIDTH))
        for _ in range(net.blocks):
            x = Block(net)(x)
        model = keras.Model(inputs, x)
        model.compile("adam", "mse")
        return model, np.zeros((1, net.length, WIDTH), "float32")
    inputs, words = keras.Input((net.length,), dtype="int32"), layers.ReversibleEmbedding(WORDS, WIDTH)
    x = Positions()(words(inputs))
    for _ in range(net.blocks):
        x = Block(net)(x)
    model = keras.Model(inputs, words(layers.LayerNormalization()(x), reverse=True))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, np.zeros((1, net.length), "int32")


def compiled(target, net, plan):
    """Compile a training step."""
    places = devices(target)
    if plan == PEER:
        return compiled_by_annotation(places, net)
    strategy = lockstep.MirroredStrategy(places, **PLANS[plan])
    with strategy.scope():
        model, row = made(net)
    functions = strategy._functions_of(model)
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    batch = (np.repeat(row, net.rows * len(places), 0),) * 2
    return step.compile_for(trainer.training_state(model, batch), strategy._placement.abstract_batch(batch))


def compiled_by_annotation(places, net):
    """Compile Keras's own step with the state sharded as ours is, and the batch by rows."""
    placement = Placement(Mesh(np.asarray(places), (DEVICE_AXIS,)), len(places))
    model, row = made(net)
    batch = (np.repeat(row, net.rows * len(places), 0),) * 2
    state = trainer.training_state(model, batch)
    shardings = tuple([placement.slice_sharding(value.shape) for value in part] for part in state)
    state = jax.tree.map(lambda leaf, sharding: described(leaf)(sharding), state, shardings)
    batch = jax.tree.map(lambda leaf: described(leaf)(placement.row_sharding), batch)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, shardings))
    return step.lower(state, batch).compile()


def measured(target, net):
    """Return the rows of the table for one target and net."""
    rows, whole = [], None
    for plan in (*PLANS, PEER):
        program = compiled(target, net, plan)
        memory = program.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB
        whole = whole or arguments + temporaries
        ratio = round((arguments + temporaries) / whole, 3)
        found = collectives(program.as_text())
        rows.append((target, net.name, plan, round(arguments), round(temporaries), ratio, *map(listed(found), NAMES)))
        print(rows[-1], flush=True)
    return rows


def listed(found):
    """Return a function from the name of a collective to its cell: number and MiB."""

    def cell(name):
        sizes = [one.bytes for one in found if one.name == name]
        return f"{len(sizes)}: {sum(sizes) / MIB:.1f}" if sizes else "none"

    return cell


def record(rows):
    """Add rows to the table in place of those of the same targets and nets, and draw it."""
    file = RESULTS / "sharded.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {row[:2] for row in rows}
    kept = [row for row in (tuple(row[column] for column in COLUMNS) for row in before) if row[:2] not in new]
    rows = sorted([*kept, *rows], key=lambda row: (row[0], len(row[1]), row[1]))
    title = "Memory of a step with sharded variables, compiled for devices that are only described"
    write("sharded", title, COLUMNS, rows, NOTE, arguments=())
    groups = {}
    for row in rows:
        groups.setdefault(f"{row[0]}, {row[1]}", {})[row[2]] = row[5]
    draw(RESULTS / "sharded.svg", "Memory of a training step on each device, beside replicated variables", groups)


def main(target="v5e 2x4", net="6"):
    """Measure one target and net."""
    blocks = Net(blocks=int(net), heads=8, length=256, rows=4, has_words=False) if net != "gpt2-medium" else GPT2_MEDIUM
    record(measured(target, blocks))


if __name__ == "__main__":
    main(*sys.argv[1:])
