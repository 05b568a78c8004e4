"""BackupAndRestore besides law 3: what is refused, what goes on, and what is kept when."""

import contextlib
import functools
import itertools
import logging
import shutil
import threading
import time
import weakref
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep._keras import trainer
from lockstep._version import used_versions
from lockstep.callbacks import BackupAndRestore
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.checkpoint.serialization import StoredArrays
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.process_group import ProcessGroup
from lockstep.fit.checkpointing import fit_checkpoint, model_state
from lockstep.fit.checkpointing.fit_checkpoint import ResumedRun, TrainPosition
from tests.support.marks import every_pair

from .runs import BreakOff, BrokenOffError, Run, Shuffled, arrays, data, drawing, of_step, whole

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again_unless_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lockstep")
    expected = Run(tmp_path).fit()
    again = Run(tmp_path)
    assert again.fit() == expected
    assert again.heard == []
    assert (
        f"{tmp_path} has 3 of 3 epochs, 15 steps: nothing is left to train. To train more, give fit more epochs"
        in caplog.text
    )
    assert "resumes from" not in caplog.text
    more = Run(tmp_path, epochs=2, options={"save_freq": 2, "extend": True})
    more.fit()
    assert more.heard == [(epoch, step) for epoch in (3, 4) for step in range(5)]


