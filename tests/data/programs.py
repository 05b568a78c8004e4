"""What the tests of inputs share: a model that counts the rows it sees, and models to compare."""

import keras
import numpy as np
import pytest

from tests.laws.compare import Topology

ROWS, BATCH = 37, 8
STEPS = -(-ROWS // BATCH)


def data(rows=ROWS):
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 2)).astype("float32"), np.arange(rows, dtype="float32")[:, None]


def cut(x, y):
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]


class Order(keras.callbacks.Callback):
    """Notes the target of the first row of every batch, and of each epoch how often each row came by."""

    def __init__(self):
        super().__init__()
        self.metric = _Rows()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(np.asarray(self.metric.seen.value).astype(int)[: int(self.metric.number.value)])


class _Rows(keras.metrics.Metric):
    """Writes down the row numbers, which are the targets, in the order in which they come."""

    def __init__(self):
        super().__init__(name="rows")
        self.seen = self.add_variable((500,), "zeros", name="seen")
        self.number = self.add_variable((), "zeros", dtype="int32", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = keras.ops.reshape(keras.ops.cast(y_true, "float32"), (-1,))
        self.seen.assign(keras.ops.slice_update(self.seen.value, (self.number.value,), numbers))
        self.number.assign_add(numbers.shape[0])

    def result(self):
        return keras.ops.cast(self.number, "float32")


def counting(topology=None, strategy=None, **compile_options):
    """A tiny model under a strategy, or on plain Keras, and the callback that notes its rows."""
    keras.utils.set_random_seed(1)
    order = Order()

    def build():
        # Not built on purpose: Keras then looks at the first batch before it trains.
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mse", metrics=[order.metric], **compile_options)
        return model

    strategy = strategy or (topology.strategy() if topology else None)
    if strategy is None:
        return build(), order
    with strategy.scope():
        return build(), order


def weights(model):
    return np.concatenate([np.ravel(value) for value in model.get_weights()])


TOPOLOGIES = [
    Topology(7, 3),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (Topology(1, 1), Topology(2, 2))),
]
