"""Law 4 for inputs of packages that need not be installed: tf.data, torch, Grain and pandas.

``.ci/run`` runs these in an environment of their own, ``.venv-inputs``, where none may be skipped.
"""

import contextlib
import importlib
import logging
import os

import numpy as np
import pytest

import lockstep
from tests.laws.compare import Topology

from .programs import BATCH, ROWS, STEPS, TOPOLOGIES, counting, cut, data, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


# Here, because importing TensorFlow and torch changes the environment, which a test must not.
for name in ("tensorflow", "torch", "grain", "pandas"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def package(name):
    if os.environ.get("LOCKSTEP_ALL_INPUTS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


def of_tf(x, y):
    return {"x": package("tensorflow").data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}


def of_tf_endless(x, y):
    return {"x": of_tf(x, y)["x"].repeat(), "steps_per_epoch": STEPS}


def of_torch(x, y):
    torch = package("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH)}


def of_torch_processes(x, y):
    """Two processes read; forked, as torch does by itself, they could inherit locks of JAX's threads."""
    torch = package("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, num_workers=2, multiprocessing_context="forkserver", timeout=120
    )
    return {"x": loader}


class Rows:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number], self.y[number]


def of_grain_map(x, y):
    return {"x": package("grain").MapDataset.source(Rows(x, y)).batch(BATCH, drop_remainder=False)}


def of_grain_iter(x, y):
    return {"x": package("grain").MapDataset.source(Rows(x, y)).to_iter_dataset().batch(BATCH, drop_remainder=False)}


def of_grain_loader(x, y):
    grain = package("grain")
    sampler = grain.samplers.SequentialSampler(num_records=len(x), shard_options=grain.sharding.NoSharding())
    batch = grain.transforms.Batch(batch_size=BATCH, drop_remainder=False)
    return {"x": grain.DataLoader(data_source=Rows(x, y), sampler=sampler, operations=[batch], worker_count=0)}


def of_grain_processes(x, y):
    grain = package("grain")
    importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # Grain's processes ask for flags.
    sampler = grain.samplers.SequentialSampler(num_records=len(x), shard_options=grain.sharding.NoSharding())
    batch = grain.transforms.Batch(batch_size=BATCH, drop_remainder=False)
    return {"x": grain.DataLoader(data_source=Rows(x, y), sampler=sampler, operations=[batch], worker_count=1)}


def of_pandas(x, y):
    pandas = package("pandas")
    return {"x": pandas.DataFrame(x), "y": pandas.DataFrame(y), "batch_size": BATCH}


KINDS = [of_tf, of_tf_endless, of_torch, of_grain_map, of_grain_iter, of_grain_loader, of_pandas]
# Processes that start take seconds. These tests run in ./scripts/test-inputs, which CI calls, and in the nightly set.
PROCESSES = [pytest.param(kind, marks=pytest.mark.nightly) for kind in (of_torch_processes, of_grain_processes)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_row_once_in_order_with_the_numbers_of_keras(kind, topology):
    x, y = data()
    given = kind(x, y)
    model, order = counting(topology)
    model.fit(**given, shuffle=False, epochs=2, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2
    plain, _ = counting()
    plain.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in (of_tf_endless, of_pandas)])
def test_evaluate_and_predict(kind):
    x, y = data()
    model, _ = counting(Topology(3, 2))
    model.build((None, 2))
    expected = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(model.evaluate(**kind(x, y), verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(model.predict(**kind(x, y), verbose=0), model.predict(x, batch_size=BATCH, verbose=0))


@pytest.mark.parametrize("kind", PROCESSES)
def test_processes_that_read_keep_the_order(kind):
    x, y = data()
    model, order = counting(Topology(3, 2))
    model.fit(**kind(x, y), shuffle=False, epochs=2, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2


@pytest.mark.parametrize("kind", [*(each for each in KINDS if each not in (of_tf_endless, of_pandas)), *PROCESSES])
def test_a_loop_of_ones_own_gets_every_row_once_in_order(kind):
    x, y = data()
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3)
    dataset = strategy.experimental_distribute_dataset(kind(x, y)["x"])
    for _ in range(2):
        rows = [[strategy.gather(part, axis=0) for part in batch] for batch in dataset]
        for mine, given in zip(zip(*rows, strict=True), (x, y), strict=True):
            np.testing.assert_array_equal(np.concatenate(mine), given)


def test_class_weight_of_a_tf_dataset():
    x, y = data()[0], np.arange(ROWS) % 3
    weight = {0: 1.0, 1: 2.0, 2: 0.5}
    model, plain = counting(Topology(3, 2))[0], counting()[0]
    model.fit(**of_tf(x, y), class_weight=weight, shuffle=False, verbose=0)
    plain.fit(x, y, class_weight=weight, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-5, atol=1e-7)


def test_an_error_in_tf_data_comes_at_its_batch():
    tf = package("tensorflow")

    def broken():
        yield from cut(*data())[:3]
        raise ZeroDivisionError("in the user's code")

    signature = (tf.TensorSpec((None, 2), tf.float32), tf.TensorSpec((None, 1), tf.float32))
    model, order = counting(Topology(2, 2))
    with pytest.raises(tf.errors.OpError, match="in the user's code"):
        model.fit(tf.data.Dataset.from_generator(broken, output_signature=signature), shuffle=False, verbose=0)
    assert int(order.metric.number.value) == 3 * BATCH


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        (lambda d: d.shuffle(9, seed=1).cache().batch(8), "caches what it has shuffled"),
        (lambda d: d.cache().shuffle(9, seed=1).batch(8).prefetch(1), None),
        (lambda d: d.shuffle(9, seed=1).cache().shuffle(9, seed=2).batch(8), None),
        (lambda d: d.batch(8).prefetch(2).cache(), "caches what it has prefetched"),
        (lambda d: d.batch(8).cache().prefetch(2), None),
    ],
)
def test_an_order_of_tf_data_that_defeats_itself_is_named(chain, told, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    model, _ = counting(Topology(2, 1))
    model.fit(chain(package("tensorflow").data.Dataset.from_tensor_slices(data())), shuffle=False, verbose=0)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("tf.data.Dataset caches what" in said) is (told is not None)
    assert told is None or told in said