@pytest.mark.slow
def test_an_extension_that_is_broken_off_is_resumed_by_the_same_program(tmp_path):
    expected = Run(None, epochs=2).fit(backup=False)
    Run(tmp_path, epochs=1).fit()
    extended = {"epochs": 1, "options": {"save_freq": 1, "extend": True}}
    assert Run(tmp_path, **extended).fit(stop=3) is None
    last = Run(tmp_path, **extended)
    assert last.fit() == expected
    assert last.heard == [(1, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize(
    ("metadata", "calls", "epochs"),
    [
        ({"is_finished": True}, [(2, True)], 5),
        ({"is_finished": False, "extends": 1}, [(4, True)], 5),
        ({"is_finished": False, "extends": 1}, [(4, False)], 4),
        ({"is_finished": False, "extends": 1}, [(4, False), (4, True)], 4),  # The run is no extension any more.
    ],
)
def test_epochs_of_an_extension_count_from_the_end_of_the_run_before(metadata, calls, epochs):
    resumed = ResumedRun.from_checkpoint((15, {}, {"epoch": 3} | metadata))
    for number, extend in calls:
        resumed = resumed.for_epochs(number, extend)
    assert resumed.epochs == epochs


@pytest.mark.parametrize(
    ("position", "epochs", "told"),
    [
        (TrainPosition(14, 2), 2, " To train more"),
        (
            TrainPosition(15, 2, 1),
            1,
            " The model is beyond these epochs: it has the weights of step 15: epoch 3, after 1 of",
        ),
        (
            TrainPosition(15, 2, 1),
            2,
            " The model is beyond these epochs: it has the weights of step 15: epoch 3, after 1 of",
        ),
        (
            TrainPosition(21, 3),
            2,
            " The model is beyond these epochs: it has the weights of step 21: epoch 4, after 0 of",
        ),
    ],
)
def test_a_call_for_fewer_epochs_than_the_run_has_is_told_whose_weights_it_gives(position, epochs, told):
    message = fit_checkpoint.resume_message(ResumedRun(position, epochs=epochs), Path("run"), 7)
    assert f" steps: nothing is left to train.{told}" in message


@pytest.mark.slow
def test_a_call_for_fewer_epochs_keeps_the_position_of_the_run(tmp_path):
    assert Run(tmp_path, options={"save_freq": 1}).fit(stop=8) is None
    Run(tmp_path, epochs=1).fit()
    assert CheckpointStore(tmp_path).newest().metadata["batch"] == 2
    assert Run(tmp_path).fit() == whole()


@pytest.mark.slow
def test_a_validation_that_cannot_be_resumed_is_told_and_no_error(tmp_path, caplog):
    def drawn():  # The shuffling of the training draws in between.
        return {"validation_data": drawing(), "validation_steps": 2}

    caplog.set_level(logging.INFO, logger="lockstep")
    assert Run(tmp_path, validation=drawn).fit(stop=13) is None
    assert Run(tmp_path, validation=drawn).fit()
    assert "the metrics of validations may not be those of an uninterrupted run: The generator 'drawing'" in caplog.text


@pytest.mark.slow
def test_the_state_is_not_written_back_between_the_steps_of_a_validation(tmp_path):
    model, (x, y), are_synced = Run(None).model(), data(), []
    note = keras.callbacks.LambdaCallback()
    note.on_test_batch_begin = lambda batch, logs: are_synced.append(trainer.is_synced(model))
    options = {"batch_size": 40, "validation_data": (x, y), "validation_batch_size": 20, "verbose": 0}
    model.fit(x, y, callbacks=[BackupAndRestore(tmp_path), note], **options)
    assert are_synced[1:] == [False] * 3


@pytest.mark.slow
def test_a_run_that_is_only_looked_at_keeps_its_position(tmp_path):
    Run(tmp_path, "generator", epochs=2).fit()
    Run(tmp_path, "generator", epochs=2).fit()
    assert Run(tmp_path, "generator").fit() == whole("generator")


class EndsAfter(keras.callbacks.Callback):
    """Ends training after so many epochs, as EarlyStopping does; and breaks the process off before the end is written, if asked."""

    def __init__(self, epochs, is_broken_off=False):
        super().__init__()
        self.last, self.is_broken_off = epochs - 1, is_broken_off

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch >= self.last

    def on_train_end(self, logs=None):
        if self.is_broken_off:
            raise BrokenOffError


@pytest.mark.parametrize("is_broken_off", [False, True])
@pytest.mark.slow
def test_what_a_callback_has_ended_is_not_trained_again(is_broken_off, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lockstep")
    expected = Run(None).fit(backup=False, callbacks=[EndsAfter(2)])
    Run(tmp_path).fit(callbacks=[EndsAfter(2, is_broken_off)])
    again = Run(tmp_path, epochs=5)
    assert again.fit(callbacks=[EndsAfter(2)]) == expected
    assert again.heard == []
    assert (
        f"{tmp_path} has 2 of 5 epochs, 10 steps, and a callback has ended it: nothing is left to train. To train more"
        in caplog.text
    )
    more = Run(tmp_path, epochs=1, options={"save_freq": 2, "extend": True})
    more.fit()
    assert more.heard == [(2, step) for step in range(5)]


@pytest.mark.slow
def test_more_epochs_go_on_where_fewer_have_ended(tmp_path):
    Run(tmp_path, epochs=2).fit()
    further = Run(tmp_path, epochs=3)
    assert further.fit() == whole()
    assert further.heard == [(2, step) for step in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_state_is_copied_on_a_cpu_and_to_the_host_from_other_devices(platform, tmp_path, monkeypatch):
    monkeypatch.setattr(model_state, "is_on_cpu", lambda arrays: platform == "cpu")
    (copy,) = model_state.copies_of([jax.numpy.ones(3)])
    assert isinstance(copy, np.ndarray) == (platform == "gpu")
    Run(tmp_path, options={"save_freq": 1}).fit(7)
    assert Run(tmp_path).fit() == whole()


@pytest.fixture
def three_steps():
    """Keras takes no more of an epoch: KERAS_MAX_STEPS_PER_EPOCH, which is for trials."""
    keras.config.set_max_steps_per_epoch(3)
    yield
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.slow
@pytest.mark.usefixtures("three_steps")
@pytest.mark.filterwarnings("ignore:Limiting steps_per_epoch")
@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_keras_own_limit_of_steps_is_as_steps_per_epoch(stop, tmp_path):
    steps = []
    counting = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: steps.append(counting.params["steps"]))
    expected = Run(None).fit(backup=False)
    Run(tmp_path, options={"save_freq": 1}).fit(stop)
    assert Run(tmp_path, options={"save_freq": 1}).fit(callbacks=[counting]) == expected
    assert steps == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"replicas": 3}, r"replicas: 2 then, 3 now"),
        ({"deterministic": True}, r"deterministic: False then, True now"),
        ({"width": 5}, r"another model: for .*kernel of shape \(72, 5\) it has .*kernel of shape \(72, 4\)"),
        ({"given": {"x": data()[0], "y": data()[1], "batch_size": 10}}, r"steps of an epoch: 5 then, 8 now"),
        (
            {"optimizer": keras.optimizers.Adamax},
            r"another model: for adamax.* of the optimizer it has adam.*/iteration",
        ),
        ({"metrics": ()}, r"another model: it also has accuracy/total, accuracy/count"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_another_run_is_refused_with_both_sides(changed, message, tmp_path):
    Run(tmp_path).fit(4)
    before = CheckpointStore(tmp_path).steps()
    with pytest.raises(lockstep.CheckpointError, match=message):
        Run(tmp_path, **changed).fit()
    assert CheckpointStore(tmp_path).steps() == before


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_variables_of_another_dtype_are_refused_with_both(then, now, tmp_path):
    def trained(dtype, epochs):
        keras.utils.set_random_seed(1)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=dtype)])
            model.compile("adam", "mse")
        x, y, callbacks = np.ones((8, 2)), np.ones((8, 1)), [BackupAndRestore(tmp_path)]
        return model.fit(x, y, epochs=epochs, verbose=0, callbacks=callbacks).epoch

    trained(then, 1)
    message = rf"another model: for .*/kernel of dtype {now} it has .*/kernel of dtype {then}\. Fix: build and compile"
    with pytest.raises(lockstep.CheckpointError, match=message):
        trained(now, 2)
    assert trained(then, 2) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_other_layers_that_are_frozen_are_refused(named, tmp_path):
    def trained(frozen, epochs, are_new=True):
        if are_new:  # as in another process
            keras.utils.clear_session()
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            layers = [keras.layers.Dense(2, name=f"layer_{n}" if named else None) for n in range(3)]
            layers[frozen].trainable = False
            model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.BatchNormalization()])
            model.compile("adam", "mse")
        x, y, callbacks = np.ones((8, 2)), np.ones((8, 2)), [BackupAndRestore(tmp_path)]
        return model.fit(x, y, epochs=epochs, verbose=0, callbacks=callbacks).epoch

    trained(0, 1)
    message = r"another model: .*(layer_1|dense_1)/bias was trained then and is frozen now\. Fix: build"
    with pytest.raises(lockstep.CheckpointError, match=message):
        trained(1, 2)
    assert trained(0, 2) == [0, 1]
    assert trained(0, 3, are_new=False) == [0, 1, 2]


@pytest.mark.slow
def test_layers_of_the_same_names_in_another_order_are_refused(tmp_path):
    def trained(names, epochs):
        with lockstep.MirroredStrategy(["cpu:0"]).scope():
            left, right = keras.Input((2,)), keras.Input((2,))
            inputs = {"user": left, "item": right}
            towers = [keras.layers.Dense(1, name=name)(inputs[name]) for name in names]
            output = keras.layers.Add()(towers)
            for number in range(5):  # Names of variables may come in the order of texts, in which 10 is before 2.
                output = keras.layers.Dense(1, name=f"deep_{number}")(output)
            model = keras.Model([left, right], output)
            model.compile("adam", "mse")
        x, y, callbacks = np.ones((8, 2)), np.ones((8, 1)), [BackupAndRestore(tmp_path)]
        return model.fit([x, x], y, epochs=epochs, verbose=0, callbacks=callbacks).epoch

    trained(("user", "item"), 1)
    message = (
        r"another model: for item/kernel it has user/kernel, as its layers were made in another order\. Fix: build"
    )
    with pytest.raises(lockstep.CheckpointError, match=message):
        trained(("item", "user"), 2)
    assert trained(("user", "item"), 2) == [0, 1]


