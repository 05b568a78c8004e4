"""One small run, and the ways in which one of its rows makes a step NaN or Inf."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import lockstep

BATCH, STEPS = 8, 6
BAD_STEP, BAD_ROW, BAD_REPLICA = 3, 4, 1


class Log(layers.Layer):
    def call(self, x):
        return x + 0.01 * ops.log(x[:, :1] + 50)


class Root(layers.Layer):
    """Finite at 0, with a gradient that is not."""

    def call(self, x):
        return x + 0.01 * ops.sqrt(ops.abs(x))


def squared(y_true, y_pred):
    """Infinite for a huge target."""
    return ops.mean(ops.square(y_pred - y_true), axis=-1)


# What makes the row bad: it is given the whole row of inputs and that of targets.
CAUSES = {
    "input": lambda x, y: x.fill(np.nan),
    "target": lambda x, y: y.fill(np.inf),
    "layer": lambda x, y: x.fill(-60),
    "loss": lambda x, y: y.fill(3e38),
    "gradient": lambda x, y: x.fill(0),
}

# What the error says of each: layer, variable, rows, replicas, and words of the message.
SAID = {
    "input": (None, None, (BAD_ROW,), "the input has NaN in row 4 of the batch"),
    "target": (None, None, (BAD_ROW,), "the targets have Inf in row 4 of the batch"),
    "layer": (
        "encoder/log",
        None,
        (BAD_ROW,),
        "layer 'encoder/log' is the first that gives NaN, from finite numbers, in row 4",
    ),
    "loss": (None, None, (), "all outputs of the model are finite, and the loss is Inf"),
    "gradient": ("encoder/root", "encoder/first/kernel", (), "behind layer 'encoder/root' the gradient is "),
}


def data(cause=None, steps=STEPS, bad_steps=(BAD_STEP,)):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * steps, 4)).astype("float32")
    y = rng.normal(size=(BATCH * steps, 2)).astype("float32")
    for step in bad_steps if cause else ():
        row = BATCH * step + BAD_ROW
        CAUSES[cause](x[row], y[row])
    return x, y


def without(steps, x, y):
    """The data without the rows of these steps."""
    rows = np.concatenate([np.arange(BATCH * step, BATCH * (step + 1)) for step in steps])
    return np.delete(x, rows, 0), np.delete(y, rows, 0)


@dataclass
class Run:
    """A model under a strategy; each field may be another one."""

    deterministic: bool = False
    devices: int = 2
    replicas: int = 2
    strategy: dict = field(default_factory=dict)
    home: str | None = None  # where all variables are
    compile: dict = field(default_factory=dict)
    optimizer: Any = lambda: keras.optimizers.Adam(0.01)
    model_class: Any = keras.Model

    def build(self):
        keras.utils.set_random_seed(5)
        names = [f"cpu:{number}" for number in range(self.devices)]
        with self.strategy_on(names).scope():
            inner = [layers.Dense(4, use_bias=False, name="first"), Root(name="root"), Log(name="log")]
            encoder = keras.Sequential([keras.Input((4,)), *inner, layers.Dropout(0.2)], name="encoder")
            inputs = keras.Input((4,))
            model = self.model_class(inputs, layers.Dense(2, name="last")(encoder(inputs)))
            model.get_layer("encoder").get_layer("first").kernel.assign(np.eye(4))
            model.compile(self.optimizer(), squared, metrics=["mae"], **self.compile)
        return model

    def strategy_on(self, names):
        if self.home:
            return lockstep.CentralStorageStrategy(names, self.home, replicas=self.replicas)
        return lockstep.MirroredStrategy(
            names, replicas=self.replicas, deterministic=self.deterministic, **self.strategy
        )

    def fit(self, x, y, *callbacks, **options):
        """The model, what its training leaves as bytes, and the history."""
        model = self.build()
        options = {"epochs": 1, "shuffle": False, "batch_size": BATCH, "verbose": 0} | options
        history = model.fit(x, y, callbacks=list(callbacks), **options).history
        return model, left_by(model), history


def left_by(model):
    """Digest of the variables and the optimizer's, without its count of what it was built for."""
    found = hashlib.sha256()
    for variable in [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]:
        found.update(np.asarray(variable.value).tobytes())
    return found.hexdigest()
