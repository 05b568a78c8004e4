"""Trains some of the cases one after the other: as a process of a job with servers, or alone.

The one argument is JSON: ``cases``, ``folder`` and ``name`` say what to train and where to leave it; ``strategy`` has arguments of
ParameterServerStrategy, ``replicas`` makes it a MirroredStrategy; ``stop`` says at which batch of this process which signal is sent to it, and ``stop_seconds`` after which time a worker ends alone.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.parameter_server import worker_fit
from tests.parameter_server.own_step import OwnStep
from tests.support.telling import tell

ROWS, WIDTH, BATCH = 230, 6, 40
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
Y = (2 * X[:, :1] + X[:, 1:2] ** 2).astype("float32")
IDS = np.random.default_rng(1).integers(0, 3000, (ROWS, 4)).astype("int32")


class Pictures(keras.utils.PyDataset):
    """Shuffles its rows itself after each epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number):
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class RowSum(keras.metrics.Metric):
    """The sum of all targets: every row that was trained on counts."""

    def __init__(self):
        super().__init__(name="row_sum")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self):
        return keras.ops.convert_to_tensor(self.total)


class Observed(keras.layers.Layer):
    """Remembers the largest number and the last one, as layers do that are trained for quantization."""

    def build(self, shape):
        def state(name, value):
            initializer = keras.initializers.Constant(value)
            return self.add_weight(shape=(), initializer=initializer, trainable=False, name=name)

        self.most, self.last = state("most", -np.inf), state("last", 0.0)

    def call(self, x, training=False):
        if training:
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(x)))
            self.last.assign(x[-1, 0])
        return x


