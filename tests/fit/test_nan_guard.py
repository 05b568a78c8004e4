"""NanGuard besides law 8: what it says, when it stops, and what it leaves alone."""

import functools
import logging
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.callbacks import BackupAndRestore, NanGuard
from lockstep.checkpoint.store import CheckpointStore
from lockstep.execution import nonfinite_gate

from .nan_guard_runs import BAD_REPLICA, BAD_STEP, BATCH, CAUSES, SAID, STEPS, Run, data, left_by, without

pytestmark = pytest.mark.xdist_group(__name__)  # One process traces the operations of the diagnosis once.


def stopped(run, x, y, *callbacks, **options):
    """The error, and the model."""
    model = run.build()
    options = {"epochs": 1, "shuffle": False, "batch_size": BATCH, "verbose": 0} | options
    with pytest.raises(lockstep.NonFiniteError) as caught:
        model.fit(x, y, callbacks=list(callbacks), **options)
    return caught.value, model


@functools.cache
def left_before_the_bad_step(deterministic, devices, steps_at_once):
    x, y = data()
    run = Run(deterministic, devices, compile={"steps_per_execution": steps_at_once})
    return run.fit(x[: BATCH * BAD_STEP], y[: BATCH * BAD_STEP])[1]


def causes_and_steps():
    """Each cause with two devices, and with one of three other ways to run a step; the nightly set has all of them."""
    for number, cause in enumerate(CAUSES):
        for turn, case in enumerate(
            ((False, 2, 1), (False, 1, 1), (True, 2, 1), (False, 2, 4), (False, 1, 4), (True, 2, 4))
        ):
            every_day = turn in (0, 1 + number % 3)
            yield pytest.param(cause, *case, marks=pytest.mark.slow if every_day else pytest.mark.nightly)


@pytest.mark.parametrize(("cause", "deterministic", "devices", "steps_at_once"), list(causes_and_steps()))
def test_it_stops_before_the_bad_step_and_says_why(cause, deterministic, devices, steps_at_once):
    run = Run(deterministic, devices, compile={"steps_per_execution": steps_at_once})
    error, model = stopped(run, *data(cause), NanGuard())
    layer, variable, rows, words = SAID[cause]
    assert (error.epoch, error.batch, error.replicas) == (0, BAD_STEP, (BAD_REPLICA,))
    assert (error.layer, error.variable, error.rows) == (layer, variable, rows)
    assert words in str(error)
    place = f"On replica {BAD_REPLICA} of 2 (cpu:{min(devices - 1, BAD_REPLICA)}), "
    assert f"epoch 1, step {BAD_STEP + 1}: " in str(error)
    assert place in str(error)
    assert left_by(model) == left_before_the_bad_step(deterministic, devices, steps_at_once)


