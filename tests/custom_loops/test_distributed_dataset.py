"""Distributed data sets: law 4, and the cutting of ``tf.distribute``."""

import gc
import itertools
import logging
import threading
import time
import traceback

import keras
import numpy as np
import pytest

import lockstep
from tests.support.waiting import DEADLINE, wait_until


def make(replicas, devices=1):
    return lockstep.MirroredStrategy([f"cpu:{i}" for i in range(devices)], replicas=replicas)


class Numbers(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.arange(4 * index, 4 * index + 4)


KINDS = {
    "list": lambda: [np.arange(0, 4), np.arange(4, 8), np.arange(8, 12)],
    "py_dataset": Numbers,
    "generator": lambda: (np.arange(4 * i, 4 * i + 4) for i in range(3)),
    "iterator": lambda: iter(KINDS["list"]()),
    "function": lambda: lambda step: np.arange(4 * step, 4 * step + 4) if step < 3 else None,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (2, 2), (3, 2), (5, 3)])
def test_each_row_once_and_in_order(kind, replicas, devices):
    strategy = make(replicas, devices)
    rows = [strategy.gather(batch, axis=0) for batch in strategy.experimental_distribute_dataset(KINDS[kind]())]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(12))


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"), [(7, 2, (4, 3)), (7, 3, (3, 3, 1)), (6, 4, (2, 2, 2, 0)), (1, 2, (1, 0))]
)
def test_replicas_get_what_tf_distribute_gives_them(rows, replicas, expected):
    (batch,) = make(replicas).experimental_distribute_dataset([{"x": np.ones((rows, 2))}])
    assert tuple(len(value) for value in batch["x"].values) == expected


def test_a_data_set_can_be_read_again_and_an_iterator_asked():
    dataset = make(2).experimental_distribute_dataset([np.arange(4.0)])
    assert len(list(dataset)) == len(list(dataset)) == 1
    iterator = iter(dataset)
    assert [list(map(float, own)) for own in iterator.get_next().values] == [[0.0, 1.0], [2.0, 3.0]]
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    with pytest.raises(StopIteration):
        end.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()
    assert iter(dataset).get_next_as_optional().has_value()


def test_each_replica_draws_its_own_batch():
    seen = []

    def make_dataset(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.get_per_replica_batch_size(8)))
        return [np.full(4, number) for number in range(5)]

    batches = list(make(2, 2).distribute_datasets_from_function(make_dataset))
    assert seen == [(1, 0, 4)]
    assert [[own.tolist() for own in map(np.asarray, batch.values)] for batch in batches] == [
        [[0] * 4, [1] * 4],
        [[2] * 4, [3] * 4],
        [[4] * 4, []],
    ]


def test_a_batch_size_that_the_replicas_do_not_divide_is_an_error():
    with pytest.raises(
        lockstep.OptionError, match=r"2 replicas do not divide a global batch of 5 rows\. Fix: use a multiple of 2"
    ):
        lockstep.InputContext(1, 0, 2).get_per_replica_batch_size(5)


@pytest.mark.parametrize("batch", [np.float32(1), {"x": np.ones(3), "y": np.ones(2)}])
def test_what_has_no_rows_is_an_error(batch):
    with pytest.raises(lockstep.InputError, match="cannot be split into replicas"):
        list(make(2).experimental_distribute_dataset([batch]))


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-prefetch"]


def test_values_come_in_the_order_of_the_replicas_whatever_their_shapes():
    def rows(context):
        return np.ones(3 - context.replica_id_in_sync_group % 2)

    value = make(4, 2).experimental_distribute_values_from_function(rows)
    assert [len(own) for own in value.values] == [3, 2, 3, 2]


def test_fit_trains_on_a_last_round_that_not_all_replicas_have_a_batch_for():
    strategy = make(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(strategy.distribute_datasets_from_function(lambda context: Pairs()), epochs=2, verbose=0)
    assert int(model.optimizer.iterations.value) == 2 * 4  # Ten batches.


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2, 5])
@pytest.mark.parametrize("kind", ["generator", "iterator"])
def test_a_loop_resumes_at_the_next_batch(kind, prefetch, own):
    strategy = make(2)
    options = lockstep.InputOptions(prefetch=prefetch)
    numbers = (np.full(2, number) for number in range(12))
    given = numbers if kind == "generator" else map(np.asarray, list(numbers))
    if own:
        dataset = strategy.distribute_datasets_from_function(lambda context: given, options)
    else:
        dataset = strategy.experimental_distribute_dataset(given, options)
    found = []
    for _ in range(3):
        for batch in dataset:
            found.extend(strategy.gather(batch, axis=0).tolist())
            if len(found) % 8 == 0:
                break
    assert found == [number for number in range(12) for _ in range(2)]


