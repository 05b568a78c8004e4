"""The step timer of a call of fit, with a fake clock, and the callback that adds its readings to the logs."""

import math
import threading
import types

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.callbacks import BackupAndRestore, NanGuard, ThroughputMonitor
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.step_timer import NAMES, FitProgress, StepTimer, TimerReading, numbers_of

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


@pytest.mark.slow
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


@pytest.mark.parametrize("window", [1, 2])
def test_a_pause_is_no_step_of_what_is_recent(window):
    timer = Times(window).trained(60, 50, 9, 9, 1, 3)
    timer.pause()
    assert timer.recent == TimerReading(window, 8 * window, [3, 4][window - 1], 0)


def test_a_monitor_that_knows_the_peak_is_not_undone_by_one_that_does_not():
    counter = FlopCounter()
    attachment = types.SimpleNamespace(flop_counter=counter, devices=jax.local_devices())
    for monitor in (ThroughputMonitor(peak_flops=1e12), ThroughputMonitor()):
        monitor.attach(attachment, {})
    assert (counter.peak, counter.is_wanted) == (1e12, True)


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


@pytest.mark.slow
def test_a_slow_input_is_what_steps_wait_for():
    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, number):
            waiting.wait(0.1)  # much longer than steps take, also on a busy machine
            return tuple(array[:BATCH] for array in data())

    waiting = threading.Event()
    logs = built().fit(Slow(), epochs=2, verbose=0, callbacks=[ThroughputMonitor()]).history
    assert logs["time/data_wait"][1] > 0.5 * logs["time/step"][1]
    assert fit(built(), ThroughputMonitor())["time/data_wait"] == [0, 0]


@pytest.mark.slow
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
