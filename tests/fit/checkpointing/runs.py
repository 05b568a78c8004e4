"""One small run that is broken off and taken up again, in all kinds of input."""

import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

import lockstep

ROWS, BATCH = 80, 16  # Even batches and replicas: one program for each kind of step.


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6, 6, 2)).astype("float32"), rng.integers(0, 5, ROWS)


class Shuffled(keras.utils.PyDataset):
    """Shuffles itself at the end of each epoch, as many do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.x, self.y = data()
        self.order = np.arange(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        rows = self.order[BATCH * index : BATCH * (index + 1)]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Augmented(Shuffled):
    """Draws for each batch, as many do."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=(len(x), 1, 1, 1)).astype("float32"), y


def drawing():
    """Endless, and draws from the global generator."""
    x, y = data()
    while True:
        rows = np.random.permutation(ROWS)[:BATCH]
        yield x[rows], y[rows]


def of_step(step):
    x, y = data()
    rows = slice(BATCH * step, BATCH * (step + 1))
    return (x[rows], y[rows]) if BATCH * step < ROWS else None


def arrays(**options):
    x, y = data()
    return {"x": x, "y": y, "batch_size": BATCH, **options}


INPUTS = {
    "arrays": arrays,
    "arrays, the last batch short": lambda: {"x": data()[0][:70], "y": data()[1][:70], "batch_size": BATCH},
    "arrays in blocks": lambda: arrays(shuffle="batch"),
    "arrays, endless": lambda: arrays(steps_per_epoch=3),
    "arrays, in passes": lambda: arrays(steps_per_epoch=5),
    "PyDataset, endless": lambda: {"x": Shuffled(), "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Shuffled()},
    "PyDataset, augmented": lambda: {"x": Augmented()},
    "PyDataset, workers": lambda: {"x": Shuffled(workers=2)},
    "generator": lambda: {"x": drawing(), "steps_per_epoch": 5},
    "function": lambda: {"x": of_step},
}


def normalized():
    return [layers.BatchNormalization(), layers.Activation("tanh")]


def dense(width):
    """The default, because most of a run here is compiling, and this takes the least."""
    inner = [layers.Flatten(), layers.Dense(width), *normalized(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6, 6, 2)), *inner, layers.Dense(5)])


def convolutions(width):
    inner = [layers.Conv2D(width, 3), *normalized(), layers.Flatten(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6, 6, 2)), *inner, layers.Dense(5)])


NETS = {"dense": dense, "convolutions": convolutions}


class BrokenOffError(Exception):
    """The process would have died here."""


class BreakOff(keras.callbacks.Callback):
    """Raises in the ``number``-th step of this process."""

    def __init__(self, number):
        super().__init__()
        self.number, self.steps = number, itertools.count(1)  # no value, so it counts anew in each process

    def on_train_batch_end(self, batch, logs=None):
        if next(self.steps) == self.number:
            raise BrokenOffError


class Hearing(keras.callbacks.Callback):
    """Keeps a list outside of itself of what it hears."""

    def __init__(self, heard):
        super().__init__()
        self.tell = heard.append

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.tell((self.epoch, batch))


@dataclass
class Run:
    """What one process does. Every field may differ from that of the process that was broken off."""

    folder: Any
    kind: str = "arrays"
    replicas: int = 2
    devices: int = 2
    epochs: int = 3
    deterministic: bool = False
    net: str = "dense"
    width: int = 4
    metrics: tuple = ("accuracy",)
    given: Any = None
    options: dict = field(default_factory=lambda: {"save_freq": 2})
    home: str | None = None  # where all variables are
    optimizer: Any = keras.optimizers.Adam
    joined: int = 1  # steps of a call
    cache: str | None = None
    validation: Any = None  # makes other arguments for it
    heard: list = field(default_factory=list)

    def model(self):
        keras.utils.set_random_seed(5)
        names = [f"cpu:{number}" for number in range(self.devices)]
        if self.home:
            strategy = lockstep.CentralStorageStrategy(names, self.home, replicas=self.replicas)
        else:
            options = lockstep.InputOptions(cache=self.cache)
            strategy = lockstep.MirroredStrategy(
                names, replicas=self.replicas, deterministic=self.deterministic, input_options=options
            )
        with strategy.scope():
            model = NETS[self.net](self.width)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(self.optimizer(0.01), loss, metrics=list(self.metrics), steps_per_execution=self.joined)
        return model

    def fit(self, stop=None, backup=True, callbacks=()):
        """Digest of all that training leaves; None where it was broken off in step ``stop``."""
        model, (x, y) = self.model(), data()
        given = [lockstep.callbacks.BackupAndRestore(self.folder, **self.options)] if backup else []
        callbacks = [*given, *callbacks]
        callbacks += [
            Hearing(self.heard),
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.1),
            keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
        ]
        callbacks += [BreakOff(stop)] if stop else []
        given = self.given or INPUTS[self.kind]()
        validation = {"validation_data": (x[:24], y[:24]), "validation_batch_size": 8}
        validation = self.validation() if self.validation else validation
        try:
            history = model.fit(**given, epochs=self.epochs, verbose=0, callbacks=callbacks, **validation)
        except BrokenOffError:
            return None
        return digest_of(model, history)


@functools.cache
def whole_and_heard(kind, epochs):
    """The digest of a run that is not broken off, and its steps."""
    run = Run(None, kind, epochs=epochs)
    return run.fit(backup=False), run.heard


def whole(kind="arrays", epochs=3):
    """The digest of a run that is not broken off."""
    return whole_and_heard(kind, epochs)[0]


def digest_of(model, history):
    found = hashlib.sha256(repr((history.history, history.epoch)).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(np.asarray(variable.value).tobytes())
    return found.hexdigest()