@pytest.mark.slow
def test_accelerators_compare_without_a_branch_for_which_they_would_wait(monkeypatch):
    monkeypatch.setattr(nonfinite_gate, "platform_of", lambda device: "gpu")
    without_branches = SimpleNamespace(optimization_barrier=jax.lax.optimization_barrier)
    monkeypatch.setattr(nonfinite_gate, "lax", without_branches)
    error, model = stopped(Run(), *data("layer"), NanGuard())
    assert (error.epoch, error.batch) == (0, BAD_STEP)
    assert left_by(model) == left_before_the_bad_step(False, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("given", [NanGuard(), {"guard": NanGuard()}, (NanGuard(),)], ids=["one", "dict", "tuple"])
def test_guard_is_found_in_each_form_of_callbacks(given):
    model = Run().build()
    with pytest.raises(lockstep.NonFiniteError):
        model.fit(*data("input"), batch_size=BATCH, shuffle=False, verbose=0, callbacks=given)


@pytest.mark.slow
def test_the_last_step_of_an_epoch_is_answered_before_the_validation():
    seen = []

    class Seeing(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            seen.append(batch)

    x, y = data("layer", bad_steps=[STEPS - 1])
    error, _ = stopped(Run(), x, y, NanGuard(), Seeing(), validation_data=(x[:8], y[:8]))
    assert (error.epoch, error.batch) == (0, STEPS - 1)
    assert seen == []


@pytest.mark.slow
def test_each_skipped_step_is_one_line(caplog):
    caplog.set_level(logging.INFO, "lockstep")
    x, y = data("input", steps=10, bad_steps=[1, 3, 4, 6, 7, 8])
    guard = NanGuard("skip")
    model, *_ = Run().fit(x, y, guard)
    lines = [message for message in caplog.messages if "NanGuard" in message]
    assert len(lines) == guard.skipped == 6
    assert (
        "epoch 1, step 4: Not finite after it: the loss; variable 'encoder/first/kernel' and 8 other variables."
        in lines[1]
    )
    assert "The step is left out, the 2nd so far." in lines[1]
    assert ["NaN in row 4" in line for line in lines] == [True] * 5 + [False]
    assert "the first 5 were" in lines[5]
    assert int(model.optimizer.iterations.value) == 4


@pytest.mark.slow
def test_too_many_in_a_row_stop_it_in_the_next_epoch_too():
    x, y = data("input", bad_steps=[0, STEPS - 1])
    guard = NanGuard("skip", max_in_a_row=2)
    error, _ = stopped(Run(), x, y, guard, epochs=3)
    assert (error.epoch, error.batch) == (1, 0)
    assert "the 2nd such step in a row (max_in_a_row=2)" in str(error)
    assert guard.skipped == 2


@pytest.mark.slow
def test_a_resumed_run_counts_the_steps_that_were_skipped_before(tmp_path):
    x, y = data("input", bad_steps=[1, 2])

    def callbacks():
        return NanGuard("skip", max_in_a_row=2), BackupAndRestore(tmp_path, save_freq=1, async_=False)

    def interrupt(batch, logs):
        if batch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Run().fit(x, y, *callbacks(), keras.callbacks.LambdaCallback(on_train_batch_begin=interrupt))
    guard, backup = callbacks()
    error, _ = stopped(Run(), x, y, guard, backup)
    assert (error.batch, guard.skipped, guard.in_a_row) == (2, 1, 2)


@pytest.mark.slow
def test_too_many_rollbacks_stop_it(tmp_path):
    x, y = data("input", bad_steps=[1, 3, 5])
    guard = NanGuard("rollback", max_rollbacks=2)
    error, model = stopped(Run(), x, y, guard, BackupAndRestore(tmp_path, save_freq=1, async_=False))
    assert error.batch == 5
    assert "gone back 2 times already (max_rollbacks=2)" in str(error)
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.slow
def test_a_rollback_without_a_checkpoint_says_so(tmp_path):
    error, _ = stopped(Run(), *data("input"), NanGuard("rollback"), BackupAndRestore(tmp_path))
    assert "There is no checkpoint to go back to yet" in str(error)
    with pytest.raises(lockstep.OptionError, match="there is none among the callbacks of fit"):
        Run().fit(*data(), NanGuard("rollback"))


@pytest.mark.slow
def test_a_rollback_keeps_the_learning_rate_that_a_callback_has_set(tmp_path):
    """The checkpoint is the very state before the bad step, so going back to it is leaving the step out."""
    x, y = data("input", steps=2 * STEPS, bad_steps=[STEPS])

    def left(action):
        model = Run().build()
        batches = ((x[row : row + BATCH], y[row : row + BATCH]) for row in range(0, len(x), BATCH))
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / 10**epoch)
        callbacks = [NanGuard(action), rate, BackupAndRestore(tmp_path / action)]
        model.fit(batches, epochs=2, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks)
        return left_by(model)

    assert left("rollback") == left("skip")


@pytest.mark.slow
def test_a_rollback_at_an_epochs_end_keeps_the_learning_rate_of_callbacks_before_it(tmp_path):
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.125), "mse")
    x = np.ones((32, 3), "float32")
    x[-1] = np.nan
    halve = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, factor=0.5)
    callbacks = [halve, BackupAndRestore(tmp_path, save_freq=1), NanGuard("rollback")]
    model.fit(x, np.zeros((32, 1)), batch_size=8, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    assert float(model.optimizer.learning_rate) == 0.0625


def test_a_rollback_to_averaged_weights_is_refused(tmp_path):
    callbacks = NanGuard("rollback"), BackupAndRestore(tmp_path), keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(lockstep.OptionError, match="hold the averaged weights"):
        Run(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True)).fit(*data(), *callbacks)


@pytest.mark.slow
def test_a_rollback_before_a_validation_comes_before_weights_are_exchanged_for_averages(tmp_path):
    """The checkpoint is the very state before the bad step, so going back to it is leaving the step out."""
    x, y = data("input", bad_steps=[STEPS - 1])

    def left(action):
        model = Run(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)).build()
        callbacks = [
            keras.callbacks.SwapEMAWeights(),
            NanGuard(action),
            BackupAndRestore(tmp_path / action, save_freq=1),
        ]
        options = {"batch_size": BATCH, "shuffle": False, "epochs": 1, "verbose": 0}
        model.fit(x, y, validation_data=data(), callbacks=callbacks, **options)
        return left_by(model)

    assert left("rollback") == left("skip")


