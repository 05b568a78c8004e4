"""Trains under BackupAndRestore until its end or its fault, and tells what training has left.

Every row has a number, and a metric counts in the very step how often each row is trained on in an epoch. That count is a variable: it is
in the checkpoints, and what it comes to is in the history.
"""

import functools
import hashlib
import os
import time

import keras
import numpy as np
from keras import layers

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell
from tests.fit.checkpointing.programs.places import Fault, Places, set_the_clock_back

BEGAN = time.monotonic()
# By default each kind of step is one program. Where batches are to be uneven, the last has 7 rows, and 3 replicas share neither 8
# nor 7 evenly.
ROWS, REPLICAS = (23, 3) if config.get("uneven") else (24, 2)
HELD_OUT, BATCH = 8, 8
CLASSES = 3
SHAPES = {"mlp": (3,), "cnn": (4, 4, 1)}


class Rows(keras.metrics.Metric):
    """How many rows of an epoch came by once, and how many in all; targets are the class and the number of the row."""

    def __init__(self):
        super().__init__(name="counted")
        self.counts = self.add_variable((ROWS + HELD_OUT,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(numbers, ROWS + HELD_OUT), axis=0))

    def result(self):
        return {"rows once": keras.ops.sum(self.counts == 1), "rows": keras.ops.sum(self.counts)}


class Shuffled(keras.utils.PyDataset):
    """Draws another order after each epoch, and is a place where a fault can be."""

    def __init__(self, x, y, fault):
        super().__init__()
        self.x, self.y, self.fault = x, y, fault
        self.order = np.random.permutation(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        self.fault.come_by("data are read")
        rows = self.order[BATCH * index : BATCH * (index + 1)]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Timed(keras.callbacks.Callback):
    """Writes down each step that is started, for good, and tells when the first one of this process has ended."""

    def on_train_batch_begin(self, batch, logs=None):
        descriptor = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{config['index']}\n".encode())
        os.close(descriptor)

    def on_train_batch_end(self, batch, logs=None):
        tell_how_long_it_took()


@functools.cache
def tell_how_long_it_took():
    """Once. A callback's own attribute would be in the checkpoints."""
    tell(seconds=time.monotonic() - BEGAN)


def strategy():
    options = {"replicas": REPLICAS, "deterministic": config.get("deterministic", False)}
    if config["workers"] > 1:
        return make_strategy(**options)
    return lockstep.MirroredStrategy([f"cpu:{number}" for number in range(config["devices"])], **options)


def data():
    rng = np.random.default_rng(0)
    count = ROWS + HELD_OUT
    x = rng.normal(size=(count, *SHAPES[config["net"]])).astype("float32")
    y = np.stack([rng.integers(0, CLASSES, count), np.arange(count)], axis=1)
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def net():
    if config["net"] == "mlp":
        inner = [layers.Dense(4, activation="tanh")]
    else:
        inner = [layers.Conv2D(2, 3), layers.BatchNormalization(), layers.Activation("tanh")]
        inner += [layers.Flatten(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input(SHAPES[config["net"]]), *inner, layers.Dense(CLASSES)])


def loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


def digest(model, history):
    found = hashlib.sha256(repr((history.history, history.epoch)).encode())
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        found.update(np.asarray(variable).tobytes())
    return found.hexdigest()


def main():
    if config.get("clock is back"):
        set_the_clock_back()
    fault = Fault(**config.get("fault") or {})
    fault.install()
    keras.utils.set_random_seed(5)
    with strategy().scope():
        model = net()
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=[Rows()])
    training, held_out = data()
    given = {"x": training[0], "y": training[1], "batch_size": BATCH}
    if config.get("input") == "PyDataset":
        given = {"x": Shuffled(*training, fault)}
    callbacks = [
        lockstep.callbacks.BackupAndRestore(config["directory"], **config.get("backup", {})),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.1),
        Timed(),
        Places(fault),
    ]
    history = model.fit(**given, epochs=config["epochs"], validation_data=held_out, callbacks=callbacks, verbose=0)
    fault.come_by("fit has returned")
    tell(
        digest=digest(model, history),
        steps=int(model.optimizer.iterations.value),
        rows={name: values for name, values in history.history.items() if "rows" in name},
    )


main()