@pytest.mark.slow
def test_a_position_within_a_call_of_several_steps_is_refused(tmp_path):
    assert Run(tmp_path, options={"save_freq": 1}).fit(stop=4) is None
    with pytest.raises(
        lockstep.CheckpointError, match="after 3 steps of an epoch, in which steps_per_execution was 1;"
    ):
        Run(tmp_path, joined=2).fit()
    assert Run(tmp_path).fit() == whole()


@pytest.mark.slow
def test_another_number_of_replicas_goes_on_if_asked(tmp_path):
    Run(tmp_path).fit(4)
    other = Run(tmp_path, replicas=3, options={"save_freq": 2, "allow_changes": True})
    assert other.fit() is not None
    assert other.heard[0] == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_fit_with_a_distributed_data_set_repeats_its_hooks_when_it_resumes(own, tmp_path):
    def run(folder):
        strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=2)
        if own:
            dataset = strategy.distribute_datasets_from_function(lambda context: Shuffled())
        else:
            dataset = strategy.experimental_distribute_dataset(Shuffled())
        return Run(folder, given={"x": dataset}, epochs=2)

    expected = run(None).fit(backup=False)
    run(tmp_path).fit(5 if own else 8)
    assert run(tmp_path).fit() == expected


@pytest.mark.slow
def test_other_data_are_refused(tmp_path):
    x, y = data()
    Run(tmp_path).fit(4)
    with pytest.raises(lockstep.InputError, match=r"batch 2 of this pass is not the one that was trained on"):
        Run(tmp_path, given={"x": x + 1, "y": y, "batch_size": 16}).fit()


@pytest.mark.slow
def test_a_validation_that_is_read_again_does_not_change_what_the_training_draws(tmp_path):
    x, y = data()

    def in_turn():
        for first in itertools.count(step=3):
            yield x[first % 64 : first % 64 + 8], y[first % 64 : first % 64 + 8]

    def train(folder, stop=None):
        validation = {"validation_data": in_turn(), "validation_steps": 2}
        return Run(tmp_path / folder, "generator", validation=lambda: validation).fit(stop=stop)

    whole_run = train("whole")
    assert train("stopped", stop=8) is None
    assert train("stopped") == whole_run


@pytest.mark.slow
def test_a_replay_may_be_refused(tmp_path):
    Run(tmp_path, "generator").fit(4)
    options = {"save_freq": 2, "replay": False}
    with pytest.raises(lockstep.InputError, match=r"generator 'drawing' stands at batch 2.*replay=True"):
        Run(tmp_path, "generator", options=options).fit()
    assert Run(tmp_path / "other", "function", options=options).fit(4) is None
    assert Run(tmp_path / "other", "function", options=options).fit() is not None


@pytest.mark.slow
def test_a_damaged_newest_one_is_passed_over(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    Run(tmp_path).fit(8)
    newest = CheckpointStore(tmp_path).paths()[-1] / "arrays.npz"
    content = bytearray(newest.read_bytes())
    content[::64] = bytes(byte ^ 1 for byte in content[::64])  # the arrays' own bytes among them
    newest.write_bytes(content)
    assert Run(tmp_path).fit() == whole()
    assert "checkpoint refused" in caplog.text


class Halves(keras.metrics.Metric):
    """Has two results."""

    def __init__(self, form):
        super().__init__(name="halves")
        self.form = form
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.sum(y_true), "float32"))

    def result(self):
        return self.form(self.total / 2)


def nested(half):
    return {"one": half, "two": {"other": half}}


@pytest.mark.slow
def test_a_metric_of_several_results_is_kept(tmp_path):
    expected = Run(None, metrics=("accuracy", Halves(nested))).fit(backup=False)
    assert Run(tmp_path, metrics=("accuracy", Halves(nested))).fit(6) is None
    assert CheckpointStore(tmp_path).steps() == [2, 4, 5]
    again = Run(tmp_path, metrics=("accuracy", Halves(nested)))
    assert again.fit() == expected
    assert again.heard[0] == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"),
    [
        (lambda half: (half, [half]), "halves"),
        (lambda half: {1: half, 2: (half,)}, 2),
        (lambda half: {np.int64(1): half}, 1),
    ],
    ids=["tuple", "numbers", "numbers of NumPy"],
)
@pytest.mark.parametrize("stop", [5, 6])
def test_a_metric_whose_results_are_no_json_is_kept(form, name, stop, tmp_path):
    def run(folder, *callbacks):
        keras.utils.set_random_seed(1)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Halves(form)])
        callbacks = [*callbacks, BackupAndRestore(folder, save_freq=1, async_=False)]
        x, y = np.ones((16, 2)), np.ones((16, 1))
        return model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks).history

    expected = run(tmp_path / "whole")
    with pytest.raises(BrokenOffError):
        run(tmp_path / "stopped", BreakOff(stop))
    found = run(tmp_path / "stopped")
    assert CheckpointStore(tmp_path / "stopped").steps() == [6, 7, 8]
    assert {**found, name: None} == {**expected, name: None}
    assert jax.tree.map(float, found[name]) == jax.tree.map(float, expected[name])


@pytest.mark.slow
def test_a_disk_that_fails_costs_checkpoints_and_no_training(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lockstep")

    def full(store, step, snapshot):
        raise lockstep.CheckpointError("No space left on device", 28)

    monkeypatch.setattr(CheckpointStore, "write", full)
    assert Run(tmp_path).fit() == whole()
    assert "No space left on device" in caplog.text


def test_times_count_as_steps_do(tmp_path):
    Run(tmp_path, options={"save_freq": "0.000001 s", "keep": 100}).fit(4)
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]