@pytest.mark.slow
def test_no_checkpoint_counts_the_step_that_stops_the_training(tmp_path):
    x, y = data("input")
    stopped(Run(), x, y, NanGuard(), BackupAndRestore(tmp_path, save_freq=1, keep=100))
    assert CheckpointStore(tmp_path).steps()[-1] == BAD_STEP
    good, _ = data()
    again = Run().fit(good, y, NanGuard(), BackupAndRestore(tmp_path, save_freq=1, keep=100))[1]
    assert again == Run().fit(good, y)[1]


@pytest.mark.slow
def test_a_resumed_run_numbers_its_batches_as_ever_and_has_its_own_settings(tmp_path):
    x, y = data("input")
    stopped(Run(), x, y, NanGuard(), BackupAndRestore(tmp_path, save_freq=2))
    error, _ = stopped(Run(), x, y, NanGuard(), BackupAndRestore(tmp_path, save_freq=2))
    assert error.batch == BAD_STEP
    guard = NanGuard("skip")
    left = Run().fit(x, y, guard, BackupAndRestore(tmp_path, save_freq=2))[1]
    assert guard.skipped == 1
    assert left == Run().fit(*without([BAD_STEP], x, y))[1]


@pytest.mark.slow
def test_what_a_loss_scale_sees_to_is_not_its_business():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**127)

    x, y = data()
    run = Run(optimizer=scaled)
    guard = NanGuard()
    model, left, _ = run.fit(x, y, guard, epochs=4)
    assert left == run.fit(x, y, epochs=4)[1]
    assert int(model.optimizer.iterations.value) < 4 * STEPS
    error, _ = stopped(run, *data("input"), NanGuard())
    assert "the input has NaN" in str(error)


@pytest.mark.slow
def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = data()
        run = Run()
        assert run.fit(x, y, NanGuard())[1] == run.fit(x, y)[1]
        error, _ = stopped(run, *data("layer"), NanGuard())
    finally:
        keras.config.set_dtype_policy("float32")
    assert error.layer == "encoder/log"


class Own(keras.Model):
    """A train_step with a loss of its own name, and two calls of the model."""

    def train_step(self, state, batch):
        trainable, non_trainable, optimizer, metrics = state
        x, y = batch

        def loss_of(trainable, non_trainable):
            first, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            second, non_trainable = self.stateless_call(trainable, non_trainable, 0.5 * x, training=True)
            return ops.mean(ops.square(first - y)) + ops.mean(ops.square(second - y)), non_trainable

        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, non_trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"own_loss": loss}, (trainable, non_trainable, optimizer, metrics)


@pytest.mark.optimized
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_train_step_of_ones_own_leaves_the_same_bits(deterministic):
    run = Run(deterministic, model_class=Own)
    x, y = data()
    assert run.fit(x, y, NanGuard())[1] == run.fit(x, y)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "deterministic"),
    [
        pytest.param(cause, deterministic, marks=pytest.mark.nightly if (number + deterministic) % 2 else ())
        for number, cause in enumerate(CAUSES)
        for deterministic in (False, True)
    ],
)
def test_a_train_step_of_ones_own_is_stopped(cause, deterministic):
    error, _ = stopped(Run(deterministic, model_class=Own), *data(cause), NanGuard())
    layer, variable, rows, words = SAID[cause]
    assert (error.batch, error.layer, error.variable, error.rows) == (BAD_STEP, layer, variable, rows)
    assert words in str(error)
    assert error.replicas == (BAD_REPLICA,)


def test_an_update_that_is_too_large_is_told_from_a_gradient():
    x, y = data()
    error, _ = stopped(Run(optimizer=lambda: keras.optimizers.SGD(float("inf"))), x, y, NanGuard())
    assert error.batch == 0
    assert "it is the update of the variables" in str(error)


