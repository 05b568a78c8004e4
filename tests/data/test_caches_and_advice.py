"""Caches keep what was read, and a slow or frozen input is named with its cure."""

import logging
import signal
import sys
import threading
import time
import traceback
from collections import deque

import jax
import keras
import ml_dtypes
import numpy as np
import pytest

import lockstep
from lockstep.data import input_bound, prefetch
from lockstep.data.cache import DeviceSource, FileBatchStore
from lockstep.data.input_bound import WaitMeter
from lockstep.data.resumable_iterator import ResumableIterator
from lockstep.data.sources import make_source
from lockstep.devices.placement import DEVICE_AXIS, Placement
from tests.laws.compare import Topology
from tests.support.waiting import DEADLINE, wait_until

from .programs import BATCH, ROWS, counting, cut, data, weights

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def cached(cache, **options):
    return lockstep.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas=3, input_options=lockstep.InputOptions(cache=cache, **options)
    )


def once(x, y, asked):
    for batch in cut(x, y):
        asked.append(len(batch[0]))
        yield batch


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["memory", "device", "file"])
def test_a_cache_reads_a_generator_once(cache, tmp_path):
    where = tmp_path / "cache" if cache == "file" else cache
    asked, checked = [], []
    model, order = counting(strategy=cached(where))
    history = model.fit(
        once(*data(), asked),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[order],
        validation_data=once(*data(), checked),
    ).history
    assert sum(asked) == sum(checked) == ROWS
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 3
    assert not list(tmp_path.iterdir())
    plain, _ = counting()
    expected = plain.fit(*data(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0, validation_data=data()).history
    np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-4)


def test_a_cache_on_the_devices_loses_no_batch_of_a_replica():
    strategy = cached("device")
    read = strategy.distribute_datasets_from_function(lambda context: once(*data(), []))
    model, order = counting(strategy=strategy)  # Keras has a first look at the batches of a model that is not built.
    model.fit(read, epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2


@pytest.mark.parametrize("cache", ["memory", "device"])
def test_a_first_epoch_with_a_cache_that_stops_early_leaves_the_other_batches_to_the_next_call(cache):
    strategy = cached(cache)
    rows = 10 * ROWS  # So that not all have been read ahead when the first call ends.
    read = strategy.distribute_datasets_from_function(lambda context: once(*data(rows), []))
    first, order = counting(strategy=strategy)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: setattr(first, "stop_training", True))
    first.fit(read, verbose=0, callbacks=[order, stop])
    second, further = counting(strategy=strategy)
    second.fit(read, verbose=0, callbacks=[further])
    assert [*order.epochs[0], *further.epochs[0]] == list(range(rows))


@pytest.mark.parametrize("cache", ["memory", "device"])
def test_the_first_batch_is_checked_before_a_cache_keeps_it(cache, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    x, y = data()
    x[0, 0] = np.nan
    model, _ = counting(strategy=cached(cache))
    model.fit(once(x, y, []), verbose=0)
    assert "inputs-not-finite" in said(caplog)


class Killed(Exception):
    """Ends a call of fit."""


@pytest.mark.parametrize("cache", ["memory", "device"])
def test_a_run_resumes_in_an_epoch_whose_last_batches_were_read_ahead_for_the_cache(cache, tmp_path):
    batches = cut(*data())

    def fit(killed_after):
        ended = []

        def end(batch, logs):
            ended.append(batch)
            if len(ended) == killed_after:
                raise Killed

        model, _ = counting(strategy=cached(cache, prefetch=3))
        callbacks = [
            lockstep.callbacks.BackupAndRestore(tmp_path, save_freq=1),
            keras.callbacks.LambdaCallback(on_train_batch_end=end),
        ]
        model.fit(lambda step: batches[step] if step < len(batches) else None, epochs=2, verbose=0, callbacks=callbacks)
        return len(ended)

    with pytest.raises(Killed):
        fit(len(batches) - 1)
    assert fit(None) in (len(batches) + 1, len(batches) + 2)  # The step that was killed may be done again.


def test_arrays_on_the_devices_seek_without_computing_the_batches_before(monkeypatch):
    selected, select = [], Placement.select

    def noted(placement, arrays, numbers):
        selected.append(numbers.tolist())
        return select(placement, arrays, numbers)

    monkeypatch.setattr(Placement, "select", noted)
    numbers = make_source(np.arange(10), batch_size=2, shuffle=True)
    source = DeviceSource(numbers, np.arange(10), cached("device")._placement)
    for begin in source.batches, lambda: source.batches_from(3):
        keras.utils.set_random_seed(1)
        deque(begin(), 0)
    assert len(selected) == 5 + 2
    assert selected[5:] == selected[3:5]
    assert source.can_seek


@pytest.mark.parametrize("shuffle", [True, "batch", False])
def test_arrays_on_the_devices_come_in_the_order_of_the_host(shuffle):
    x, _ = data()
    y = np.arange(ROWS)
    orders, found = [], []
    for strategy in (None, cached("device")):
        model, order = counting(strategy=strategy)
        np.random.seed(3)
        model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=shuffle, class_weight={3: 2.0}, verbose=0, callbacks=[order]
        )
        orders.append(np.asarray(order.epochs))
        found.append(weights(model))
    np.testing.assert_array_equal(*orders)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_rows_on_the_devices_are_selected_without_communication():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), (DEVICE_AXIS,))
    placement = Placement(mesh, 4)
    x, y = data()
    numbers = np.random.default_rng(0).permutation(ROWS)[:11]
    expected = placement.place((x[numbers], y[numbers]))
    found = placement.select(jax.device_put((x, y), placement.replicated), numbers)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == theirs.sharding


