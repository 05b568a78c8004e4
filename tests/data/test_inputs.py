"""Law 4 for every kind of input that needs nothing but Keras: each row once an epoch, in order, with Keras's numbers."""

import concurrent.futures
import contextlib
import functools
import logging
import math
import random
import threading

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax.trainer import JAXEpochIterator

import lockstep
from lockstep._keras import trainer
from lockstep.data.keras_adapter import KerasInput, next_batch
from lockstep.data.sources import InputSource, check_data, make_source
from tests.laws.compare import Topology
from tests.support.waiting import DEADLINE

from .programs import BATCH, ROWS, STEPS, TOPOLOGIES, counting, cut, data, weights

# Keras says this wherever an input ends whose number of batches it cannot know.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


class Batches(keras.utils.PyDataset):
    def __init__(self, batches, **options):
        super().__init__(**options)
        self.batches, self.events = batches, []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number]

    def on_epoch_begin(self):
        self.events.append("begin")

    def on_epoch_end(self):
        self.events.append("end")


def endless(x, y):
    while True:
        yield from cut(x, y)


def function(x, y):
    batches = cut(x, y)
    return lambda step: batches[step] if step < len(batches) else None


def named(x, y):
    return {"left": x[:, :1], "right": x[:, 1:]}, y


KINDS = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": BATCH},
    "JAX arrays": lambda x, y: {"x": keras.ops.array(x), "y": keras.ops.array(y), "batch_size": BATCH},
    "PyDataset": lambda x, y: {"x": Batches(cut(x, y))},
    "PyDataset, workers": lambda x, y: {"x": Batches(cut(x, y), workers=3, max_queue_size=2)},
    "generator": lambda x, y: {"x": endless(x, y), "steps_per_epoch": STEPS},
    "callable": lambda x, y: {"x": function(x, y)},
}