def test_a_loop_that_is_left_while_another_exception_is_handled_resumes_at_the_next_batch(monkeypatch):
    monkeypatch.setattr("lockstep.data.prefetch._GRACE", 0.0)

    def slow():
        for number in range(12):
            time.sleep(0.05)  # The next one is still being read when the loop is left.
            yield np.full(2, number)

    strategy, found = make(2), []
    dataset = strategy.experimental_distribute_dataset(slow())
    for _ in range(3):
        try:
            raise KeyError
        except KeyError:
            for batch in dataset:
                found.append(int(strategy.gather(batch, axis=0)[0]))
                if len(found) % 2 == 0:
                    break
    assert found == [0, 1, 2, 3, 4, 5]


def test_a_hint_of_a_length_is_no_length():
    class Hints:
        def __iter__(self):
            return iter([np.ones(2)] * 6)

        def __length_hint__(self):
            return 3

    dataset = make(2).experimental_distribute_dataset(Hints())
    assert dataset.num_batches is None
    assert sum(1 for _ in dataset) == 6


def test_no_thread_is_left():
    dataset = make(2).experimental_distribute_dataset(np.ones(2) for _ in itertools.count())
    for _ in dataset:
        assert reading_threads()
        break
    iterator = iter(dataset)
    next(iterator)
    del iterator, _
    gc.collect()
    assert not reading_threads()


class Trainer:
    """Has an iterator, and is part of a cycle of references."""

    def __init__(self, batches):
        self.batches, self.method = batches, self.step

    def step(self):
        return next(self.batches)


@pytest.mark.slow
def test_an_iterator_that_is_freed_in_the_thread_that_reads_it_gives_its_batches_back(caplog):
    caplog.set_level(logging.INFO, "lockstep")
    taken, trainers = threading.Event(), []

    def numbers():
        for number in range(6):
            if number == 3:
                assert taken.wait(DEADLINE)
                trainers.clear()
                gc.collect()  # As the interpreter may do it in any thread.
            yield np.full(2, number)

    before = set(threading.enumerate())
    dataset = make(2).experimental_distribute_dataset(numbers(), lockstep.InputOptions(prefetch=4))
    trainers.append(Trainer(iter(dataset)))
    assert int(trainers[0].method().values[0][0]) == 0
    taken.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of the iterator to end")
    assert [int(batch.values[0][0]) for batch in dataset] == [1, 2, 3, 4, 5]
    assert "gave up" not in caplog.text


def test_batches_are_prefetched_up_to_the_limit():
    asked, enough = [], threading.Event()

    def batch_of_step(step):
        asked.append(step)
        if step == 4:
            enough.set()
        return np.ones(2) if step < 20 else None

    iterator = iter(make(2).experimental_distribute_dataset(batch_of_step, lockstep.InputOptions(prefetch=3)))
    next(iterator)
    next(iterator)
    assert enough.wait(30)  # Two taken, three ahead.
    del iterator
    assert len(asked) <= 6


def test_an_error_comes_at_its_batch_with_its_own_traceback():
    def broken():
        yield np.ones(2)
        yield np.ones(2)
        raise ZeroDivisionError("in the user's code")

    batches = iter(make(2).experimental_distribute_dataset(broken()))
    next(batches)
    next(batches)
    with pytest.raises(ZeroDivisionError, match="in the user's code") as caught:
        next(batches)
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not reading_threads()


def test_a_cache_is_refused_and_so_is_what_yields_nothing():
    strategy = make(2)
    with pytest.raises(lockstep.OptionError, match=r"cache='memory'.*is for fit"):
        strategy.experimental_distribute_dataset([np.ones(2)], lockstep.InputOptions(cache="memory"))
    with pytest.raises(lockstep.InputError, match=r"what dataset_fn returns: expected an iterable of batches.*got 7"):
        strategy.distribute_datasets_from_function(lambda context: 7)


class Pairs(keras.utils.PyDataset):
    """Ten batches; says when a pass begins and ends."""

    def __init__(self):
        super().__init__(workers=3)
        self.said = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        return rng.normal(size=(4, 2)).astype("float32"), rng.normal(size=(4, 1)).astype("float32")

    def on_epoch_begin(self):
        self.said.append("begin")

    def on_epoch_end(self):
        self.said.append("end")


