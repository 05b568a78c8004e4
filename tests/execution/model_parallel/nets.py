"""Small nets, and their forward passes traced for the choice of axes."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers, ops

from lockstep.execution.model_parallel.auto_layout import choose_axes

__all__ = [
    "attention_block",
    "choices",
    "collectives_in",
    "convolutions",
    "language_model",
    "mixture_of_experts",
    "mlp",
    "run_on_mesh",
    "trace_forward",
    "values_of",
]

ROWS = 8


def values_of(model):
    """Trainable and non-trainable values of a model, and all their paths."""
    groups = (model.trainable_variables, model.non_trainable_variables)
    return *([one.value for one in group] for group in groups), [one.path for group in groups for one in group]


def forward(model, training=True):
    def run(trainable, non_trainable, inputs):
        return model.stateless_call(trainable, non_trainable, *inputs, training=training)

    return run


def trace_forward(model, inputs):
    """Trace a training forward pass: the program, and path and value of each variable in the order of its inputs."""
    trainable, non_trainable, paths = values_of(model)
    program = jax.make_jaxpr(forward(model))(trainable, non_trainable, list(inputs))
    return program, list(zip(paths, [*trainable, *non_trainable], strict=True))


def choices(model, *inputs, ways=4):
    """Choose the axes of a model; by path."""
    program, variables = trace_forward(model, inputs)
    found = choose_axes(program, variables, [0] * len(jax.tree.leaves(inputs)), ways)
    return dict(zip([path for path, _ in variables], found, strict=True))


def mlp(*units, inputs=64, activation="relu"):
    made = [layers.Dense(n, activation=activation, name=f"dense_{i}") for i, n in enumerate(units)]
    return keras.Sequential([keras.Input((inputs,)), *made], name="net"), np.ones((ROWS, inputs), "float32")


def block(x, heads, width, hidden, name, dropout=0.0, attention=None, **options):
    """A transformer block with the norm first."""
    normed = layers.LayerNormalization(name=f"{name}_norm_1")(x)
    attention = attention or layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"{name}_attention")
    x = layers.Add(name=f"{name}_add_1")([x, attention(normed, normed, **options)])
    normed = layers.LayerNormalization(name=f"{name}_norm_2")(x)
    inner = layers.Dense(hidden, activation="gelu", name=f"{name}_up")(normed)
    outer = layers.Dense(width, name=f"{name}_down")(layers.Dropout(dropout, name=f"{name}_dropout")(inner))
    return layers.Add(name=f"{name}_add_2")([x, outer])


def attention_block(heads=4, width=64, hidden=256, length=16, dropout=0.0, attention=None):
    x = keras.Input((length, width))
    model = keras.Model(x, block(x, heads, width, hidden, "block", dropout, attention), name="net")
    return model, np.random.default_rng(0).normal(size=(ROWS, length, width)).astype("float32")


def language_model(vocabulary, tied=True, width=64, length=16, heads=4, depth=2, dropout=0.0):
    tokens = keras.Input((length,), dtype="int32")
    embedding = layers.ReversibleEmbedding(vocabulary, width, tie_weights=tied, name="tokens")
    positions = layers.Embedding(length, width, name="positions")
    x = layers.Add(name="add")([embedding(tokens), positions(ops.arange(length))[None]])
    for number in range(depth):
        x = block(x, heads, width, 4 * width, f"block_{number}", dropout, use_causal_mask=True)
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, embedding(x, reverse=True), name="net")
    return model, np.random.default_rng(0).integers(0, vocabulary, (ROWS, length)).astype("int32")


def residual(x, channels, name):
    inner = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"{name}_conv_1")(x)
    inner = layers.ReLU(name=f"{name}_relu_1")(layers.BatchNormalization(name=f"{name}_norm_1")(inner))
    inner = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"{name}_conv_2")(inner)
    inner = layers.BatchNormalization(name=f"{name}_norm_2")(inner)
    return layers.ReLU(name=f"{name}_relu_2")(layers.Add(name=f"{name}_add")([x, inner]))


def convolutions(channels=32, size=8, depth=2):
    pictures = keras.Input((size, size, 3))
    x = layers.Conv2D(channels, 3, padding="same", name="stem")(pictures)
    for number in range(depth):
        x = residual(x, channels, f"block_{number}")
    x = layers.Dense(10, name="head")(layers.GlobalAveragePooling2D(name="pool")(x))
    model = keras.Model(pictures, x, name="net")
    return model, np.random.default_rng(0).normal(size=(ROWS, size, size, 3)).astype("float32")


class Experts(layers.Layer):
    """Each token goes through the expert with the largest score."""

    def __init__(self, experts, hidden, **options):
        super().__init__(**options)
        self.experts, self.hidden = experts, hidden

    def build(self, shape):
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.up = self.add_weight(shape=(self.experts, width, self.hidden), name="up")
        self.down = self.add_weight(shape=(self.experts, self.hidden, width), name="down")

    def call(self, x):
        scores = ops.softmax(ops.matmul(x, self.router), axis=-1)
        gates = ops.one_hot(ops.argmax(scores, axis=-1), self.experts) * scores
        inner = ops.gelu(ops.einsum("btd,edf->betf", x, self.up))
        return ops.einsum("betf,efd,bte->btd", inner, self.down, gates)


def mixture_of_experts(experts=4, width=32, hidden=64, length=4):
    x = keras.Input((length, width))
    model = keras.Model(x, layers.Add(name="add")([x, Experts(experts, hidden, name="experts")(x)]), name="net")
    return model, np.random.default_rng(0).normal(size=(ROWS, length, width)).astype("float32")


def run_on_mesh(model, axes, *inputs, ways=4):
    """Run a forward pass on a mesh with these axes: results, those of one device, and the text of the compiled program."""
    devices = jax.devices("cpu")[:ways]
    mesh = jax.sharding.Mesh(np.array(devices), ("model",))
    trainable, non_trainable, paths = values_of(model)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(path, value):
        axis = axes[path].axis
        spec = jax.sharding.PartitionSpec() if axis is None else jax.sharding.PartitionSpec(*[None] * axis, "model")
        return jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))

    placed = [place(path, value) for path, value in zip(paths, [*trainable, *non_trainable], strict=True)]
    count = len(trainable)
    run = jax.jit(lambda t, n, x: forward(model)(t, n, x)[0])
    given = placed[:count], placed[count:], [jax.device_put(one, whole) for one in inputs]
    compiled = run.lower(*given).compile()
    alone = run(trainable, non_trainable, [jnp.asarray(one) for one in inputs])
    return np.asarray(compiled(*given)), np.asarray(alone), compiled.as_text()


def collectives_in(text):
    """Count the arrays of each kind of collective in the text of a compiled program; XLA may join several in one operation."""
    found = re.findall(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    counts = Counter()
    for shapes, kind in found:
        counts[kind] += len(re.findall(r"\w+\[", shapes))
    return counts