@functools.cache
def of_plain_keras():
    plain, _ = counting()
    x, y = data()
    history = plain.fit(x, y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0).history
    return weights(plain), history["loss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_row_once_in_order_with_the_numbers_of_keras(kind, topology):
    given = KINDS[kind](*data())
    model, order = counting(topology)
    history = model.fit(**given, shuffle=False, epochs=3, verbose=0, callbacks=[order]).history
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 3

    expected, losses = of_plain_keras()
    np.testing.assert_allclose(weights(model), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("generator", "callable") else [pytest.mark.slow]) for kind in KINDS],
)
def test_evaluate_predict_and_validation(kind):
    x, y = data()
    model, plain = counting(Topology(3, 2))[0], counting()[0]
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    given = KINDS[kind](x, y)
    steps = {"steps": given.pop("steps_per_epoch")} if "steps_per_epoch" in given else {}
    validation = {f"validation_{name}": value for name, value in steps.items()}
    again = KINDS[kind](x, y)
    held = (again["x"], again["y"]) if "y" in again else again["x"]
    logs = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, validation_data=held, **validation).history
    expected = plain.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(logs["val_loss"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(**given, **steps, verbose=0)[0], expected[0], rtol=1e-5)
    inputs = KINDS[kind](x, y) | {"y": None}
    inputs = {name: value for name, value in inputs.items() if name in ("x", "batch_size")}
    found = model.predict(**inputs, **steps, verbose=0)
    np.testing.assert_allclose(found, plain.predict(x, batch_size=BATCH, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_shuffled_py_dataset_has_the_order_that_keras_gives_it(workers):
    orders = []
    for topology in (None, Topology(2, 2)):
        model, order = counting(topology)
        random.seed(5)
        # One worker on Keras: its queue keeps what it read before the first epoch, and the rows come in another order.
        dataset = Batches(cut(*data()), workers=workers if topology else 1)
        model.build((None, 2))
        model.fit(dataset, shuffle=True, epochs=2, verbose=0, callbacks=[order])
        orders.append([list(epoch) for epoch in order.epochs])
    # Keras draws an order for the batch that it looks at, too, and so do we, in the thread that reads.
    assert [sorted(epoch) for epoch in orders[1]] == [list(range(ROWS))] * 2
    assert orders[0] == orders[1]


@pytest.mark.parametrize("use_multiprocessing", [False, True])
def test_more_batches_than_the_queue_of_a_py_dataset_holds(use_multiprocessing):
    x, y = data(400)
    model, order = counting(Topology(2, 1))
    batches = Batches(cut(x, y), workers=2, use_multiprocessing=use_multiprocessing)
    model.fit(batches, shuffle=False, epochs=2, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(400))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 3])
def test_steps_per_epoch_goes_on_where_the_last_epoch_stopped(steps):
    x, y = data(96)
    for given in (Batches(cut(x, y), workers=2), Batches(cut(x, y)), function(x, y), endless(x, y)):
        model, order = counting(Topology(2, 2))
        model.fit(given, steps_per_epoch=steps, epochs=4, shuffle=False, verbose=0, callbacks=[order])
        assert np.concatenate(order.epochs).tolist() == list(range(steps * 4 * BATCH))


@pytest.mark.parametrize(
    ("kind", "together"),
    [("JAX arrays", 2), ("PyDataset, workers", 3)]
    + [
        pytest.param(kind, 8, marks=pytest.mark.slow) for kind in KINDS if kind != "generator"
    ],  # which goes on without an end
)
def test_several_steps_a_call_with_a_short_last_group(kind, together):
    model, order = counting(Topology(3, 2), steps_per_execution=together)
    model.fit(**KINDS[kind](*data()), shuffle=False, epochs=2, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2


@pytest.mark.slow
def test_shuffled_arrays_come_in_the_order_that_keras_gives_them():
    for shuffle in (True, "batch"):
        orders = []
        for topology in (None, Topology(2, 2)):
            model, order = counting(topology)
            np.random.seed(4)
            model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0, callbacks=[order])
            orders.append(np.asarray(order.epochs))
        np.testing.assert_array_equal(*orders)


@pytest.mark.slow
def test_class_weights_and_sample_weights():
    x, _ = data()
    y = np.arange(ROWS) % 3
    for given in (
        {"x": x, "y": y, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
        {"x": x, "y": y, "sample_weight": np.linspace(0, 1, ROWS)},
        {"x": Batches(cut(x, y)), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    ):
        (model, _), (plain, _) = counting(Topology(3, 2)), counting()
        for each in (model, plain):
            each.fit(**given, batch_size=BATCH, shuffle=False, verbose=0)
        np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_outputs_may_have_no_weights():
    x, y = data()

    def fitted(scope):
        keras.utils.set_random_seed(1)
        inputs = keras.Input(x.shape[1:])
        with scope:
            model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
            model.compile("sgd", ["mse", "mse"])
        model.fit(x, [y, y], sample_weight=[None, None], batch_size=BATCH, shuffle=False, verbose=0)
        return weights(model)

    expected = fitted(contextlib.nullcontext())
    np.testing.assert_allclose(fitted(Topology(3, 2).strategy().scope()), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_nested_arrays_and_validation_split():
    x, y = named(*data())
    histories = []
    for topology in (None, Topology(3, 2)):
        keras.utils.set_random_seed(1)
        ins = {name: keras.Input((1,), name=name) for name in x}
        outs = keras.layers.Dense(1)(keras.layers.Concatenate()(list(ins.values())))
        with (topology or Topology(1, 1)).strategy().scope() if topology else keras.name_scope("plain"):
            model = keras.Model(ins, outs)
            model.compile("sgd", "mse")
        histories.append(
            model.fit(x, y, batch_size=5, validation_split=0.3, shuffle=False, epochs=2, verbose=0).history
        )
    np.testing.assert_allclose(histories[0]["val_loss"], histories[1]["val_loss"], rtol=1e-5)
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-5)


# --- generators ----------------------------------------------------------------------------------------------------


class Counted:
    """Hands out batches and counts them; ``ahead`` is how many more than were trained on were ever asked for."""

    def __init__(self, batches, model=None):
        self.batches, self.asked, self.done, self.ahead = batches, 0, 0, 0

    def generator(self):
        for batch in self.batches:
            self.asked += 1
            self.ahead = max(self.ahead, self.asked - self.done)
            yield batch

    def callback(self):
        def end(batch, logs):
            self.done += 1

        return keras.callbacks.LambdaCallback(on_train_batch_end=end)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_a_generator_is_asked_for_what_fit_needs_and_no_more(prefetch):
    x, y = data(400)
    source = Counted(cut(x, y))
    generator = source.generator()
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], input_options=lockstep.InputOptions(prefetch=prefetch))
    model, order = counting(strategy=strategy)
    model.fit(generator, steps_per_epoch=5, epochs=2, shuffle=False, verbose=0, callbacks=[order, source.callback()])
    assert source.asked == 10
    assert source.ahead <= max(prefetch, 1) + 1  # those that wait, and the one of the step
    model.fit(generator, steps_per_epoch=1, shuffle=False, verbose=0, callbacks=[order])
    assert source.asked == 11
    assert np.concatenate(order.epochs).tolist() == list(range(11 * BATCH))


def test_what_was_read_before_an_early_stop_is_used_by_the_next_call():
    x, y = data(160)
    source = Counted(cut(x, y))
    generator = source.generator()
    strategy = Topology(2, 2).strategy()
    model, order = counting(strategy=strategy)

    def stop(batch, logs):
        model.stop_training = batch == 1

    halt = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(generator, steps_per_epoch=10, shuffle=False, verbose=0, callbacks=[order, halt])
    assert source.asked <= 4
    other, other_order = counting(strategy=strategy)  # another model of the strategy goes on, too
    other.fit(generator, steps_per_epoch=4, shuffle=False, verbose=0, callbacks=[other_order])
    assert source.asked == 6
    assert order.epochs[0].tolist() == list(range(16))
    assert other_order.epochs[0].tolist() == list(range(16, 48))


def test_a_generator_may_write_each_batch_into_the_same_memory():
    def reusing():
        x, y = np.empty((BATCH, 2), "float32"), np.empty((BATCH, 1), "float32")
        for number in range(20):
            x[:], y[:] = number, np.arange(number * BATCH, (number + 1) * BATCH)[:, None]
            yield x, y

    model, order = counting(Topology(2, 2))
    model.fit(reusing(), steps_per_epoch=20, shuffle=False, verbose=0, callbacks=[order])
    assert order.epochs[0].tolist() == list(range(20 * BATCH))


ENDED = "has no batch, or has been used up"


def test_a_generator_that_has_ended_is_not_started_again():
    model, order = counting(Topology(2, 1))
    with pytest.raises(lockstep.InputError, match=f"generator 'generator' {ENDED}"):
        model.fit(Counted(cut(*data())).generator(), epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "distributed generator", "function"])
