"""Law 4 for inputs of packages that need not be installed: tf.data, torch, Grain and pandas.

``.ci/run`` runs these in an environment of their own, ``.venv-inputs``, where none may be skipped.
"""

import contextlib
import importlib
import itertools
import logging
import os
import time

import keras
import numpy as np
import pytest

import lockstep
from lockstep._keras.trainer import strategy_of
from lockstep.data.indexed_batches import IndexedBatches
from lockstep.data.random_state import capture_random_state
from lockstep.data.sources import make_source, make_tree_source
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


def of_tf_distribute(x, y):
    tf = package("tensorflow")
    dataset = lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)  # noqa: E731
    return {"x": tf.distribute.OneDeviceStrategy("cpu:0").distribute_datasets_from_function(dataset)}


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


KINDS = [of_tf, of_tf_distribute, of_tf_endless, of_torch, of_grain_map, of_grain_iter, of_grain_loader, of_pandas]
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


@pytest.mark.parametrize("steps", [None, 3])
def test_a_loader_of_torch_with_a_generator_gives_the_orders_that_keras_gets(steps):
    """At the end of a pass of whole batches torch draws an order; a thread that read so far would draw it before Keras ends the pass."""

    def train(topology):
        model, order = counting(topology)
        x, y = data(ROWS - ROWS % BATCH)
        given = of_torch_own_generator(x, y)
        model.fit(**given, epochs=5, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[order])
        return weights(model), [list(epoch) for epoch in order.epochs]

    (expected, orders), (found, read) = train(None), train(Topology(2, 1))
    assert read == orders
    np.testing.assert_allclose(found, expected, rtol=1e-6)


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


class _Collate:
    """Writes every batch into the same tensors, as loaders with pinned memory do."""

    def __init__(self, torch):
        self._stack, self._x, self._y = torch.stack, torch.zeros(BATCH, 2), torch.zeros(BATCH, 1)

    def __call__(self, rows):
        for into, column in zip((self._x, self._y), zip(*rows, strict=True), strict=True):
            into[: len(rows)] = self._stack(column)
        return self._x[: len(rows)], self._y[: len(rows)]


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_batches_that_a_loader_writes_over_keep_their_numbers(call):
    x, y = data()
    loader = of_torch(x, y)["x"]
    reused = package("torch").utils.data.DataLoader(
        loader.dataset, batch_size=BATCH, collate_fn=_Collate(package("torch"))
    )
    found = []
    for each in (loader, reused):
        model, _ = counting(Topology(3, 2))
        logs = (
            model.evaluate(each, verbose=0)
            if call == "evaluate"
            else model.fit(each, shuffle=False, verbose=0).history["loss"]
        )
        found.append([np.ravel(logs), weights(model)])
    np.testing.assert_array_equal(*(one[0] for one in found))
    np.testing.assert_array_equal(*(one[1] for one in found))


def test_a_pass_that_ends_early_ends_the_code_of_a_loader():
    torch, ended = package("torch"), []

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            try:
                while True:
                    yield np.zeros(2, "float32"), np.zeros(1, "float32")
            finally:
                ended.append(True)

    batches = make_source(torch.utils.data.DataLoader(Endless(), batch_size=BATCH)).batches()
    next(batches)
    batches.close()
    assert ended


def of_tf_shuffled(x, y):
    dataset = package("tensorflow").data.Dataset.from_tensor_slices((x, y))
    return {"x": dataset.shuffle(ROWS, seed=3).batch(BATCH)}


def of_tf_shuffled_files(x, y):
    """The usual pipeline of files: their order is drawn while batches are read, below a second shuffling."""
    tf = package("tensorflow")
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    files = tf.data.Dataset.range(4).shuffle(4, seed=1)
    read = files.interleave(lambda number: rows.shard(4, number), cycle_length=2)
    return {"x": read.shuffle(10, seed=2).batch(BATCH).prefetch(2)}


def of_tf_shuffled_and_repeated(x, y):
    return {"x": of_tf_shuffled(x, y)["x"].repeat(2), "steps_per_epoch": 2 * STEPS}


def of_tf_shuffled_and_distributed(x, y):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3)
    return {"x": strategy.experimental_distribute_dataset(of_tf_shuffled(x, y)["x"])}


def of_tf_validation(x, y):
    return of_tf(x, y) | {"validation_data": of_tf_shuffled(x, y)["x"], "validation_steps": 2}


def of_tf_unknown_length(x, y):
    return {"x": of_tf(x, y)["x"].filter(lambda *_: True), "steps_per_epoch": 3}