class Paired(keras.Model):
    """Looks up its table by inputs and by targets."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - self.get_layer("table")(y)) ** 2)


def batches():
    while True:
        for start in range(0, ROWS - BATCH, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


def net(*layers, kind=keras.Sequential, shape=(WIDTH,), dtype="float32", optimizer=None, loss="mse", metrics=("mae",)):
    model = kind([keras.Input(shape, dtype=dtype), *layers, keras.layers.Dense(1, name="last")], name="net")
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def dense(activation="tanh", **options):
    return keras.layers.Dense(8, activation=activation, name="first", **options)


def mixed(**options):
    """What is not trained, random numbers, and a rate that callbacks change."""
    layers = dense("relu"), keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.2, seed=3, name="drop")
    return net(*layers, **options)


def embedded():
    return net(keras.layers.Embedding(3000, 3, name="table"), keras.layers.Flatten(), shape=(4,), dtype="int32")


def observed():
    return net(dense(), Observed(name="observed"))


def paired():
    ids = keras.Input((1,), dtype="int32")
    model = Paired(ids, keras.layers.Embedding(3000, 3, name="table")(ids), name="net")
    model.compile(keras.optimizers.SGD(0.5))
    return model


def pairs():
    """Of the first batch the targets are among the inputs; of the second they are not."""
    ids = np.arange(BATCH)[:, None]
    return {"x": np.concatenate([ids, ids + 2000]), "y": np.concatenate([ids[::-1], ids + 2500]), "shuffle": False}


def masked():
    layers = keras.layers.Embedding(3000, 3, mask_zero=True, name="table"), keras.layers.SimpleRNN(4, name="rnn")
    return net(*layers, shape=(4,), dtype="int32", loss=keras.losses.MeanSquaredError(reduction="sum"))


def constrained():
    """What an optimizer does besides its update, some of which is not in its configuration."""
    optimizer = keras.optimizers.SGD(0.05, 0.9, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return net(dense(kernel_constraint="non_neg", bias_initializer="ones"), optimizer=optimizer)


def rates():
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.02 / (1 + epoch))]


FIT = {"batch_size": BATCH, "epochs": 2}
CASES = {
    "mixed": (mixed, lambda: {"x": X, "y": Y, "validation_data": (X[:50], Y[:50]), "callbacks": rates(), **FIT}),
    "plain": (lambda: net(dense()), lambda: {"x": X, "y": Y, "sample_weight": np.abs(X[:, 0]), **FIT}),
    "own step": (
        lambda: mixed(kind=OwnStep),
        lambda: {"x": batches(), "epochs": 2, "steps_per_epoch": 4, "callbacks": rates()},
    ),
    "shuffled": (lambda: net(dense()), lambda: {"x": Pictures(), "epochs": 3, "shuffle": True}),
    "function": (lambda: net(dense()), lambda: {"x": lambda n: (X[:BATCH], Y[:BATCH]) if n < 4 else None, "epochs": 2}),
    "embedded": (embedded, lambda: {"x": IDS, "y": Y, **FIT}),
    "momentum": (constrained, lambda: {"x": X, "y": Y, **FIT}),
    "counted": (lambda: net(dense(), metrics=[RowSum()]), lambda: {"x": X, "y": Y, **FIT, "epochs": 3}),
    "long": (lambda: net(dense(), metrics=[RowSum()]), lambda: {"x": X, "y": Y, "batch_size": 5, "epochs": 3}),
    "observed": (observed, lambda: {"x": X, "y": Y, **FIT}),
    "paired": (paired, lambda: pairs() | FIT),
    "sum": (masked, lambda: {"x": IDS, "y": Y, **FIT}),
}


class Tells(keras.callbacks.Callback):
    """Says where the chief is."""

    def on_epoch_end(self, epoch, logs=None):
        tell(epoch=epoch)


class Awaits(keras.callbacks.Callback):
    """Holds the chief at the end of the first epoch until so many workers are there."""

    def __init__(self, strategy, workers):
        super().__init__()
        self.strategy, self.workers = strategy, workers

    def on_epoch_end(self, epoch, logs=None):
        deadline = time.monotonic() + 100
        while self.strategy._process_group._dispatcher.worker_count < self.workers:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Raises(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise ZeroDivisionError("a callback")


def stop_at(strategy, at, signal):
    """Send a signal to this process when it has begun so many batches, or as a server taken so many gradients."""
    from lockstep.parameter_server.variable_server import VariableService
    from lockstep.parameter_server.worker_fit import WorkerFit

    owner, name = (WorkerFit, "_run_task") if strategy.role.job == "worker" else (VariableService, "_push")
    original, count = getattr(owner, name), [0]

    def counting(self, *arguments):
        count[0] += 1
        if count[0] == at:
            tell(stops=True)
            os.kill(os.getpid(), signal)
        return original(self, *arguments)

    setattr(owner, name, counting)


def left(model, history):
    shown = {"updates_per_sec", "bytes_per_sec", "staleness"}
    found = {f"history/{name}": values for name, values in history.items() if name not in shown}
    kinds = {
        "weights": model.trainable_variables,
        "others": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
    }
    for kind, variables in kinds.items():
        found |= {f"{kind}/{number}": variable.numpy() for number, variable in enumerate(variables)}
    return found


def main(config):
    keras.utils.set_random_seed(config.get("seed", 1))
    strategy = None
    if "strategy" in config:
        options = dict(config["strategy"])
        cut = options.pop("shards", None)
        partitioner = cut and lockstep.partitioners.FixedShardsPartitioner(cut)
        strategy = lockstep.ParameterServerStrategy(variable_partitioner=partitioner, **options)
        tell(has_joined=True)
        if "stop_seconds" in config:
            worker_fit._STOP_SECONDS = config["stop_seconds"]
        if config.get("stop"):
            stop_at(strategy, *config["stop"])
    elif config.get("replicas"):
        strategy = lockstep.MirroredStrategy(replicas=config["replicas"])
    found = {}
    for case in config["cases"]:
        build, arguments = CASES[case]
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = build()
        given = arguments() | {"verbose": 0}
        given["callbacks"] = [*given.get("callbacks", []), Tells(), *([Raises()] if config.get("raises") else [])]
        if config.get("awaits"):
            given["callbacks"].append(Awaits(strategy, config["awaits"]))
        if config.get("backup"):
            given["callbacks"].append(lockstep.callbacks.BackupAndRestore(config["backup"], save_freq=2))
        history = model.fit(**given)
        if case == "own step":  # Its count of steps continues in the next call.
            history = model.fit(**given | {"x": batches()})
        own = left(model, history.history)
        if config.get("evaluates") and model.input_shape[1] == WIDTH:
            own["evaluated/loss"] = model.evaluate(X[:50], Y[:50], verbose=0)
        found |= {f"{case}/{name}": np.asarray(value) for name, value in own.items()}
    np.savez(Path(config["folder"]) / f"{config['name']}.npz", **found)
    tell(done=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