def test_an_epoch_without_a_batch_has_no_results_of_no_step(kind):
    def ended():
        if kind == "function":
            batches, ends = cut(*data()), iter([*[False] * len(cut(*data())), True])
            return lambda step: None if next(ends, True) else batches[step]
        batches = (batch for batch in cut(*data()))
        return strategy.experimental_distribute_dataset(batches) if kind.startswith("distributed") else batches

    strategy, model = lockstep.MirroredStrategy(["cpu:0"], replicas=2), counting(Topology(2, 1))[0]
    x, y = data()
    for call in (
        lambda: model.fit(ended(), epochs=2, steps_per_epoch=len(cut(x, y)), verbose=0),
        lambda: model.fit(x, y, epochs=2, validation_data=ended(), verbose=0),
        lambda: [model.evaluate(same, verbose=0) for same in [ended()] * 2],
    ):
        with pytest.raises(lockstep.InputError, match=ENDED):
            call()


def test_a_generator_yields_tuples():
    model, _ = counting(Topology(2, 1))
    with pytest.raises(lockstep.InputError, match=r"must yield tuples: .* It yielded a list"):
        model.fit((list(batch) for batch in cut(*data())), shuffle=False, verbose=0)


@pytest.mark.parametrize("name", ["y", "sample_weight", "class_weight"])
def test_what_belongs_into_the_batches_is_not_given_besides(name):
    model, _ = counting(Topology(2, 1))
    for given, kind in ((endless(*data()), "generator"), (function(*data()), "function")):
        with pytest.raises(lockstep.InputError, match=f"{name} was given besides a {kind}"):
            model.fit(given, steps_per_epoch=1, verbose=0, **{name: {0: 1.0} if name == "class_weight" else data()[1]})


