"""Claim: with the variables on one device, other devices hold none, and a step between logical CPU devices takes no longer.

Two devices compute two replicas of an MLP with 19 MB of weights and Adam. A ``MirroredStrategy`` and two ``CentralStorageStrategy``,
with the variables on a device that computes and on one that does not, take turns, one step at a time; the result is the median of the
ratios of their times. Decision 23 is based on this. The devices share cores and memory: the cost of sending weights to an accelerator
is not measured.
"""

import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers
from results_file import write

import lockstep
from lockstep._keras import trainer

ROUNDS = 15
COMPUTE = ["cpu:0", "cpu:1"]


class Steps:
    """A model in training under a strategy."""

    def __init__(self, strategy, batch):
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(width, activation="relu") for width in (2048, 1024, 512)]
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10)])
            self.model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.batch, self.state = batch, trainer.training_state(self.model, batch)
        self.train = self.model.make_train_function()
        self.time()

    def time(self):
        """Seconds of a step."""
        start = time.perf_counter()
        _, self.state = self.train(self.state, iter([self.batch]))
        jax.block_until_ready(tuple(self.state))
        return time.perf_counter() - start

    def held(self, kind):
        """MB of a part of the state on each device."""
        found = dict.fromkeys(jax.devices(), 0)
        for value in self.state[kind]:
            for shard in value.addressable_shards:
                found[shard.device] += shard.data.nbytes
        return " / ".join(f"{size / 1e6:.0f}" for size in found.values())


def strategies():
    return {
        "MirroredStrategy": lockstep.MirroredStrategy(COMPUTE),
        "variables on cpu:0": lockstep.CentralStorageStrategy(COMPUTE, "cpu:0"),
        "variables on cpu:2": lockstep.CentralStorageStrategy(COMPUTE, "cpu:2"),
    }


def compare(rows):
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(rows, 1024)).astype("float32"), rng.integers(0, 10, rows)
    ways = {name: Steps(strategy, batch) for name, strategy in strategies().items()}
    times = [[way.time() for way in ways.values()] for _ in range(ROUNDS)]
    for name, way, own in zip(ways, ways.values(), zip(*times, strict=True), strict=True):
        ratio = statistics.median(one / first for one, (first, *_) in zip(own, times, strict=True))
        yield name, rows, round(1e3 * statistics.median(own), 1), round(ratio, 2), way.held(0), way.held(2)


def main():
    lockstep.config.set_logical_cpu_devices(3)
    table = [row for rows in (64, 256, 1024) for row in compare(rows)]
    columns = "where", "rows", "step, ms", "ratio", "weights on cpu:0 / 1 / 2, MB", "optimizer's there, MB"
    note = "The update is computed once here, and under MirroredStrategy by each device, all of them on the same cores."
    write("central_storage", "A training step with the variables on one device", columns, table, note)


if __name__ == "__main__":
    main()