@pytest.mark.parametrize("save_freq", ["often", "10 days", 0, -1, 2.5, True])
def test_other_frequencies_are_refused(save_freq):
    with pytest.raises(lockstep.OptionError, match="save_freq"):
        lockstep.callbacks.BackupAndRestore("x", save_freq)


def test_a_loop_has_no_epochs_to_save_after(tmp_path):
    with pytest.raises(lockstep.OptionError, match=r"save_freq: expected a number of steps, or a time .*got 'epoch'"):
        lockstep.MirroredStrategy().checkpoint(tmp_path, save_freq="epoch")


def test_without_a_strategy_it_says_so(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(lockstep.ScopeError, match="works for models of a strategy"):
        model.fit(
            np.ones((4, 2)), np.ones((4, 1)), callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path)], verbose=0
        )


def test_two_of_them_are_refused(tmp_path):
    model, (x, y) = Run(tmp_path).model(), data()
    backups = [lockstep.callbacks.BackupAndRestore(tmp_path / name) for name in "ab"]
    with pytest.raises(lockstep.OptionError, match="expected one BackupAndRestore, got 2"):
        model.fit(x, y, callbacks=backups, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_a_changed_learning_rate_that_is_not_used_is_told(rate, tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    for given, epochs in ((0.01, 1), (rate, 2), (rate, 3)):
        Run(tmp_path, optimizer=lambda _, given=given: keras.optimizers.Adam(given), epochs=epochs).fit()
    line = "the learning rate of the program was 0.01 and is 0.5, which is not used: training continues with 0.01"
    assert caplog.text.count(line) == (2 if rate == 0.5 else 0)


@pytest.mark.slow
def test_data_with_hooks_that_have_two_uses_are_told(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    for both in (False, True):
        rows = Shuffled()
        run = Run(tmp_path / str(both), given={"x": rows}, epochs=1)
        run.validation = lambda rows=rows, both=both: {"validation_data": rows if both else Shuffled()}
        run.fit()
        assert (
            "Shuffled: its hooks at the beginning and end of epochs also run for another use" in caplog.text
        ) is both


def test_a_custom_loop_resumes(tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    begin = {"weights": [np.zeros(3, "float32"), np.ones(2, "float32")], "moment": np.float32(1)}

    def loop(steps):
        with strategy.checkpoint(tmp_path) as checkpoint:
            state, start = checkpoint.restore(begin)
            for step in range(start, steps):
                state = {
                    "weights": [w * 0.5 + np.random.rand() for w in state["weights"]],
                    "moment": state["moment"] + 1,
                }
                checkpoint.save(step + 1, state)
        return start, state

    np.random.seed(3)
    loop(4)
    np.random.seed(99)
    start, state = loop(7)
    assert start == 4
    np.random.seed(3)
    expected = begin
    for _ in range(7):
        expected = {
            "weights": [w * 0.5 + np.random.rand() for w in expected["weights"]],
            "moment": expected["moment"] + 1,
        }
    np.testing.assert_allclose(state["weights"][0], expected["weights"][0], rtol=1e-6)
    assert float(state["moment"]) == 8.0
    other = {"weights": [np.zeros(4, "float32"), np.ones(2, "float32")], "moment": np.float32(1)}
    with (
        strategy.checkpoint(tmp_path) as checkpoint,
        pytest.raises(lockstep.CheckpointError, match=r"another state: state\['weights'\]\[0\] is"),
    ):
        checkpoint.restore(other)


def test_the_state_of_a_loop_that_is_one_array_has_a_name(tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.checkpoint(tmp_path) as checkpoint:
        checkpoint.save(1, np.zeros(2, "float32"))
    message = "another state: state is absent, or of another shape or dtype"
    with strategy.checkpoint(tmp_path) as checkpoint, pytest.raises(lockstep.CheckpointError, match=message):
        checkpoint.restore(np.zeros(3, "float32"))


def test_numbers_of_the_host_in_a_loop_are_not_narrowed(tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
    begin = {"seen": np.array([3_000_000_000]), "sum": np.float64(1e-9), "rate": 0.1, "weights": np.zeros(2, "float16")}
    with strategy.checkpoint(tmp_path) as checkpoint:
        checkpoint.restore(begin)
        checkpoint.save(1, begin | {"weights": jax.numpy.ones(2, "float16")})
    with strategy.checkpoint(tmp_path) as checkpoint:
        found, start = checkpoint.restore(begin)
        with pytest.raises(lockstep.CheckpointError, match=r"\['weights'\] is absent, or of another shape or dtype"):
            checkpoint.restore(begin | {"weights": np.zeros(2, "float32")})
    assert start == 1
    assert (found["seen"].dtype, found["seen"].tolist()) == ("int64", [3_000_000_000])
    assert (type(found["sum"]), found["sum"]) == (np.float64, 1e-9)
    assert (type(found["rate"]), found["rate"]) == (float, 0.1)
    assert isinstance(found["weights"], jax.Array)


@pytest.mark.parametrize(("first", "saved"), [(0.0, 2**33 + 1), (0, 0.1), (0, 1e300)])
def test_a_number_of_a_loop_may_change_its_type(first, saved, tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0"])
    for step, state in ((0, first), (1, saved)):
        with strategy.checkpoint(tmp_path, save_freq=1) as checkpoint:
            assert checkpoint.restore(first) == (state, step)
            checkpoint.save(1, saved)


def test_what_a_loop_can_never_store_is_refused_before_it_begins(tmp_path):
    with lockstep.MirroredStrategy(["cpu:0"]).checkpoint(tmp_path, save_freq=1) as checkpoint:
        for leaf in ("run 7", 2**70):
            with pytest.raises(lockstep.OptionError, match=r"state\['name'\] cannot be stored"):
                checkpoint.restore({"w": np.ones(2), "name": leaf})
        for step in (1.0, -1):
            with pytest.raises(lockstep.OptionError, match="step: expected a whole number"):
                checkpoint.save(step, {"w": np.ones(2)})


def test_a_loop_that_counts_the_steps_of_each_epoch_is_refused_also_if_it_has_resumed(tmp_path):
    strategy, state = lockstep.MirroredStrategy(["cpu:0"]), np.ones(2)
    with strategy.checkpoint(tmp_path, save_freq=1) as checkpoint:
        checkpoint.save(3, state)
        with pytest.raises(
            lockstep.OptionError, match=r"step: expected at least 3, .* got 1; .* Fix: count the steps of all epochs"
        ):
            checkpoint.save(1, state)
        checkpoint.save(3, state)
    with strategy.checkpoint(tmp_path, save_freq=1) as checkpoint:
        checkpoint.restore(state)
        with pytest.raises(lockstep.OptionError, match="expected at least 3"):
            checkpoint.save(2, state)


def test_a_loop_that_has_another_number_of_replicas_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    for replicas in (2, 2, 3):
        with lockstep.MirroredStrategy(["cpu:0"], replicas=replicas).checkpoint(tmp_path, save_freq=1) as checkpoint:
            state, step = checkpoint.restore(np.zeros(2, "float32"))
            checkpoint.save(step + 1, state)
        assert ("had 2 replicas and now has 3" in caplog.text) is (replicas == 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_of_random_numbers_in_a_loop_go_on(kind, tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])

    def loop(steps):
        drawn = []
        with strategy.checkpoint(tmp_path) as checkpoint:
            state, start = checkpoint.restore({"keys": jax.random.split(jax.random.key(7, impl=kind), 3)})
            for step in range(start, steps):
                keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(state["keys"])
                drawn.append(jax.random.uniform(keys[0]).item())
                checkpoint.save(step + 1, state := {"keys": keys})
        return drawn

    drawn = loop(2) + loop(5)
    assert len(set(drawn)) == 5
    for path in CheckpointStore(tmp_path).paths():
        shutil.rmtree(path)
    assert loop(5) == drawn


@pytest.mark.slow
def test_other_versions_go_on_with_a_line(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lockstep")
    Run(tmp_path).fit(4)
    assert CheckpointStore(tmp_path).newest().metadata["versions"] == used_versions()
    monkeypatch.setattr(
        "lockstep.fit.checkpointing.fit_checkpoint.used_versions", lambda: used_versions() | {"jax": "99.1"}
    )
    assert Run(tmp_path).fit() == whole()
    assert f"jax {used_versions()['jax']} then, 99.1 now" in caplog.text


class Marks(keras.callbacks.Callback):
    """Knows the first step of an epoch by an attribute that is again what it was at the begin where a checkpoint is written."""

    def __init__(self, heard):
        super().__init__()
        self.tell, self.is_first, self.timer = heard.append, False, None

    def on_epoch_begin(self, epoch, logs=None):
        self.is_first, self.timer = True, object()

    def on_train_batch_begin(self, batch, logs=None):
        self.tell((batch, self.is_first, self.timer is not None))
        self.is_first = False


@pytest.mark.slow
def test_what_has_not_changed_since_the_begin_is_not_what_an_epoch_that_is_begun_anew_makes_of_it(tmp_path):
    heard = []
    assert Run(tmp_path, epochs=1).fit(stop=3, callbacks=[Marks(heard)]) is None
    Run(tmp_path, epochs=1).fit(callbacks=[Marks(heard)])
    assert [(batch, is_first) for batch, is_first, _ in heard] == [(batch, batch == 0) for batch in (0, 1, 2, 2, 3, 4)]
    assert all(has_timer for _, _, has_timer in heard)


class LogsRate(keras.callbacks.Callback):
    """Puts the variable of the learning rate, which is not its number, into the logs."""

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = self.model.optimizer.learning_rate


@pytest.mark.parametrize("stop", [5, 7])
def test_a_variable_in_the_logs_costs_nothing_of_the_history(stop, tmp_path):
    def run(number=None):
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.25), "mse")
        backup = BackupAndRestore(tmp_path, save_freq=1, async_=False)
        callbacks = [backup, LogsRate(), *([BreakOff(number)] if number else [])]
        return model.fit(np.ones((16, 2)), np.ones((16, 1)), batch_size=4, epochs=3, verbose=0, callbacks=callbacks)

    with pytest.raises(BrokenOffError):
        run(stop)
    history = run()
    assert history.epoch == [0, 1, 2]
    assert [float(rate) for rate in history.history["rate"]] == [0.25] * 3
    assert len(history.history["loss"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("append", [False, True])
def test_a_log_that_a_resumed_run_has_emptied_is_told_once(append, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    name = str(tmp_path / "log.csv")
    run = {"folder": tmp_path / "run", "options": {"save_freq": "epoch"}}
    for epochs in (1, 2):
        Run(**run, epochs=epochs).fit(callbacks=[keras.callbacks.CSVLogger(name, append=append)])
    line = (
        f"CSVLogger has emptied {name}: the rows of the epochs before are lost. Fix: CSVLogger({name!r}, append=True)"
    )
    assert caplog.text.count(line) == caplog.text.count("CSVLogger has") == (not append)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == (3 if append else 2)


class CountsInThreads(keras.callbacks.Callback):
    """Keras calls its methods for batches in threads."""

    async_safe = True

    def __init__(self):
        super().__init__()
        self.seen, self.lock = 0, threading.Lock()

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        with self.lock:
            self.seen += 1

    def on_test_begin(self, logs=None):
        """With this method the state is kept when a validation begins."""


def test_a_checkpoint_has_what_callbacks_in_threads_have_made_of_its_steps(tmp_path, monkeypatch):
    kept, packed = [], fit_checkpoint.packed_attributes

    def keep(owner, *args):
        if isinstance(owner, CountsInThreads):
            kept.append(owner.seen)
        return packed(owner, *args)

    monkeypatch.setattr(fit_checkpoint, "packed_attributes", keep)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, callbacks = np.ones((8, 2)), np.ones((8, 1)), [CountsInThreads(), BackupAndRestore(tmp_path, save_freq=3)]
    model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks, validation_data=(x, y))
    assert kept == [3, 4, 4, 4]  # after step 3, before the validation, at the end of the epoch and of the training


MONITORING = {
    "EarlyStopping": keras.callbacks.EarlyStopping,
    "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau,
    "ModelCheckpoint": functools.partial(
        keras.callbacks.ModelCheckpoint, "best.weights.h5", save_best_only=True, save_weights_only=True
    ),
}


def continued(callbacks, folder):
    """Trains one epoch with each callback, from one checkpoint to the next; gives their state after ``on_train_begin``."""
    found = []
    for number, callback in enumerate(callbacks):
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        see = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, it=callback: found.append((it.best, it.min_delta, it.monitor_op))
        )
        backup = BackupAndRestore(folder, async_=False)
        x, y = np.ones((8, 2)), np.ones((8, 1))
        model.fit(x, y, epochs=number + 1, verbose=0, callbacks=[backup, callback, see])
    return found


@pytest.mark.parametrize("made", MONITORING.values(), ids=MONITORING)
@pytest.mark.parametrize("changed", [{"monitor": "mae"}, {"mode": "max"}], ids=["monitor", "mode"])
def test_state_about_another_metric_does_not_come_back_and_is_told(made, changed, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lockstep")
    monkeypatch.chdir(tmp_path)
    before = {"monitor": "loss", "mode": "min"}
    first, second = made(**before), made(**before | changed)
    states = continued([first, second], tmp_path / "run")
    assert states[1][0] is None
    assert second.monitor_op is (keras.ops.greater if "mode" in changed else keras.ops.less)
    line = f"{type(first).__name__} starts over, as its state is about another metric: {before} then, {before | changed} now"
    assert caplog.text.count(line) == caplog.text.count("starts over, as") == 1


@pytest.mark.parametrize("made", [MONITORING["EarlyStopping"], MONITORING["ReduceLROnPlateau"]])
@pytest.mark.parametrize(("mode", "sign"), [("min", -1), ("max", 1)])
def test_min_delta_is_that_of_the_program(made, mode, sign, tmp_path):
    options = {"monitor": "loss", "mode": mode}
    first, second = made(**options, min_delta=0.5), made(**options, min_delta=0.25)
    states = continued([first, second], tmp_path)
    assert (first.min_delta, second.min_delta) == (sign * 0.5, sign * 0.25)
    assert states[1] == (first.best, sign * 0.25, first.monitor_op)


class Best(keras.callbacks.Callback):
    """Gets a value in the first epoch, which no later epoch changes."""

    def __init__(self, left):
        super().__init__()
        self.best, self.table, self.tell = None, None, left.append

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.best, self.table = 0.5, np.arange(3)
        self.tell((self.best, self.table is not None and self.table.tolist()))


@pytest.mark.slow
def test_state_of_an_earlier_call_of_the_run_that_a_later_one_does_not_change_comes_back(tmp_path):
    left, options = [], {"save_freq": 2, "extend": True}
    callback = Best(left)
    for _ in range(2):
        Run(tmp_path, epochs=1, options=options).fit(callbacks=[callback])
    for _ in range(2):  # other processes
        Run(tmp_path, epochs=1, options=options).fit(callbacks=[Best(left)])
    assert left == [(0.5, [0, 1, 2])] * 4


class Boosts(keras.callbacks.Callback):
    """Changes weights and a scale that the data and the program read."""

    def __init__(self, shared):
        super().__init__()
        self.weights, self.shared = shared["weights"], shared

    def on_train_batch_end(self, batch, logs=None):
        self.shared["losses"].append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.weights[::2] *= 1.5
        self.shared["scale"] = 2.0 + epoch


class Boosted(Shuffled):
    """Batches as a callback wants them."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.weights = shared, shared["weights"]

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * np.float32(self.shared["scale"]), y, self.weights[: len(x)]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [6, 8], ids=["between two epochs", "in the middle of an epoch"])
def test_data_and_program_see_what_they_share_with_callbacks(stop, tmp_path):
    def trained(folder, **options):
        shared = {"weights": np.ones(16, "float32"), "scale": 1.0, "losses": []}
        run = Run(folder, given={"x": Boosted(shared)})
        return run.fit(callbacks=[Boosts(shared)], **options), shared

    expected, shared = trained(None, backup=False)
    assert trained(tmp_path, stop=stop)[0] is None
    found, resumed = trained(tmp_path)
    assert found == expected
    assert str(resumed) == str(shared)
    assert len(shared["losses"]) == 15


def test_the_best_weights_of_a_model_in_half_precision_go_on(tmp_path):
    def best(epochs):
        keras.utils.set_random_seed(1)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="bfloat16")])
            model.compile(keras.optimizers.SGD(3.0), "mse")  # Each epoch is worse than the one before.
        stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        callbacks = [stopping, BackupAndRestore(tmp_path / str(len(epochs)))]
        for number in epochs:
            model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=number, verbose=0, callbacks=callbacks)
        return np.asarray(model.get_weights()[0], "float32").tolist()

    assert best([2, 3]) == best([3])


def test_a_last_call_with_fewer_steps_counts_as_many_as_it_has(tmp_path):
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(
        np.ones((20, 2)), np.ones((20, 1)), batch_size=4, epochs=2, verbose=0, callbacks=[BackupAndRestore(tmp_path)]
    )
    assert CheckpointStore(tmp_path).steps() == [5, 10]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 4, 5])  # within an epoch, and before and after the end of a pass
def test_calls_of_several_steps_that_do_not_divide_an_epoch_go_on_at_the_same_rows(tmp_path, stop):
    def left(folder, stop=None):
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=2)
        x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
        given = [BackupAndRestore(folder, save_freq=1)] if folder else []
        given += [BreakOff(stop)] if stop else []
        with contextlib.suppress(BrokenOffError):
            model.fit(x, x[:, :1], batch_size=4, steps_per_epoch=5, epochs=4, verbose=0, callbacks=given)
        return int(model.optimizer.iterations.value), np.concatenate(model.get_weights(), axis=None).tobytes()

    assert left(tmp_path, stop) != left(None)
    assert left(tmp_path) == left(None)


@pytest.mark.slow
def test_the_arrays_of_a_checkpoint_are_not_kept_once_they_are_set(tmp_path, monkeypatch):
    read, kept, before, alive = StoredArrays.__getitem__, [], [], []

    def count():
        return sum(ref() is not None for ref in kept)

    def remembered(stored, name):
        before.append(count())
        array = read(stored, name)
        kept.append(weakref.ref(array))
        return array

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            alive.append(count())

    Run(tmp_path, epochs=1).fit()
    number = len(CheckpointStore(tmp_path).newest().arrays)
    monkeypatch.setattr(StoredArrays, "__getitem__", remembered)
    Run(tmp_path, epochs=2).fit(callbacks=[Counts()])
    assert number > 10
    assert before[:number] == [0] * number  # All are checked, one after the other.
    assert len(kept) > number  # Then they are read again.
    assert alive[1:] == [0] * 4  # Until the first step has ended, JAX may compute on their memory.


class Rows(keras.utils.PyDataset):
    """Six batches of 8 rows, in an order that code outside of ``__getitem__`` may change."""

    def __init__(self, **options):
        super().__init__(**options)
        self.x = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
        self.order = np.arange(48)

    def __len__(self):
        return 6

    def __getitem__(self, number):
        rows = self.order[8 * number : 8 * number + 8]
        return self.x[rows], self.x[rows, :1]


class TurnsAtTheBegin(Rows):
    def on_epoch_begin(self):
        self.order = np.roll(self.order, int(np.random.randint(5)))


class ShufflesAtTheEnd(Rows):
    def on_epoch_end(self):
        np.random.shuffle(self.order)


class SetsOrder(keras.callbacks.Callback):
    def __init__(self, rows):
        super().__init__()
        self._rows = rows

    def on_epoch_begin(self, epoch, logs=None):
        self._rows.order = np.random.default_rng(epoch).permutation(48)


def left_by(rows, folder=None, stop=None, callbacks=(), **given):
    """Weights after three epochs over a ``PyDataset``; None if step ``stop`` breaks it off."""
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [
        *callbacks,
        *([BackupAndRestore(folder, save_freq=1)] if folder else []),
        *([BreakOff(stop)] if stop else []),
    ]
    with contextlib.suppress(BrokenOffError):
        model.fit(rows, shuffle=False, epochs=3, verbose=0, callbacks=callbacks, **given)
        return np.concatenate(model.get_weights(), axis=None).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 7, 10])  # in the first epoch, at its end, in the second one
@pytest.mark.parametrize("kind", [TurnsAtTheBegin, ShufflesAtTheEnd])
def test_hooks_of_a_dataset_run_as_often_in_a_resumed_run(kind, stop, tmp_path):
    assert left_by(kind(), tmp_path, stop) is None
    assert left_by(kind(), tmp_path) == left_by(kind())


@pytest.mark.parametrize("stop", [10, 13])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_order_that_a_callback_sets_goes_on_in_the_middle_of_an_epoch(workers, stop, tmp_path):
    def left(folder=None, stop=None):
        rows = Rows(workers=workers)
        return left_by(rows, folder, stop, [SetsOrder(rows)])

    assert left(tmp_path, stop) is None
    assert left(tmp_path) == left()


@pytest.mark.slow
@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("stop", [5, 6])
def test_threads_read_no_batch_of_the_next_epoch_before_its_hooks(stop, is_distributed, tmp_path):
    def left(workers, folder=None, stop=None):
        rows = ShufflesAtTheEnd(workers=workers)
        if is_distributed:
            rows = lockstep.MirroredStrategy(["cpu:0"], replicas=2).experimental_distribute_dataset(rows)
        return left_by(rows, folder, stop, steps_per_epoch=4)

    assert left(2) == left(1)
    assert left(2, tmp_path, stop) is None
    assert left(2, tmp_path) == left(1)


def test_data_of_unknown_length_that_ends_with_an_epoch_begins_again_in_a_resumed_run(tmp_path):
    def fit(passes, epochs, *callbacks):
        rows = Rows()
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        batches = lambda step: rows[step % 3] if step < 3 * passes else None  # noqa: E731
        model.fit(batches, steps_per_epoch=3, epochs=epochs, verbose=0, callbacks=callbacks)
        return np.concatenate(model.get_weights(), axis=None).tobytes()

    fit(2, 2, BackupAndRestore(tmp_path))
    assert fit(2, 2, BackupAndRestore(tmp_path, extend=True)) == fit(4, 4)


class ShufflesByItself(Rows):
    """Shuffles with a generator of its own, which only its hook changes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rng = np.random.default_rng(1)

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def drawn_batches():
    """Endless; draws from the global generator, and depends on the number of the batch."""
    for number in itertools.count():
        x = np.random.normal(size=(8, 3)).astype("float32") + np.float32(number)
        yield x, x[:, :1]


SEVERAL_CALLS = {
    "hooks that draw": lambda: {"x": ShufflesAtTheEnd()},
    "hooks with a generator": lambda: {"x": ShufflesByItself()},
    "generator": lambda: {"x": drawn_batches(), "steps_per_epoch": 6},
    "arrays in passes": lambda: {"x": Rows().x, "y": Rows().x[:, :1], "batch_size": 8, "steps_per_epoch": 4},
}


def after_calls(given, *calls, is_built=True):
    """Weights after calls of ``fit`` over the same data; None if a step breaks one off.

    Args:
        given: the data.
        *calls: for each the epochs, a BackupAndRestore or None, and a step to break it off or None.
        is_built: whether the model has variables before; else Keras reads the first batch for its shapes.
    """
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((3,))] * is_built + [keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    for epochs, backup, stop in calls:
        callbacks = [*([backup] if backup else []), *([BreakOff(stop)] if stop else [])]
        try:
            model.fit(**given, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        except BrokenOffError:
            return None
    return np.concatenate(model.get_weights(), axis=None).tobytes()


SAVE_FREQ = {1: 100, 3: 2, 7: 1}  # for a stop after each of these steps


@pytest.mark.parametrize(
    ("kind", "stop", "is_built"),
    every_pair([kind for kind in SEVERAL_CALLS if kind != "arrays in passes"], SAVE_FREQ, [True, False]),
)
def test_a_second_call_is_resumed_on_data_that_the_first_has_used(kind, stop, is_built, tmp_path):
    save_freq = SAVE_FREQ[stop]

    def left(stop=None, backup=True):
        callbacks = [BackupAndRestore(tmp_path / name, save_freq) if backup else None for name in "ab"]
        return after_calls(SEVERAL_CALLS[kind](), (2, callbacks[0], None), (2, callbacks[1], stop), is_built=is_built)

    assert left(stop) is None
    assert left() == left(backup=False)


def events_of_fit(callbacks, cache=None, joined=1, **given):
    """How often each step begins, and the parameters that callbacks get."""
    begun, callback = [], keras.callbacks.Callback()
    callback.on_train_batch_begin = lambda batch, logs=None: begun.append(batch)
    model = Run(None, cache=cache, joined=joined).model()
    model.fit(**given, epochs=2, verbose=0, callbacks=[callback, *callbacks])
    return begun, callback.params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"cache": "memory"}, {"x": of_step}),  # The cache knows the end before Keras does.
        ({"joined": 4}, {"steps_per_epoch": 3} | arrays()),
    ],
)
def test_other_callbacks_get_the_same_events_with_a_backup(options, given, tmp_path):
    assert events_of_fit([BackupAndRestore(tmp_path)], **options, **given) == events_of_fit([], **options, **given)


@pytest.mark.slow
def test_the_position_of_a_checkpoint_counts_and_not_a_later_initial_epoch(tmp_path, caplog):
    """Which would skip epochs that are not trained."""
    given = arrays(epochs=4, verbose=0, shuffle=False)

    def fit(*callbacks, **options):
        model = Run(tmp_path).model()
        history = model.fit(**given, **options, callbacks=list(callbacks)).history
        return [*model.get_weights(), *history.values()]

    with pytest.raises(BrokenOffError):
        fit(BackupAndRestore(tmp_path), BreakOff(8))  # in the second epoch
    with caplog.at_level("INFO", logger="lockstep"):
        resumed = fit(BackupAndRestore(tmp_path), initial_epoch=3)
    for one, other in zip(resumed, fit(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "initial_epoch=3 has no effect: the checkpoint is in epoch 2" in caplog.text
    begun = fit(BackupAndRestore(tmp_path / "new"), initial_epoch=3)
    assert len(begun[-1]) == 1


@pytest.mark.parametrize("kind", SEVERAL_CALLS)
def test_calls_with_one_directory_are_one_run_also_in_one_process(kind, tmp_path):
    """As when a cell of a notebook is run again."""
    backups = [BackupAndRestore(tmp_path, extend=True) for _ in range(3)]
    several = after_calls(SEVERAL_CALLS[kind](), *((1, backup, None) for backup in backups))
    assert several == after_calls(SEVERAL_CALLS[kind](), (3, None, None))


class DrawsOrder(Rows):
    def on_epoch_end(self):
        self.order = np.random.permutation(48)


def test_data_whose_hooks_set_all_anew_may_be_used_beyond_a_checkpoint(tmp_path):
    rows = {"x": DrawsOrder()}
    assert after_calls(rows, (3, BackupAndRestore(tmp_path), 14)) is None
    resumed = after_calls(rows, (3, BackupAndRestore(tmp_path), None))
    assert resumed == after_calls({"x": DrawsOrder()}, (3, None, None))


def test_data_that_have_been_used_beyond_a_checkpoint_are_named(tmp_path, caplog):
    given = SEVERAL_CALLS["generator"]()
    assert after_calls(given, (2, BackupAndRestore(tmp_path, 2), 5)) is None
    with pytest.raises(
        lockstep.InputError, match=r"generator 'drawn_batches' has been read beyond the position .* by 1 batches"
    ):
        after_calls(given, (2, BackupAndRestore(tmp_path, 2), None))
    rows = {"x": ShufflesByItself()}
    assert after_calls(rows, (3, BackupAndRestore(tmp_path / "rows"), 14)) is None
    caplog.set_level(logging.INFO, logger="lockstep")
    after_calls(rows, (3, BackupAndRestore(tmp_path / "rows"), None))
    assert "ShufflesByItself: its hooks at the beginning and end of epochs have run 1 times more" in caplog.text


@pytest.mark.slow
def test_other_workers_are_told_when_a_checkpoint_is_read_and_when_its_end_is_waited_for(tmp_path, monkeypatch):
    """They wait as long as for compiling then: a large checkpoint may take minutes."""
    told, heard = [], []

    @contextlib.contextmanager
    def saving(group):
        told.append(group)
        yield
        told.pop()

    def recorded(owner, name):
        original = getattr(owner, name)

        def method(*args, **kwargs):
            heard.append((name, bool(told)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    monkeypatch.setattr(ProcessGroup, "saving", saving)
    for owner, name in ((CheckpointStore, "newest"), (AsyncWriter, "close")):
        recorded(owner, name)
    Run(tmp_path / "fit").fit()
    with lockstep.MirroredStrategy(["cpu:0"]).checkpoint(tmp_path / "loop") as checkpoint:
        checkpoint.restore(np.zeros(2))
    assert [call for call, _ in heard] == ["newest", "close"] * 2
    assert all(is_told for _, is_told in heard), heard