def test_a_callable_may_end_with_stop_iteration_and_starts_anew():
    batches, asked = cut(*data()), []

    def of_step(step):
        asked.append(step)
        if step == len(batches):
            raise StopIteration
        return list(batches[step])

    model, order = counting(Topology(2, 2))
    model.fit(of_step, epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2
    assert set(asked) == set(range(len(batches) + 1))


def test_a_py_dataset_hears_of_its_epochs():
    for workers in (1, 2):
        dataset = Batches(cut(*data()), workers=workers)
        model, _ = counting(Topology(2, 1))
        model.build((None, 2))
        model.fit(dataset, shuffle=False, epochs=2, verbose=0)
        assert dataset.events[-4:] == ["begin", "end"] * 2


class Halving(keras.Sequential):
    """Its own methods prepare their data and call Keras's, as those of KerasHub do."""

    def fit(self, x=None, y=None, **options):
        return super().fit(x / 2, y, **options)

    def evaluate(self, x=None, y=None, **options):
        return super().evaluate(x if options.get("_use_cached_eval_dataset") else x / 2, y, **options)

    def predict(self, x=None, **options):
        return super().predict(x / 2, **options)


class Turning(keras.utils.PyDataset):
    """Has other rows in its first batch after each epoch."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return self.x[4 * number : 4 * number + 4], self.y[4 * number : 4 * number + 4]

    def on_epoch_end(self):
        self.x, self.y = np.roll(self.x, 3, axis=0), np.roll(self.y, 3, axis=0)


def halving(own, strategy=None):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = (Halving if own else keras.Sequential)([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:  # The checkpoint of the first epoch is written.
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("validation", ["arrays", "PyDataset"])
def test_what_surrounds_fit_also_surrounds_that_of_a_models_own_class(own, validation, tmp_path):
    x, y = data()
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])

    def fit(model, *callbacks):
        options = {"validation_data": (x[:4], y[:4]), "batch_size": BATCH, "epochs": 2, "verbose": 0}
        if validation == "PyDataset":
            options |= {"validation_data": Turning(x, y), "validation_steps": 1}
        return model.fit(x if own else x / 2, y, callbacks=list(callbacks), **options).history

    expected = fit(halving(own))
    for callbacks in ([Stop()], []):
        with pytest.raises(KeyboardInterrupt) if callbacks else contextlib.nullcontext():
            model = halving(own, strategy)
            guard = lockstep.callbacks.NanGuard("stop")
            found = fit(model, lockstep.callbacks.BackupAndRestore(tmp_path), guard, *callbacks)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    halves = x if own else x / 2
    np.testing.assert_allclose(model.predict(halves, verbose=0), model(x / 2), rtol=1e-5)
    assert model.evaluate(halves, y, verbose=0) == pytest.approx(np.mean((model(x / 2) - y) ** 2), rel=1e-4)


@pytest.mark.slow
def test_own_methods_of_two_threads_do_not_meet():
    """Each redirects ``super()`` for its own model, and Keras's classes are restored by the last."""
    x, y = data()
    both = threading.Barrier(2, timeout=DEADLINE)
    meet = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: both.wait())
    before = [trainer.method_of_keras(name) for name in ("fit", "evaluate", "predict")]

    def fit(model, rate, *callbacks):
        model.optimizer.learning_rate = rate
        return model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks)).history[
            "loss"
        ]

    rates = (0.1, 0.01)
    expected = [fit(halving(True), rate) for rate in rates]
    models = [halving(True, lockstep.MirroredStrategy(["cpu:0", "cpu:1"])) for _ in rates]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [*pool.map(lambda model, rate: fit(model, rate, meet), models, rates)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert [trainer.method_of_keras(name) for name in ("fit", "evaluate", "predict")] == before


@pytest.mark.slow
def test_a_model_with_its_own_methods_gets_what_it_was_given(caplog):
    caplog.set_level(logging.INFO, "lockstep")

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def fit(self, x, y, **options):
            return self.train_on_batch(x, y)

    class Evaluating(keras.Sequential):
        def evaluate(self, x, *args, **options):
            return super().evaluate(x / 2, *args, **options)

    options = lockstep.InputOptions(prefetch=3)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], input_options=options).scope():
        model, other = Own(), Evaluating([keras.layers.Dense(1)])
        other.compile("sgd", "mse")
        model.compile("sgd", "mse")
    model.fit(*data())
    assert model.evaluate(*data(), verbose=0) > 0
    other.fit(*data(), validation_data=data(), batch_size=BATCH, verbose=0)
    assert "Own.fit does not call super().fit, so input_options do not apply to it" in caplog.text
    assert "Evaluating" not in caplog.text


