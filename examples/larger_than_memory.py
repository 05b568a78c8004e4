"""Train a language model that does not fit into the memory of one process, in several that each have a part of its variables.

    export LOCKSTEP_KEEP_MEMORY=0                                                        # freed memory goes back
    lockstep run -n 1 examples/larger_than_memory.py --directory run                     # ends for want of memory
    lockstep run -n 4 examples/larger_than_memory.py --directory run                     # trains
    lockstep run -n 3 examples/larger_than_memory.py --directory run                     # resumes with fewer
    lockstep checkpoint export run weights.npz --only '*trainable/*'

On CPUs a limit of the operating system stands for the memory of a device (Linux).
"""

import argparse
import os
import resource

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers

import lockstep

WORDS, LENGTH, WIDTH, BLOCKS = 8192, 32, 2304, 4
ROWS = 12  # of a batch, one for each replica: as many for each of 2, 3, 4 or 6 processes

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True, help="for checkpoints; all processes must see it")
parser.add_argument("--memory", type=int, default=4600, help="limit of each process in MiB (4600)")
parser.add_argument("--steps", type=int, default=3, help="of an epoch (3)")
parser.add_argument("--epochs", type=int, default=2)
chosen = parser.parse_args()


def load():
    """Texts of Reuters, each word with the one that follows; all rare words are one."""
    (texts, _), _ = lockstep.datasets.reuters(LENGTH + 1)
    texts = np.minimum(texts[: ROWS * chosen.steps], WORDS - 1)
    return texts[:, :-1], texts[:, 1:]


def block(x, number):
    """A block of a transformer."""
    norm = layers.LayerNormalization(name=f"block{number}_norm1")(x)
    attention = layers.MultiHeadAttention(8, WIDTH // 8, name=f"block{number}_attention")
    x = x + attention(norm, norm, use_causal_mask=True)
    norm = layers.LayerNormalization(name=f"block{number}_norm2")(x)
    hidden = layers.Dense(4 * WIDTH, activation="gelu", name=f"block{number}_dense1")(norm)
    return x + layers.Dense(WIDTH, name=f"block{number}_dense2")(hidden)


def build():
    """A language model of 293 million numbers; Adam keeps two more for each."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for number in range(BLOCKS):
        x = block(x, number)
    x = layers.LayerNormalization()(x)
    return keras.Model(words, layers.Dense(WORDS)(x))


limit = chosen.memory << 20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
keras.utils.set_random_seed(0)
strategy = lockstep.MultiWorkerMirroredStrategy(replicas=ROWS, shard="variables", recompute="blocks")
with strategy.scope():
    model = build()
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = load()
# A copy that is written in the background would need memory while training goes on.
backup = lockstep.callbacks.BackupAndRestore(chosen.directory, keep=1, async_=False)
model.fit(x, y, batch_size=ROWS, epochs=chosen.epochs, callbacks=[backup], verbose=2 if strategy.is_chief else 0)
layout, peak = strategy.layout(model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(
    f"{layout.device_bytes >> 20:,} of {layout.bytes >> 20:,} MiB of variables are here; the process used {peak:,} MiB"
)