def test_a_pass_of_a_py_dataset_begins_and_ends():
    dataset = Pairs()
    distributed = make(2).experimental_distribute_dataset(dataset)
    assert [len(list(distributed)) for _ in range(2)] == [10, 10]
    assert dataset.said == ["begin", "end"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_fit_evaluate_and_predict_take_a_distributed_data_set(own):
    """With own batches of 4 on two replicas, the global batch has 8 rows; the data are the same."""
    x, y = map(np.concatenate, zip(*[Pairs()[number] for number in range(10)], strict=True))
    strategy = make(2, 2)

    def built(context):
        keras.utils.set_random_seed(3)
        with context:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    def distributed():
        if own:
            return strategy.distribute_datasets_from_function(lambda context: Pairs())
        return strategy.experimental_distribute_dataset(Pairs())

    ours, plain = built(strategy.scope()), built(keras.name_scope("plain"))
    rows = 8 if own else 4
    ours.fit(distributed(), epochs=2, verbose=0, validation_data=distributed())
    plain.fit(x, y, batch_size=rows, shuffle=False, epochs=2, verbose=0)
    for mine, theirs in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        ours.evaluate(distributed(), verbose=0), plain.evaluate(x, y, batch_size=rows, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        ours.predict(distributed(), verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    assert list(ours.history.history) == ["loss", "val_loss"]


def test_len_is_the_number_of_batches_if_the_input_has_one():
    strategy = make(2)
    batches = [np.ones(4), np.ones(3), np.ones(2)]
    assert len(strategy.experimental_distribute_dataset(batches)) == 3
    assert len(strategy.distribute_datasets_from_function(lambda context: batches)) == 2
    for unknown in iter(batches), (batch for batch in batches), lambda step: None:
        with pytest.raises(TypeError, match="is not known before it has ended"):
            len(strategy.experimental_distribute_dataset(unknown))


@pytest.mark.parametrize("dtype", ["U1", object, "S1"])
def test_texts_are_refused(dtype):
    strategy, texts = make(2), np.asarray(["a", "b", "c", "d"], dtype)
    for dataset in strategy.experimental_distribute_dataset([texts]), own(strategy, texts):
        with pytest.raises(
            lockstep.InputError, match=r"must be numbers.* got an array of .*Fix: turn texts into numbers"
        ):
            next(iter(dataset))
    with pytest.raises(lockstep.InputError, match="must be numbers"):
        strategy.experimental_distribute_values_from_function(lambda context: texts)


def own(strategy, batch):
    return strategy.distribute_datasets_from_function(lambda context: [batch] * 2)


def endless():
    for number in itertools.count():
        yield np.full((4, 1), number, "float32"), np.zeros((4, 1), "float32")


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_a_fit_that_stops_early_loses_no_batch_that_it_has_read_ahead():
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2, input_options=lockstep.InputOptions(prefetch=12))
    data = strategy.distribute_datasets_from_function(lambda context: endless(), lockstep.InputOptions(prefetch=0))
    model = compiled(strategy)

    def stop(batch, logs):
        model.stop_training = batch == 2

    model.fit(data, steps_per_epoch=40, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)], verbose=0)
    x, _ = next(iter(data))
    assert [float(own[0, 0]) for own in x.values] == [6, 7]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_fit_reads_ahead_as_the_options_of_the_data_set_say(prefetch):
    threads = set()

    def noted():
        for batch in endless():
            threads.add(threading.current_thread())
            yield batch

    strategy = make(2)
    data = strategy.experimental_distribute_dataset(noted(), lockstep.InputOptions(prefetch=prefetch))
    compiled(strategy).fit(data, steps_per_epoch=3, verbose=0)
    assert (threads == {threading.main_thread()}) == (prefetch == 0)


class Together(keras.utils.PyDataset):
    """Each batch waits until another one is read, but for the first ones, of which one may be read alone for its shape."""

    def __init__(self):
        super().__init__(workers=2, max_queue_size=4)
        self.both = threading.Barrier(2, timeout=20)

    def __len__(self):
        return 16

    def __getitem__(self, number):
        if number >= 8:
            self.both.wait()
        return np.full((4, 1), number, "float32"), np.zeros((4, 1), "float32")


@pytest.mark.parametrize("reads", ["fit", "loop after evaluate"])
def test_workers_of_a_py_dataset_read_at_the_same_time_to_the_end(reads):
    strategy = make(4)
    model = compiled(strategy)
    if reads == "fit":
        model.fit(strategy.distribute_datasets_from_function(lambda context: Together()), verbose=0)
    else:
        data = strategy.experimental_distribute_dataset(Together())
        model.evaluate(data, steps=2, verbose=0)
        assert len(list(data)) == 16