@pytest.mark.slow
def test_run_eagerly():
    for kind, epochs in {"generator": 2, "arrays": 1, "PyDataset, workers": 1}.items():
        model, order = counting(Topology(3, 2), run_eagerly=True)
        model.fit(**KINDS[kind](*data()), shuffle=False, epochs=epochs, verbose=0, callbacks=[order])
        assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * epochs


STEPS_AND_TOGETHER = [(5, 1), (5, 2), (3, 2), (7, 2), (5, 3), (6, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "together"), STEPS_AND_TOGETHER)
@pytest.mark.parametrize("kind", ["arrays", "PyDataset"])
def test_epochs_of_several_steps_a_call_have_the_rows_that_keras_gives_them(kind, steps, together):
    given, orders = KINDS[kind](*data(10 * BATCH)), []
    for topology in (None, Topology(2, 2)):
        model, order = counting(topology, steps_per_execution=together)
        model.fit(**given, steps_per_epoch=steps, epochs=4, shuffle=False, verbose=0, callbacks=[order])
        orders.append([list(epoch) for epoch in order.epochs])
    assert orders[1] == orders[0]


@pytest.mark.parametrize(("steps", "together"), STEPS_AND_TOGETHER)
def test_a_generator_is_asked_for_as_many_batches_as_keras_takes(steps, together):
    x, y = data(20 * BATCH)
    source = Counted(cut(x, y))
    model, order = counting(Topology(2, 2), steps_per_execution=together)
    model.fit(source.generator(), steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0, callbacks=[order])
    assert source.asked == 2 * together * math.ceil(steps / together)
    assert np.concatenate(order.epochs).tolist() == list(range(source.asked * BATCH))


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "together"), STEPS_AND_TOGETHER)
def test_evaluate_and_predict_have_as_many_steps_a_call_as_in_keras(steps, together):
    x, y = data(10 * BATCH)
    found = []
    for topology in (None, Topology(2, 2)):
        model, _ = counting(topology, steps_per_execution=together)
        options = {"batch_size": BATCH, "steps": steps, "verbose": 0}
        found.append((len(model.predict(x, **options)), model.evaluate(x, y, **options)))
    assert found[1][0] == found[0][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-6)


def test_a_pass_knows_its_position():
    source = make_source(function(*data()), pending=None)
    made = KerasInput(source, lambda batch: batch, 2, None, print)
    epoch = made.get_jax_iterator()
    assert [next_batch(epoch, None)[1][0, 0] for _ in range(3)] == [0, BATCH, 2 * BATCH]
    assert epoch.position == 3
    made.close()