def test_a_cache_needs_the_end_of_its_input(tmp_path):
    for cache, shown in (("memory", "'memory'"), (tmp_path / "cache", "cache'")):
        model, _ = counting(strategy=cached(cache))
        with pytest.raises(
            lockstep.OptionError, match=f"cache=.*{shown} keeps what an epoch has read, and with steps_per_epoch=2"
        ):
            model.fit(once(*data(), []), steps_per_epoch=2, shuffle=False, verbose=0)


def test_a_cache_overwrites_nothing(tmp_path):
    path = tmp_path / "mine"
    path.write_text("precious")
    model, _ = counting(strategy=cached(path))
    with pytest.raises(lockstep.OptionError, match="mine exists, and the cache would overwrite it"):
        model.fit(once(*data(), []), shuffle=False, verbose=0)
    assert path.read_text() == "precious"


def test_a_relative_path_stays_the_same_file_in_another_directory(tmp_path, monkeypatch):
    def moves():
        for batch in cut(*data()):
            yield batch
            monkeypatch.chdir(tmp_path / "other")

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    model, order = counting(strategy=cached("cache"))
    model.fit(moves(), epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2
    assert [path.name for path in tmp_path.rglob("*")] == ["other"]


def test_a_file_is_gone_after_an_error(tmp_path):
    def broken():
        yield from cut(*data())[:2]
        raise ZeroDivisionError

    model, _ = counting(strategy=cached(tmp_path / "cache"))
    with pytest.raises(ZeroDivisionError):
        model.fit(broken(), shuffle=False, verbose=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_is_gone_though_a_batch_arrives_after_the_error(tmp_path):
    released = threading.Event()

    def slow():
        yield from cut(*data())[:2]
        released.wait(DEADLINE)
        yield from cut(*data())[2:]

    def fail(batch, logs):
        raise ZeroDivisionError

    before = set(threading.enumerate())
    strategy = cached(tmp_path / "cache")
    model, _ = counting(strategy=strategy)
    with pytest.raises(ZeroDivisionError):
        model.fit(slow(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)])
    released.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread of the input to end")
    assert not list(tmp_path.iterdir())
    model.fit(once(*data(), []), epochs=2, verbose=0)


def test_a_file_keeps_bfloat16(tmp_path):
    x, y = data()
    model, order = counting(strategy=cached(tmp_path / "cache"))
    model.fit(once(x.astype(ml_dtypes.bfloat16), y, []), epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2


def test_a_file_is_gone_after_an_error_in_its_first_batch(tmp_path):
    store = FileBatchStore(tmp_path / "cache")
    with pytest.raises(ValueError, match="allow_pickle"):
        store.append(np.array([None]))
    store.clear()
    assert not list(tmp_path.iterdir())


def test_a_file_that_someone_has_removed_needs_no_removal(tmp_path):
    store = FileBatchStore(tmp_path / "cache")
    store.append(np.zeros(2))
    (tmp_path / "cache").unlink()
    store.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch: expected a whole number of at least 0, got -1"),
        ({"cache": 3}, 'cache: expected None, "memory", "device" or a path, got 3'),
    ],
)
def test_options_say_what_they_expect(options, message):
    with pytest.raises(lockstep.OptionError, match=message):
        lockstep.InputOptions(**options)