def of_torch_own_generator(x, y):
    torch = package("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=generator)}


def of_torch_persistent_workers(x, y):
    """Only the pass that starts the workers draws a seed for them, besides the order."""
    torch = package("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    torch.manual_seed(0)
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver", "timeout": 120}
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, **workers)}


def test_the_doctor_leaves_the_order_of_a_loader_with_a_generator():
    read = []
    for is_checked in (False, True):
        model, order = counting(Topology(2, 1))
        given = of_torch_own_generator(*data())
        model.fit(**given, shuffle=False, verbose=0)
        if is_checked:
            strategy_of(model).doctor(model, **given, shuffle=False)
        model.fit(**given, shuffle=False, verbose=0, callbacks=[order])
        read.append([list(epoch) for epoch in order.epochs])
    assert read[0] == read[1]


class _Stop(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def on_train_batch_begin(self, batch, logs=None):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt


ORDERS = [
    of_tf_shuffled,
    of_tf_shuffled_files,
    of_tf_shuffled_and_repeated,
    of_tf_shuffled_and_distributed,
    of_tf_validation,
    of_tf_unknown_length,
    of_torch_own_generator,
    of_torch_persistent_workers,
]


@pytest.mark.parametrize(("save_freq", "epochs", "more"), [("epoch", 1, 0), ("epoch", 2, 0), (1, 1, 2)])
@pytest.mark.parametrize("kind", ORDERS)
def test_a_resumed_run_reads_the_rows_in_the_order_of_a_whole_one(kind, save_freq, epochs, more, tmp_path):
    def train(folder, *callbacks):
        keras.utils.set_random_seed(2)
        model, order = counting(Topology(3, 2))
        backup = lockstep.callbacks.BackupAndRestore(tmp_path / folder, save_freq=save_freq)
        model.evaluate(*data(), verbose=0)  # Else Keras begins a pass to look at the first batch.
        given = kind(*data())
        history = model.fit(**given, shuffle=False, epochs=4, verbose=0, callbacks=[backup, order, *callbacks]).history
        return weights(model), history, [list(epoch) for epoch in order.epochs][-1]

    whole = train("whole")
    stop = _Stop(epochs * kind(*data()).get("steps_per_epoch", STEPS) + more)
    with contextlib.suppress(KeyboardInterrupt):
        train("stopped", stop)
    resumed = train("stopped")
    np.testing.assert_array_equal(resumed[0], whole[0])
    assert resumed[1:] == whole[1:]


@pytest.mark.parametrize("make", [make_source, make_tree_source])
def test_a_pass_draws_no_order_that_nobody_reads(make):
    tf, (x, y) = package("tensorflow"), data()

    def slow(*_):
        return tf.numpy_function(lambda: bool(time.sleep(0.2)), [], bool)

    def second_pass(wait):
        tf.random.set_seed(2)
        end = of_tf(x, y)["x"].take(1).filter(slow)  # Empty: the end of a round is found 0.2 s after its last batch.
        dataset = of_tf_shuffled(x, y)["x"].concatenate(end).repeat(2)
        first, second = (make(dataset).batches() for _ in range(2))
        list(itertools.islice(first, 2 * STEPS))
        time.sleep(wait)  # A thread of tf.data that reads ahead finds the end meanwhile.
        return [np.asarray(batch[0]) for batch in itertools.islice(second, 2 * STEPS)]

    np.testing.assert_equal(second_pass(1), second_pass(0))


def test_a_process_that_joins_late_reads_a_pass_in_its_order():
    passes = make_source(of_tf_shuffled(*data())["x"])
    for _ in range(3):
        order = passes.order_state()
        expected = list(passes.batches())
    late = IndexedBatches(make_source(of_tf_shuffled(*data())["x"]))
    late.begin({"pass": 3, "at_begin": capture_random_state(), "hooks": [], "taken_before": 0, "order": order})
    for number, batch in enumerate(expected):
        np.testing.assert_array_equal(late.batch(number, number)[0], batch[0])


@pytest.mark.parametrize("kind", [of_torch, of_tf, of_torch_own_generator, of_tf_shuffled])
def test_a_cache_that_freezes_the_order_of_a_loader_is_named(kind, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    strategy = lockstep.MirroredStrategy(["cpu:0"], input_options=lockstep.InputOptions(cache="memory"))
    counting(strategy=strategy)[0].fit(**kind(*data()), shuffle=False, verbose=0)
    assert ("in the order of the first epoch" in caplog.text) is (kind not in (of_torch, of_tf))


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
