"""LearningRateScaling against a loop in plain Keras that sets the rate by hand before each step."""

import contextlib
import logging
import math

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep._keras import trainer
from lockstep.callbacks import BackupAndRestore, LearningRateScaling
from lockstep.strategies.parameter_server import ParameterServerStrategy
from tests.fit.checkpointing.runs import BreakOff, BrokenOffError

ROWS, BATCH, BASE, EPOCHS, RATE = 40, 16, 4, 3, 0.02
STEPS = -(-ROWS // BATCH)
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 2)).astype("float32")


def model_of(optimizer=None, strategy=None, **options):
    keras.utils.set_random_seed(3)
    made = strategy or lockstep.MirroredStrategy(["cpu:0"], replicas=2)
    with made.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=0.9), "mse", **options)
    return model


def plain(optimizer=None):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
    model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=0.9), "mse")
    return model


class Rates(keras.callbacks.Callback):
    """Keeps the rate of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def fit(model, *callbacks, epochs=EPOCHS, batch=BATCH, **options):
    rates = Rates()
    model.fit(X, Y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, rates], **options)
    return rates.seen


def by_hand(factor, warm_up, steps=EPOCHS * STEPS):
    """The rates of the steps, written down anew."""
    climb = np.linspace(RATE, RATE * factor, warm_up + 1)[:-1] if warm_up else []
    return [*climb, *[RATE * factor] * (steps - warm_up)]


def trained_by_hand(rates, optimizer=None):
    model = plain(optimizer)
    for step, rate in enumerate(rates):
        model.optimizer.learning_rate = rate
        rows = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
        model.train_on_batch(X[rows], Y[rows])
    return model.get_weights()


def rules_and_optimizers():
    """Each rule with one of two optimizers; the other pairs are in the nightly set."""
    rules = {"linear": ("linear", 2, 4), "at once": ("linear", 0, 4), "sqrt": ("sqrt", 1, 2)}
    for number, (name, rule) in enumerate(rules.items()):
        for turn, optimizer in enumerate((keras.optimizers.Adam, keras.optimizers.SGD)):
            marks = pytest.mark.nightly if (number + turn) % 2 else ()
            yield pytest.param(*rule, optimizer, id=f"{optimizer.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("rule", "epochs", "factor", "optimizer"), list(rules_and_optimizers()))
def test_the_weights_are_those_of_a_loop_that_sets_the_rate_by_hand(rule, epochs, factor, optimizer):
    scaling = LearningRateScaling(BASE, rule, epochs)
    model = model_of(optimizer(RATE))
    expected = by_hand(factor, epochs * STEPS)
    np.testing.assert_allclose(fit(model, scaling), expected, rtol=1e-6)
    assert scaling.factor == factor
    for ours, theirs in zip(model.get_weights(), trained_by_hand(expected, optimizer(RATE)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_scaling_in_plain_keras_with_global_batch_is_the_same():
    model = plain()
    fit(model, LearningRateScaling(BASE, warmup_epochs=2, global_batch=BATCH))
    for ours, theirs in zip(model.get_weights(), trained_by_hand(by_hand(4, 2 * STEPS)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_smaller_batch_has_its_smaller_rate_at_once():
    assert fit(model_of(), LearningRateScaling(4 * BATCH)) == pytest.approx([RATE / 4] * STEPS * EPOCHS)


def test_the_end_of_the_warm_up_needs_no_whole_calls():
    seen = fit(model_of(steps_per_execution=2), LearningRateScaling(BASE, warmup_epochs=2))
    rates = by_hand(4, 2 * STEPS)
    assert seen == pytest.approx([rates[0], rates[2], rates[3], rates[5], rates[6], rates[8]])


def test_an_epoch_has_the_steps_of_whole_executions(tmp_path):
    expected = pytest.approx(by_hand(4, 8, steps=12)[::2])
    for more in ([], [BackupAndRestore(tmp_path)]):
        assert (
            fit(model_of(steps_per_execution=2), LearningRateScaling(BASE, warmup_epochs=2), *more, steps_per_epoch=3)
            == expected
        )


def batches():
    while True:
        yield from ((X[start : start + BATCH], Y[start : start + BATCH]) for start in (0, BATCH))


@pytest.mark.parametrize("is_built", [False, True], ids=["new", "used"])
def test_scaling_reads_the_batch_of_a_generator_and_loses_none(is_built):
    models = [model_of(), model_of()]
    scaling = LearningRateScaling(BASE, warmup_epochs=0)
    for model, callbacks in zip(models, ([scaling], []), strict=True):
        if is_built:
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        if not callbacks:
            model.optimizer.learning_rate = 4 * RATE
        model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0, callbacks=callbacks)
    assert scaling.factor == 4
    for ours, theirs in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_gradient_accumulation_makes_the_batch_larger():
    scaling = LearningRateScaling(BASE, warmup_epochs=0)
    fit(model_of(keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)), scaling, epochs=1)
    assert scaling.factor == 8


def test_a_loss_scale_is_left_alone():
    inner = keras.optimizers.SGD(RATE)
    model = model_of(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0))
    assert fit(model, LearningRateScaling(BASE, warmup_epochs=1)) == pytest.approx(by_hand(4, STEPS))
    assert float(inner.learning_rate) == pytest.approx(4 * RATE)


def test_a_second_fit_continues_without_scaling_again():
    model, scaling = model_of(), LearningRateScaling(BASE, warmup_epochs=2)
    seen = [rate for _ in range(EPOCHS) for rate in fit(model, scaling, epochs=1)]
    assert seen == pytest.approx(by_hand(4, 2 * STEPS))
    assert fit(model, scaling, epochs=1) == pytest.approx([4 * RATE] * STEPS)
    assert fit(model, scaling, epochs=1, batch=BATCH // 2)[0] == pytest.approx(2 * RATE)
    model.optimizer.learning_rate = RATE
    assert fit(model, scaling, epochs=1)[0] == pytest.approx(2 * RATE)
    assert fit(model_of(), scaling, epochs=1)[0] == pytest.approx(RATE)  # another optimizer: anew


def test_callbacks_after_the_warm_up_start_from_the_scaled_rate():
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    seen = fit(model_of(), LearningRateScaling(BASE, warmup_epochs=1), plateau, epochs=4)
    assert [seen[epoch * STEPS] for epoch in range(4)] == pytest.approx([RATE, 4 * RATE, 2 * RATE, RATE])


def test_a_scheduler_that_keeps_the_rate_works_with_the_warm_up():
    later = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 2 else rate / 10)
    seen = fit(model_of(), LearningRateScaling(BASE, warmup_epochs=2), later)
    assert seen == pytest.approx([*by_hand(4, 2 * STEPS)[:-STEPS], *[RATE * 4 / 10] * STEPS])


def test_a_callback_that_sets_the_rate_ends_the_warm_up(caplog):
    other = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch == 1 else rate)
    with caplog.at_level(logging.INFO):
        seen = fit(model_of(), LearningRateScaling(BASE, warmup_epochs=2), other)
    assert seen == pytest.approx([*by_hand(4, 2 * STEPS)[:STEPS], *[0.05] * 2 * STEPS])
    assert f"the warm-up ends after {STEPS} steps, as something else has set the learning rate to 0.05" in caplog.text


@pytest.fixture(scope="module")
def whole():
    """What a run leaves that nobody has stopped."""
    return resumed(None)


def resumed(stop, folder=None):
    model, rates = model_of(metrics=["mae"]), []
    callbacks = [lockstep.callbacks.BackupAndRestore(folder, save_freq=2)] if folder else []
    callbacks += [LearningRateScaling(BASE, warmup_epochs=2), BreakOff(stop)]
    with contextlib.suppress(BrokenOffError):
        rates = model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    return rates, [np.asarray(variable).tobytes() for variable in [*model.variables, *model.optimizer.variables]]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 5, 8], ids=["in the warm-up", "later in it", "after it"])
def test_scaling_resumes_with_the_same_bits(stop, whole, tmp_path):
    assert resumed(stop, tmp_path)[0] == []
    assert resumed(None, tmp_path) == whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("rows", [3 * BATCH, 3 * BATCH + 1], ids=["even", "a last batch of one row"])
def test_scaling_resumes_between_epochs_that_share_a_pass(rows, tmp_path):
    def rates(epochs, *callbacks):
        model, seen = model_of(), Rates()
        scaling = LearningRateScaling(BASE, warmup_epochs=3)
        options = {"batch_size": BATCH, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
        model.fit(X[:rows], Y[:rows], epochs=epochs, callbacks=[scaling, seen, *callbacks], **options)
        return seen.seen

    rates(1, BackupAndRestore(tmp_path))
    assert rates(4, BackupAndRestore(tmp_path)) == rates(4)  # What a callback has seen is in the checkpoint.


@pytest.mark.slow
@pytest.mark.optimized
def test_scaling_gives_the_same_bits_on_any_devices():
    trained = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        model = model_of(strategy=lockstep.MirroredStrategy(devices, replicas=2, deterministic=True))
        fit(model, LearningRateScaling(BASE, warmup_epochs=1), epochs=2)
        trained.append([value.tobytes() for value in model.get_weights()])
    assert trained[0] == trained[1]


SGD = keras.optimizers.SGD()
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(RATE, 10, 0.9)


@pytest.mark.parametrize(
    ("optimizer", "data", "message"),
    [
        (lambda: keras.optimizers.SGD(SCHEDULE), {}, "multiply its rates by the ratio of the batch sizes"),
        (lambda: keras.optimizers.SGD(lambda: RATE), {}, "one learning rate that is a number"),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda variable: SGD),
            {},
            "For a MultiOptimizer, scale the rates of its optimizers",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.MultiOptimizer(lambda variable: SGD)),
            {},
            "For a MultiOptimizer, scale the rates of its optimizers",
        ),
        (lambda: None, {"x": iter([(X, Y)])}, "does not say how many batches an epoch has. Fix: pass steps_per_epoch"),
    ],
    ids=["schedule", "function", "several", "several with a loss scale", "no length"],
)
def test_scaling_refuses_unsupported_optimizers_and_changes_nothing(optimizer, data, message):
    model = model_of(optimizer())
    before = [weight.tobytes() for weight in model.get_weights()]
    given = {"x": (batch for batch in data["x"])} if data else {"x": X, "y": Y}
    with pytest.raises(lockstep.OptionError, match=message):
        model.fit(**given, verbose=0, callbacks=[LearningRateScaling(BASE)])
    assert [weight.tobytes() for weight in model.get_weights()] == before


def test_scaling_in_plain_keras_needs_global_batch():
    with pytest.raises(lockstep.ScopeError, match=r"use LearningRateScaling\(…, global_batch=512\)"):
        fit(plain(), LearningRateScaling(BASE))


def test_scaling_refuses_parameter_servers():
    model = plain()
    strategy = object.__new__(ParameterServerStrategy)  # One that has met its cluster needs processes.
    trainer.attach_strategy(model, strategy, lambda: None, lambda kind: None)
    with pytest.raises(lockstep.ScopeError, match="all workers of a ParameterServerStrategy would have to wait"):
        fit(model, LearningRateScaling(BASE))


def test_scaling_refuses_an_input_without_a_batch():
    model = model_of()
    fit(model, epochs=1)
    with pytest.raises(lockstep.OptionError, match="the rows of a batch are unknown"):
        model.fit(lambda step: None, verbose=0, callbacks=[LearningRateScaling(BASE, warmup_epochs=0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_batch": 0}, "base_batch: expected a whole number of at least 1, got 0"),
        ({"base_batch": 8, "rule": "cubic"}, "rule: expected one of linear, sqrt, got 'cubic'"),
        ({"base_batch": 8, "warmup_epochs": -1}, "warmup_epochs: expected a whole number of at least 0"),
        ({"base_batch": 8, "global_batch": 1.5}, "global_batch: expected a whole number of at least 1"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else None,
)
def test_arguments_out_of_their_range(arguments, message):
    with pytest.raises(lockstep.OptionError, match=message):
        LearningRateScaling(**arguments)


def test_the_root_is_the_one_of_the_ratio():
    scaling = LearningRateScaling(10, "sqrt", 0)
    fit(model_of(), scaling, epochs=1)
    assert scaling.factor == math.sqrt(BATCH / 10)
