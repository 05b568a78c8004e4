"""The step timer of a call of fit, with a fake clock, and the callback that adds its readings to the logs."""

import math
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import Primitive

import lockstep
from lockstep._keras import trainer
from lockstep.callbacks import BackupAndRestore, NanGuard, ThroughputMonitor
from lockstep.devices.peak_flops import PEAKS, peak_of
from lockstep.fit.monitoring.step_timer import NAMES, FitProgress, StepTimer, TimerReading, flops_of_step, numbers_of
from lockstep.tools.plan.hardware import known_accelerators

from .runs import BATCH, STEPS, built, data, fit


class Times:
    """Seconds that pass only when the test says so."""

    def __init__(self, window=100):
        self.now = self.waited = 0.0
        self.timer = StepTimer(lambda: self.waited, window, lambda: self.now)

    def step(self, seconds, rows=8, waits=0.0, kind="train"):
        self.timer.on_fetch()
        self.now += waits
        self.waited += waits
        self.timer.on_step_start(None, kind, (np.zeros((rows, 3)),))
        self.now += seconds
        self.timer.on_step_end(None, kind, None, {})

    def trained(self, *seconds, **options):
        for one in seconds:
            self.step(one, **options)
        return self.timer


def test_steps_that_are_compiled_do_not_count():
    timer = Times().trained(60, 50, 2, 4)
    assert timer.reading == TimerReading(2, 16, 6, 0)
    assert timer.progress.total == 4


def test_a_second_fit_measures_all_steps_unless_the_model_is_compiled_again():
    model, monitor = built(), ThroughputMonitor()
    measured = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            measured.append(monitor.attachment.timer.of_epoch.steps)

    for guards in ([], [], [NanGuard()], [NanGuard()], []):  # A guarded step is compiled by itself.
        fit(model, monitor, Seen(), *guards, epochs=1)
    model.compile("sgd", "mse")
    fit(model, monitor, Seen(), epochs=1)
    assert measured == [STEPS - 2, STEPS, STEPS - 2, STEPS, STEPS, STEPS - 2]


def test_a_batch_of_another_shape_is_compiled_too():
    times = Times()
    times.trained(60, 50, 2)
    times.trained(70, 20, 3, rows=5)
    assert times.timer.reading == TimerReading(2, 13, 5, 0)


def test_validation_and_what_comes_between_epochs_do_not_count():
    times = Times()
    times.trained(60, 50, 2)
    times.timer.pause()
    times.step(7, kind="test")
    times.now += 30
    times.timer.begin_epoch(FitProgress(1, 2, 0, None, 3))
    times.trained(4, 6, waits=1.0)
    times.timer.pause()
    assert times.timer.of_epoch == TimerReading(2, 16, 12, 2)
    assert times.timer.reading == TimerReading(3, 24, 14, 2)


def test_what_is_recent_looks_back_so_many_steps():
    timer = Times(window=2).trained(60, 50, 9, 9, 9, 1, 3)
    assert timer.recent == TimerReading(2, 16, 4, 0)
    assert Times().timer.recent == TimerReading()


def test_numbers_are_none_where_nothing_was_measured():
    numbers = numbers_of(TimerReading(), devices=1)
    assert set(numbers) == set(NAMES[:4])
    assert all(map(math.isnan, numbers.values()))
    assert numbers_of(TimerReading(10, 80, 4.0, 1.0), 2) == dict(zip(NAMES, (20, 10, 0.4, 0.1), strict=False))


@pytest.mark.slow
def test_the_monitor_counts_each_step_and_row_but_those_that_are_compiled():
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            seen.append((monitor.attachment.timer.of_epoch, logs["time/step"]))

    monitor = ThroughputMonitor()
    model = built(devices=2)
    history = fit(model, Seen(), monitor, rows=37, epochs=3, validation_split=0.1)  # 33 rows: the fifth batch has one
    assert [reading[:2] for reading, _ in seen] == [(2, 16), (4, 32), (5, 33)]
    for number, (reading, _) in enumerate(seen):
        expected = numbers_of(reading, 2)
        assert {name: history[name][number] for name in expected} == expected
    assert [of_step for _, of_step in seen] == history["time/step"]  # A callback before it sees the numbers, too.
    assert monitor.last.keys() == set(NAMES[:4])
    assert "mfu" not in history  # Nobody knows what a CPU could do.


def test_weights_and_logs_are_those_without_it():
    plain, watched = built(), built()
    before, after = fit(plain), fit(watched, ThroughputMonitor(peak_flops=1e9), validation_split=0.0)
    assert {name: after[name] for name in before} == before
    for one, other in zip(plain.get_weights(), watched.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_slow_input_is_what_steps_wait_for():
    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, number):
            waiting.wait(0.03)
            return tuple(array[:BATCH] for array in data())

    waiting = threading.Event()
    logs = built().fit(Slow(), epochs=2, verbose=0, callbacks=[ThroughputMonitor()]).history
    assert logs["time/data_wait"][1] > 0.5 * logs["time/step"][1]
    assert fit(built(), ThroughputMonitor())["time/data_wait"] == [0, 0]


@pytest.mark.slow
def test_the_operations_of_a_step_are_those_of_its_matrices():
    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.flop_counter, self.rate = monitor.attachment.flop_counter, logs["throughput/device/samples_per_sec"]

    seen, monitor = Seen(), ThroughputMonitor(peak_flops=1e9)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=4).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    x = np.ones((64, 64), "float32")
    logs = model.fit(x, x[:, :32], batch_size=16, verbose=0, callbacks=[seen, monitor]).history
    matrices = 2 * (2 * 64 * 128 + 3 * 128 * 32)  # forwards, and backwards to weights and, in the second, to inputs
    assert matrices < seen.flop_counter.per_row < 1.5 * matrices
    assert logs["mfu"] == [seen.flop_counter.per_row * seen.rate / 1e9]


