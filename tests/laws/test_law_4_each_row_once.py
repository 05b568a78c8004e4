"""Law 4: each row is seen exactly once an epoch, for arrays, generators and PyDatasets alike."""

import keras
import numpy as np
import pytest

import lockstep

from .compare import Topology

ROWS, BATCH = 37, 8


class Seen(keras.metrics.Metric):
    """Counts how often each row number, which is the target, was seen."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        number = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.counts.assign(self.counts + keras.ops.sum(keras.ops.one_hot(number, ROWS), axis=0))

    def result(self):
        return keras.ops.sum(self.counts)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // BATCH)

    def __getitem__(self, number):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return self.x[rows], self.y[rows]


def generator(x, y):
    while True:
        yield from (Batches(x, y)[number] for number in range(-(-len(x) // BATCH)))


def inputs(kind, x, y):
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if kind == "shuffled arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": True}
    if kind == "generator":
        return {"x": generator(x, y), "steps_per_epoch": -(-ROWS // BATCH), "shuffle": False}
    return {"x": Batches(x, y, workers=2), "shuffle": False}


@pytest.mark.parametrize("kind", ["arrays", "shuffled arrays", "generator", "PyDataset"])
@pytest.mark.parametrize(
    "topology",
    [Topology(7, 3), *(pytest.param(each, marks=pytest.mark.slow) for each in (Topology(2, 2), Topology(3, 2)))],
    ids=str,
)
def test_each_row_exactly_once_an_epoch(kind, topology):
    x, y = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32"), np.arange(ROWS, dtype="float32")[:, None]
    seen, epochs = Seen(), []
    with topology.strategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(1e-6), loss="mse", metrics=[seen])
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(np.asarray(seen.counts.value)))
    model.fit(**inputs(kind, x, y), epochs=3, callbacks=[note], verbose=0)
    assert len(epochs) == 3
    for counts in epochs:
        np.testing.assert_array_equal(counts, np.ones(ROWS))


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(5, 3)], ids=str)
def test_predict_returns_every_row_in_order(topology):
    with topology.strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
    x = np.arange(23, dtype="float32")[:, None]
    np.testing.assert_array_equal(model.predict(x, batch_size=7, verbose=0), 2 * x)
    np.testing.assert_array_equal(model.predict_on_batch(x[:5]), 2 * x[:5])
    np.testing.assert_array_equal(model.predict(x[:1], verbose=0), 2 * x[:1])


class WithNumbers(keras.Model):
    """Returns numbers of Python beside its rows."""

    def call(self, x):
        return {"rows": 2 * x, "levels": 3, "share": 0.5, "is_last": True}


@pytest.mark.parametrize(
    "make", [Topology(2, 2).strategy, lambda: lockstep.ModelParallelStrategy({"data": 2, "model": 4})]
)
def test_predict_on_batch_returns_numbers_beside_the_rows(make):
    x = np.ones((4, 3), "float32")
    with make().scope():
        found = WithNumbers().predict_on_batch(x)
    for name, expected in WithNumbers().predict_on_batch(x).items():
        np.testing.assert_array_equal(found[name], expected)