def test_input_options_must_be_such():
    with pytest.raises(lockstep.OptionError, match=r"input_options: expected a lockstep.InputOptions or None, got 3"):
        lockstep.MirroredStrategy(["cpu:0"], input_options=3)


# --- errors and ends -----------------------------------------------------------------------------------------------


def broken(number):
    if number == 3:
        raise ZeroDivisionError("in the user's code")
    return cut(*data())[number]


class Broken(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return broken(number)


@pytest.mark.parametrize(
    "given",
    [lambda: (broken(number) for number in range(9)), lambda: broken, lambda: Broken(), lambda: Broken(workers=2)],
    ids=range(4),
)
def test_an_error_in_the_pipeline_comes_at_its_batch_and_ends_the_work(given):
    model, _ = counting(Topology(2, 2))
    done = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: done.append(batch))
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError, match="in the user's code") as caught:
        model.fit(given(), shuffle=False, verbose=0, callbacks=[note])
    assert done == [0, 1, 2]
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of the input to end")
    assert np.isfinite(weights(model)).all()


INTERRUPTED = """
import json, os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np
def batch(number):
    if number == 5:
        time.sleep(1000)
    return np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, number):
        return batch(number)
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, number, logs):
        if number == 4:
            print(json.dumps({"waiting": number}), flush=True)  # for a batch that will not come
with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    slow = Batches(workers=2, max_queue_size=4) if sys.argv[1] == "PyDataset" else (batch(number) for number in range(10**6))
    model.fit(slow, steps_per_epoch=10**6, shuffle=False, verbose=0, callbacks=[Tell()])
except KeyboardInterrupt:
    print(json.dumps({"is_finite": bool(np.isfinite(model.get_weights()[0]).all())}), flush=True)
"""


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
def test_fit_ends_at_ctrl_c_while_an_input_hangs(kind, forks, tmp_path):
    process = forks[0].start_python(tmp_path, code=INTERRUPTED, arguments=[kind])
    try:
        process.until("waiting")
        process.send(signal.SIGINT)
        assert process.end(60) == 0
        assert process.out.read_text() == '{"waiting": 4}\n{"is_finite": true}\n'
    finally:
        process.clean()


# --- advice --------------------------------------------------------------------------------------------------------


def said(caplog):
    return " | ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("rows", "told"), [(2, True), (3, False)])
def test_a_batch_smaller_than_the_replicas_is_named(rows, told, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    model, _ = counting(Topology(3, 1))
    model.fit(*data(2 * rows + 1), batch_size=rows, verbose=0)
    assert ("a batch of 2 rows leaves 1 of 3 replicas idle" in said(caplog)) is told


def test_a_cache_that_freezes_a_shuffled_order_is_named(caplog):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, number):
            return cut(*data())[number]

    caplog.set_level(logging.INFO, "lockstep")
    for shuffle, told in ((False, False), (True, True)):
        model, _ = counting(strategy=cached("memory"))
        model.fit(Batches(), shuffle=shuffle, verbose=0)
        assert ("the cache keeps the batches of its PyDataset in the order of the first epoch" in said(caplog)) is told


@pytest.mark.parametrize(("wait", "told"), [(0.63, "63 %"), (0.1, None), (0.0, None)])
def test_an_input_slower_than_the_step_is_measured(wait, told):
    now = [0.0]
    meter = WaitMeter(lambda: now[0])
    for _ in range(20):
        with meter.waiting():
            now[0] += wait
        meter.step()
        now[0] += 1 - wait
    sentence = meter.advice()
    assert (sentence is None) is (told is None)
    if told:
        assert sentence.startswith("input-bound: 6")
        assert "of the time is spent waiting for data" in sentence