def test_a_step_is_counted_as_plain_keras_has_it(monkeypatch):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
    state = [[v.value for v in part] for part in _parts(model)]
    plain = jax.jit(model.train_step).lower(tuple(state), (x, y)).cost_analysis()["flops"]
    local, asked = jax.local_devices, []
    monkeypatch.setattr(jax, "local_devices", lambda *_, **options: asked.append(options) or local(**options))
    assert flops_of_step(model, state, (x, y)) == plain
    assert asked == [{"backend": "cpu"}]  # The plugins of accelerators do not count.


@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
def test_a_loop_counts_as_often_as_it_runs(kind):
    """The same layer without a loop is the reference; of the other rounds of the loop only matrix products are counted."""
    loop, unrolled = (flops_of(kind(64, unroll=unroll), (9, 32), (8, 9, 32)) for unroll in (False, True))
    assert loop == pytest.approx(unrolled, rel=0.05)


def flops_of(layer, shape, batch):
    model = keras.Sequential([keras.Input(shape), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones(batch, "float32"), np.ones((batch[0], 1), "float32")
    return flops_of_step(model, trainer.training_state(model, (x, y)), (x, y))


class Products(keras.layers.Layer):
    """Matrix products in a loop of 12, in one of 3 within one of 4, in one that is joined by fives, or until a condition holds."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def call(self, x):
        def times(value, count, unroll=1):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ h.T @ h), None), value, length=count, unroll=unroll)[0]

        x = jax.lax.stop_gradient(x)
        if self.loop == "nested":
            return jax.lax.scan(lambda h, _: (times(h, 3), None), x, length=4)[0]
        if self.loop == "until":
            return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ h.T @ h, x)
        if self.loop == "until, no product":
            return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, x)
        return times(x, 12, {"joined": 5, "none": 12}.get(self.loop, 1))


def test_loops_within_loops_and_joined_rounds_are_counted():
    whole = flops_of(Products("none"), (64,), (32, 64))
    for loop in ("one", "nested", "joined"):
        assert flops_of(Products(loop), (64,), (32, 64)) == pytest.approx(whole, rel=0.05)


def test_operations_are_unknown_if_nobody_knows_how_often_a_product_runs():
    assert flops_of(Products("until"), (64,), (32, 64)) is None
    assert flops_of(Products("until, no product"), (64,), (32, 64)) > 0


fused = Primitive("attention_of_gpus")
fused.def_abstract_eval(lambda x: x)


class Fused(keras.layers.Layer):
    def call(self, x):
        return x + 0 * fused.bind(jax.lax.stop_gradient(x))


def test_operations_are_unknown_if_only_an_accelerator_has_them():
    assert flops_of(Fused(), (64,), (32, 64)) is None


def test_convolutions_in_a_loop_are_counted():
    layer, shape = keras.layers.ConvLSTM2D(8, 3, padding="same", recurrent_activation="linear"), (16, 16, 4)
    once, often = (
        flops_of(layer.__class__.from_config(layer.get_config()), (n, *shape), (4, n, *shape)) for n in (1, 9)
    )
    assert often == pytest.approx(9 * once, rel=0.25)  # A convolution of XLA does not count the padding.


def _parts(model):
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(np.ones((8, 3)), np.ones((8, 4)))
    return model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables


def test_peaks_are_found_by_the_names_that_jax_gives():
    kinds = {
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA L4": "L4",
        "Tesla V100-SXM2-16GB": "V100",
        "Tesla T4": "T4",
        "TPU v5 lite": "TPU v5 lite",
        "TPU v5p": "TPU v5p",
        "TPU v6 lite": "TPU v6",
    }
    assert {kind: peak_of(kind) for kind in kinds} == {kind: PEAKS[name] for kind, name in kinds.items()}
    planned = {
        kind: one.peak.get("bfloat16", one.peak.get("float16"))
        for one in known_accelerators().values()
        for kind in one.kinds
    }
    assert {kind: peak_of(kind) for kind in planned} == planned
    assert peak_of("NVIDIA L40") is None
    assert peak_of("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert peak_of("cpu") is None


def test_a_run_that_goes_on_counts_on(tmp_path):
    totals = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            totals.append((epoch, *monitor.attachment.timer.progress[2:]))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 2:
                raise InterruptedError

    monitor = ThroughputMonitor()
    backup = BackupAndRestore(tmp_path, save_freq=1)
    with pytest.raises(InterruptedError):
        fit(built(), monitor, backup, Stop())
    fit(built(), monitor, BackupAndRestore(tmp_path), Seen())
    assert totals == [(0, STEPS, STEPS, STEPS), (1, STEPS, STEPS, 2 * STEPS)]


@pytest.mark.parametrize("together", [5, 3])
def test_accumulated_steps_count(together):
    totals = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: totals.append(monitor.attachment.timer.progress.total)
    )
    monitor = ThroughputMonitor()
    model = built(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=together))
    fit(model, monitor, seen, epochs=1)
    fit(model, monitor, seen, epochs=1)
    assert totals == [STEPS, 2 * STEPS]


def test_what_cannot_be_is_refused():
    with pytest.raises(lockstep.OptionError, match="window: expected a whole number of at least 1, got 0"):
        ThroughputMonitor(window=0)
    with pytest.raises(lockstep.OptionError, match=r"peak_flops: expected operations a second .* got -1"):
        ThroughputMonitor(peak_flops=-1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(lockstep.ScopeError, match="ThroughputMonitor works for models of a strategy"):
        fit(model, ThroughputMonitor())