@pytest.mark.parametrize("kind", ["generator", "callable"])
def test_the_copy_ahead_that_keras_makes_on_accelerators_takes_no_batch(kind, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # The one thing by which Keras's loop tells.
    model, order = counting(Topology(2, 2))
    model.fit(**KINDS[kind](*data()), shuffle=False, epochs=2, verbose=0, callbacks=[order])
    assert [list(epoch) for epoch in order.epochs] == [list(range(ROWS))] * 2


def test_keras_s_copy_to_the_default_device_is_passed_by():
    own = iter([1, 2])
    on_accelerators = JAXEpochIterator(*data())._one_batch_ahead_iterator(own)
    assert trainer.unwrap_iterator(on_accelerators) is own
    assert trainer.unwrap_iterator(own) is own


def test_both_copies_that_keras_3_16_makes_are_passed_by():
    raw_iterator = iter([1, 2])

    def _distributed_iterator():
        yield from raw_iterator

    def _one_batch_ahead_iterator(iterator):
        yield from iterator

    assert trainer.unwrap_iterator(_distributed_iterator()) is raw_iterator
    assert trainer.unwrap_iterator(_one_batch_ahead_iterator(_distributed_iterator())) is raw_iterator


def two_devices():
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope()


def linear(scope, **options):
    keras.utils.set_random_seed(0)
    with scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    return model


SCOPES = (contextlib.nullcontext, two_devices)
X = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
Y = X[:, :1] + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Limiting steps_per_epoch")
def test_keras_limit_of_steps_sets_the_size_of_batches():
    def left(scope):
        model = linear(scope)
        keras.config.set_max_steps_per_epoch(2)
        try:
            history = model.fit(X, Y, shuffle=False, verbose=0, validation_data=(X[:70], Y[:70])).history
            found = [*history["val_loss"], model.evaluate(X, Y, verbose=0), *np.ravel(weights(model))]
            return [len(model.predict(X, verbose=0)), *found]
        finally:
            keras.config.set_max_steps_per_epoch(None)

    plain, ours = map(left, SCOPES)
    assert plain[0] == 100
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


class Drawing(keras.utils.PyDataset):
    """Draws from Keras's own generator of seeds, and keeps what it has drawn."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __len__(self):
        return 3

    def __getitem__(self, number):
        x = np.asarray(keras.random.normal((8, 3)))
        self.seen.append(float(x[0, 0]))
        return x, x[:, :1]


def test_code_of_data_has_the_global_seeds_of_plain_keras():
    def drawn(scope):
        dataset, model = Drawing(), linear(scope)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        return dataset.seen, float(keras.random.normal(()))

    plain, ours = map(drawn, SCOPES)
    assert ours == plain


def test_a_seed_that_a_callback_sets_at_the_begin_of_an_epoch_is_that_of_its_batches():
    """Plain Keras reads two batches before the first epoch begins."""

    def drawn(scope):
        seen = []

        def batches():
            while True:
                seen.append(float(keras.random.normal(())))
                yield X[:8], X[:8, :1]

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: keras.utils.set_random_seed(epoch))
        linear(scope).fit(batches(), steps_per_epoch=2, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        return seen

    plain, ours = map(drawn, SCOPES)
    assert ours[-4:] == plain[-4:]


def test_a_seed_that_a_callback_sets_holds_until_it_sets_another_one():
    def drawn(scope):
        seen = []

        def begin(epoch, logs):
            keras.utils.set_random_seed(7)
            seen.append(float(keras.random.normal(())))

        def end(epoch, logs):
            seen.append(float(keras.random.normal(())))

        batches = ((X[:8], X[:8, :1]) for _ in range(9))
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
        linear(scope).fit(batches, steps_per_epoch=2, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        return seen

    plain, ours = map(drawn, SCOPES)
    assert ours == plain == plain[:2] * 3


def test_a_context_with_64_bits_holds_for_batches_that_are_read_ahead():
    seen = set()

    class Model(keras.Model):
        def call(self, x):
            return x

        def train_step(self, state, batch):
            seen.add(batch[0].dtype.name)
            return {}, state

    with two_devices():
        model = Model()
        model.compile()
    model(np.zeros((4, 1)))
    with jax.enable_x64(True):
        model.fit(((np.zeros((4, 1)),) for _ in range(3)), verbose=0)
    assert seen == {"float64"}


class Ending(keras.utils.PyDataset):
    def __init__(self, **options):
        super().__init__(**options)
        self.parts = iter([(X[:8], Y[:8]), (X[8:16], Y[8:16])])

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return next(self.parts)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_stop_iteration_of_the_users_code_is_an_error_and_no_end(method, workers):
    model = linear(two_devices)
    with pytest.raises(RuntimeError, match="StopIteration"):
        getattr(model, method)(Ending(workers=workers), verbose=0)


class Reordered(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order, self.ends = np.arange(32), 0

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = self.order[8 * number : 8 * number + 8]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.ends += 1
        np.random.shuffle(self.order)


def test_a_stop_within_an_epoch_runs_the_datas_hooks_as_plain_keras_does():
    def left(scope):
        dataset, model = Reordered(), linear(scope)

        def stop(batch, logs):
            model.stop_training = batch == 1

        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
        model.fit(dataset, shuffle=False, verbose=0, callbacks=callbacks)
        model.fit(dataset, shuffle=False, verbose=0)
        return dataset.ends, np.ravel(weights(model))

    plain, ours = map(left, SCOPES)
    assert ours[0] == plain[0]
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-5)


@pytest.mark.parametrize("error", [StopIteration, UnboundLocalError])
@pytest.mark.parametrize("method", ["on_train_begin", "on_epoch_begin"])
def test_an_error_of_a_callback_is_not_taken_for_the_end_of_the_data(method, error):
    def fail(*args):
        raise error("of the user")

    with pytest.raises(error, match="of the user"):
        linear(two_devices).fit(X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(**{method: fail})])


class EndsWithCode(InputSource):
    """Three batches, after which code of the user runs."""

    num_batches = 3

    def __init__(self):
        super().__init__("source")
        self.has_ended = threading.Event()

    def batches(self):
        yield from np.zeros((3, 2, 1))
        self.has_ended.set()


@pytest.mark.parametrize("steps", [None, 2])
def test_no_thread_reads_what_no_step_of_keras_takes(steps):
    """Such as the end of a loader of torch, which draws the order of a pass that does not come."""
    source = EndsWithCode()
    read = KerasInput(source, lambda batch: batch, depth=4, steps=steps, report=[].append)
    batches = read.get_jax_iterator()
    for _ in range(1 if steps is None else 2):
        read.on_epoch_begin()
        for _ in range(min(steps or 3, 3 - batches.position)):
            next_batch(batches, None)
        assert not source.has_ended.wait(0.3)
        read.on_epoch_end()
    read.close()


def test_masked_arrays_are_refused_like_by_keras():
    model, _ = counting(Topology(2, 1))
    x, y = data()
    for given in ({"x": np.ma.array(x), "y": y}, {"x": x, "y": np.ma.array(y)}):
        with pytest.raises(lockstep.InputError, match=r"expected arrays, got a masked array, .* Fix: array.filled"):
            model.fit(**given, verbose=0)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (np.float32(2), r"give a value for each row, as numpy\.full\(rows, value\) does\."),
        (2.0, r"give a value for each row, as numpy\.full\(rows, value\) does\."),
        ([2.0, 3.0], r"convert lists with numpy\.asarray\."),
        (np.array(["a"]), r"turn texts into numbers, with keras\.layers\.StringLookup or TextVectorization\."),
        (np.zeros((0, 1)), r"leave out what has no rows\."),
    ],
)
def test_what_has_no_rows_of_numbers_is_refused_with_its_own_fix(value, fix):
    with pytest.raises(lockstep.InputError, match=rf"^y: expected (rows of numbers|arrays), got .* Fix: {fix}"):
        check_data("y", value, is_arrays=True)


class OwnLoss(keras.Loss):
    """A loss that needs no targets."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y_pred))


@pytest.mark.parametrize("given", ["x", "validation_data"])
def test_arrays_without_targets_are_refused_before_training_if_the_loss_needs_them(given):
    model, _ = counting(Topology(2, 1))
    x, y = data()
    before, named = model.get_weights(), "y" if given == "x" else "validation_data"
    with pytest.raises(lockstep.InputError, match=f"^fit: {named}: the loss of .* compares outputs with targets"):
        model.fit(x, y if given == "validation_data" else None, validation_data=x, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", OwnLoss())
    assert len(model.fit(x, validation_data=x, verbose=0).history["val_loss"]) == 1


def test_a_class_in_place_of_an_input_is_refused():
    model, _ = counting(Topology(2, 1))
    with pytest.raises(lockstep.InputError, match=r"fit: x: .* got the class PyDataset. Fix: pass PyDataset\(…\)"):
        model.fit(keras.utils.PyDataset, verbose=0)