@pytest.mark.parametrize(("wait", "told"), [(0.02, True), (0.0, False)])
def test_a_slow_generator_is_named_at_the_end_of_fit(wait, told, caplog, monkeypatch):
    def batches():
        x, y = data(BATCH)
        while True:
            time.sleep(wait)
            yield x, y

    monkeypatch.setattr(input_bound, "_MIN_WAITED_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "lockstep")
    model, _ = counting(Topology(2, 1))
    model.fit(batches(), steps_per_epoch=40, shuffle=False, verbose=0)
    assert ("% of the time is spent waiting for data" in said(caplog)) is told


class Unfinished:
    """A result of a step that is computed until an event."""

    def __init__(self):
        self.ended = threading.Event()

    def block_until_ready(self):
        assert self.ended.wait(DEADLINE)


@pytest.mark.parametrize("ends", [False, True])
def test_only_a_wait_in_which_no_step_runs_counts(ends):
    now = [0.0]
    meter, last = WaitMeter(lambda: now[0]), Unfinished()
    with meter.waiting(last):
        now[0] += 2
        if ends:
            last.ended.set()
            wait_until(lambda: "lockstep-step-end" not in {thread.name for thread in threading.enumerate()}, "the end")
        now[0] += 3
    assert meter.waited == (3 if ends else 0)
    last.ended.set()


def test_a_batch_that_is_late_does_not_wait_for_the_last_step():
    last = Unfinished()
    source = make_source((batch for batch in cut(*data())), pending=lambda generator: deque())
    feed = ResumableIterator(source, lambda batch: batch, 2, WaitMeter())
    feed.set_limit(1)
    assert feed.take(last)[0].shape == (BATCH, 2)  # The devices still work on that step.
    last.ended.set()
    feed.close()


@pytest.mark.parametrize(("width", "threads"), [(2, 0), (1 << 15, 1)])
def test_arrays_on_accelerators_are_read_ahead_if_their_batches_are_large(width, threads, monkeypatch):
    started, start = [], prefetch.Prefetcher._start
    monkeypatch.setattr(prefetch.Prefetcher, "_start", lambda self: started.append(self) or start(self))
    monkeypatch.setattr(Placement, "platform", "gpu")
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((2 * BATCH + 1, width), "float32"), np.ones((2 * BATCH + 1, 1)), batch_size=BATCH, verbose=0)
    assert len(started) == threads


def test_short_waits_are_not_worth_a_sentence():
    now = [0.0]
    meter = WaitMeter(lambda: now[0])
    for _ in range(20):
        with meter.waiting():
            now[0] += 0.01
        meter.step()
    assert meter.advice() is None


# --- memory and bits -----------------------------------------------------------------------------------------------

LARGE = """
import os, resource
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np
with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((5000,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
def batches(number, rows=1000):
    for _ in range(number):
        yield np.zeros((rows, 5000), "float32"), np.ones((rows, 1), "float32")
model.fit(batches(2), steps_per_epoch=2, shuffle=False, verbose=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.fit(batches(60), steps_per_epoch=60, shuffle=False, verbose=0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (1000 * 5000 * 4))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss counts other units elsewhere")
def test_memory_holds_a_few_batches_of_many(python):
    done = python(code=LARGE, timeout=200)
    assert done.returncode == 0, done.stderr
    # Two wait and three are under way, on the host and on the devices; 60 would be kept if anything were.
    assert float(done.stdout) < 10


@pytest.mark.slow
@pytest.mark.optimized
def test_the_same_bits_from_every_kind_of_input_on_any_devices():
    x, y = data()
    batches = cut(x, y)
    found = set()
    for devices in (1, 3):
        for cache, given in (
            (None, lambda step: batches[step] if step < len(batches) else None),
            ("device", lambda step: batches[step] if step < len(batches) else None),
            (None, (batches[step % len(batches)] for step in range(2 * len(batches)))),
        ):
            options = lockstep.InputOptions(cache=cache)
            strategy = Topology(3, devices, {"deterministic": True, "input_options": options}).strategy()
            model, _ = counting(strategy=strategy)
            steps = None if callable(given) else len(batches)
            model.fit(given, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
            found.add(weights(model).tobytes())
    assert len(found) == 1