@pytest.mark.slow
def test_a_model_on_the_global_batch_names_layer_and_rows():
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        log = layers.Lambda(lambda x: ops.log(x + 50), name="log")
        model = keras.Sequential(
            [keras.Input((4,)), log, layers.BatchNormalization(synchronized=True), layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    x, y = data("layer")
    with pytest.raises(lockstep.NonFiniteError, match="Layer 'log' is the first that gives NaN") as caught:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[NanGuard()])
    assert (caught.value.batch, caught.value.rows, caught.value.replicas) == (BAD_STEP, (4,), ())


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rematerialized_model_names_layer_and_rows(replicas):
    class Square(layers.Layer):
        def call(self, x):
            return x * x

    x = np.ones((8, 4), "float32")
    x[5] = 1e30
    with lockstep.MirroredStrategy(["cpu:0"], replicas=replicas).scope(), keras.RematScope("full"):
        model = keras.Sequential([keras.Input((4,)), Square(name="square"), layers.Dense(1)])
        model.compile("sgd", "mse")
    message = "(?i)layer 'square' is the first that gives Inf, from finite numbers, in row 1 "
    with pytest.raises(lockstep.NonFiniteError, match=message):
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0, callbacks=[NanGuard()])


@pytest.mark.slow
def test_operations_masks_and_layers_within_layers():
    class Outer(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.inner = layers.Dense(3, name="inner")

        def call(self, x):
            return ops.log(self.inner(x) * 0 + x[:, :3] + 50)

    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        tokens, numbers = keras.Input((5,), dtype="int32", name="tokens"), keras.Input((4,), name="numbers")
        words = layers.LSTM(3)(layers.Embedding(9, 3, mask_zero=True)(tokens))
        model = keras.Model(
            {"tokens": tokens, "numbers": numbers}, layers.Dense(2)(words + Outer(name="outer")(numbers))
        )
        model.compile("sgd", "mse")
    x, y = data("layer")
    inputs = {"tokens": np.random.default_rng(0).integers(0, 9, (len(x), 5)), "numbers": x}
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [NanGuard()]}
    with pytest.raises(lockstep.NonFiniteError) as caught:
        model.fit(inputs, y, **options)
    assert (caught.value.layer, caught.value.rows, caught.value.replicas) == ("outer", (4,), (1,))
    x[BATCH * BAD_STEP + 4] = np.nan
    with pytest.raises(
        lockstep.NonFiniteError, match=r"On replica 1 of 2 \(cpu:1\), the input at \['numbers'\] has NaN"
    ):
        model.fit(inputs, y, **options)


def test_a_guard_that_cannot_run_the_step_again_still_stops(monkeypatch):
    monkeypatch.setattr("lockstep.fit.nan_diagnosis.rerun", lambda *_: [][0])
    error, _ = stopped(Run(), *data("layer"), NanGuard())
    assert "could not be run again to find the cause (IndexError: list index out of range)" in str(error)


@pytest.mark.slow
def test_random_numbers_of_the_program_are_left_alone():
    class Drawing(Own):
        def train_step(self, state, batch):
            np.random.rand()
            return super().train_step(state, batch)

    x, y = data("layer")
    run = Run(model_class=Drawing)
    run.build()
    np.random.seed(3)
    run.fit(x, y, NanGuard("skip"))
    after = np.random.rand()
    np.random.seed(3)
    run.fit(*data(), NanGuard("skip"))
    assert np.random.rand() == after


class Idle(keras.Model):
    """Trains nothing."""

    def train_step(self, state, batch):
        return {"loss": ops.sum(batch[0])}, state


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_that_trains_nothing_has_nothing_to_guard(deterministic):
    run = Run(deterministic, model_class=Idle)
    assert run.fit(*data("input"), NanGuard())[1] == run.fit(*data())[1]


def test_what_cannot_be_is_refused():
    for options in ({"action": "ignore"}, {"max_in_a_row": 0}, {"max_rollbacks": 1.5}):
        with pytest.raises(lockstep.OptionError, match=f"NanGuard: {next(iter(options))}"):
            NanGuard(**options)
    with pytest.raises(lockstep.OptionError, match="expected one NanGuard, got 2"):
        Run().fit(*data(), NanGuard(), NanGuard())
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(lockstep.ScopeError, match="works for models of a strategy"):
        model.fit(*data(), callbacks=[NanGuard()], verbose=0)


@pytest.mark.slow
def test_it_may_be_given_to_evaluate_and_used_again():
    run, guard = Run(), NanGuard("skip")
    x, y = data("layer")
    model, *_ = run.fit(x, y, guard)
    model.evaluate(x[:8], y[:8], callbacks=[guard], verbose=0)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard], validation_data=(x[:8], y[:8]))
    assert guard.skipped == 2
