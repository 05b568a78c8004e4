"""Trains with a checkpoint to come; one of the workers may send itself a signal, and another be slow."""

import hashlib
import os
import signal
import time

import keras
import numpy as np

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from tests.distributed.jobs.program import config, make_strategy, tell

ROWS, BATCH, EPOCHS = 45, 9, 2  # Even shares: one program for each kind of step.


class Signalled(keras.callbacks.Callback):
    """Worker ``worker`` gets a signal in call ``number`` of ``method``; worker 0 is slow in validation, and before its end."""

    def __init__(self):
        super().__init__()
        self.heard = 0
        if config.get("worker") == config["index"]:
            setattr(self, config["method"], self.hear)

    def hear(self, *args, **kwargs):
        self.heard += 1
        if self.heard == config["number"]:
            os.kill(os.getpid(), signal.Signals[config["signal"]])

    def on_test_batch_begin(self, batch, logs=None):
        time.sleep(0.1 * (config["index"] == 0))

    def on_train_end(self, logs=None):
        time.sleep(0.5 * (config["index"] == 0))


def write(store, step, snapshot, _write=CheckpointStore.write):
    """Write a checkpoint as a slow disk does."""
    time.sleep(config.get("write_seconds", 0))
    return _write(store, step, snapshot)


CheckpointStore.write = write


def digest(history):
    found = hashlib.sha256(repr(history.history).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(np.asarray(variable.value).tobytes())
    return found.hexdigest()


rng = np.random.default_rng(0)
x, y = rng.normal(size=(ROWS, 3)).astype("float32"), rng.normal(size=(ROWS, 1)).astype("float32")
keras.utils.set_random_seed(3)
strategy = make_strategy(replicas=3, deterministic=True)
with strategy.scope():
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
backup = [lockstep.callbacks.BackupAndRestore(config["folder"], save_freq=1000)] if config["folder"] else []
history = model.fit(
    x,
    y,
    batch_size=BATCH,
    epochs=EPOCHS,
    validation_data=(x, y),
    validation_batch_size=BATCH,
    callbacks=[Signalled(), *backup],
    verbose=0,
)
tell(digest=digest(history))
