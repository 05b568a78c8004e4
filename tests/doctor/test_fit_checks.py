"""Each finding comes with a program that has it, in one line at fit, and not with a near-by program that is right."""

import contextlib
import logging
import os

import keras
import numpy as np
import pytest

import lockstep
from lockstep.doctor.base import sample_rows
from lockstep.doctor.check_lists import BATCH_CHECKS, CALL_CHECKS

from .programs import FROM_LOGITS, PROGRAMS, REFUSED, SPARSE, X, Y, dense, net

NAMES = sorted({*PROGRAMS, *REFUSED, "batch-without-rate"})
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:You are using a softmax over axis"),  # Keras sees that one, too.
    pytest.mark.filterwarnings("ignore:The structure of .inputs. doesn't match"),
]


@pytest.fixture(scope="module")
def strategy():
    return lockstep.MirroredStrategy(["cpu:0"], replicas=2)


@pytest.fixture
def reported(caplog):
    caplog.set_level(logging.INFO, "lockstep")
    lines = lambda: " | ".join(record.getMessage() for record in caplog.records)  # noqa: E731
    return lambda: [name for name in NAMES if f": {name}: " in lines()]


class EnoughError(Exception):
    """The checks of fit have run by now."""


class Stop(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise EnoughError


def fit(strategy, make):
    with strategy.scope():
        model, (x, y, *rest) = make()
    weight, batch, class_weight = (*rest, None, None, None)[:3]
    with contextlib.suppress(EnoughError):  # Nothing is compiled.
        options = {"sample_weight": weight, "batch_size": batch, "class_weight": class_weight}
        model.fit(x, y, **options, verbose=0, callbacks=[Stop()])
    return model


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, id=f"{name}-{n}")
        for name, (wrong, _) in PROGRAMS.items()
        for n, make in enumerate(wrong)
    ],
)
def test_fit_checks_report_a_wrong_program(name, make, strategy, reported):
    fit(strategy, make)
    assert reported() == [name]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, id=f"{name}-{n}")
        for name, (_, right) in PROGRAMS.items()
        for n, make in enumerate(right)
    ],
)
def test_fit_checks_report_nothing_for_a_right_program(name, make, strategy, reported):
    fit(strategy, make)
    assert reported() == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"), [(name, *both) for name, both in REFUSED.items()], ids=list(REFUSED)
)
def test_fit_checks_report_the_label_format_before_keras_raises(name, wrong, right, strategy, reported):
    with pytest.raises(ValueError, match="must have the same shape"):
        fit(strategy, wrong)
    assert reported() == [name]
    fit(strategy, right)
    assert reported() == [name]


def test_fit_checks_check_the_first_batch_of_a_generator_and_lose_none(strategy, reported):
    batches = [(X[start : start + 32], Y[start : start + 32] + 1) for start in range(0, 96, 32)]
    seen = []

    def read():
        for batch in batches:
            seen.append(batch)
            yield batch

    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model.fit(read(), shuffle=False, verbose=0, callbacks=[count])
    assert reported() == ["labels-out-of-range"]
    assert [number for number in seen if isinstance(number, int)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("validation", "names"),
    [
        ((X, Y + 1), ["labels-out-of-range"]),
        ((X, Y + 1, np.zeros(len(X))), []),
        ((X, np.eye(3)[Y]), ["one-hot-labels"]),
        ((X, Y), []),
    ],
)
def test_fit_checks_check_the_labels_of_the_validation_data(validation, names, strategy, reported, caplog):
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    with contextlib.suppress(EnoughError):
        model.fit(X, Y, class_weight={3: 0.0}, verbose=0, callbacks=[Stop()], validation_data=validation)
    assert reported() == names
    if names:
        assert ", validation_data of fit at " in caplog.text


def test_fit_checks_check_the_labels_that_validation_split_holds_out(strategy, reported, caplog):
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    labels = Y.copy()
    labels[-1] = 3
    with contextlib.suppress(EnoughError):
        model.fit(X, labels, validation_split=0.2, verbose=0, callbacks=[Stop()])
    assert reported() == ["labels-out-of-range"]
    assert "validation_data of fit at " in caplog.text


def test_fit_checks_log_a_finding_once_for_a_model_with_its_location(strategy, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    model = fit(strategy, PROGRAMS["softmax-from-logits"][0][0])
    model.fit(X, Y, verbose=0)
    (line,) = [record.getMessage() for record in caplog.records if "softmax-from-logits" in record.getMessage()]
    place = fit.__code__
    assert f"{place.co_filename}:" in line
    assert "from_logits=False" in line


def test_fit_checks_are_switched_off_by_config_and_environment(strategy, reported, monkeypatch):
    lockstep.config.set_doctor(False)
    try:
        fit(strategy, PROGRAMS["softmax-from-logits"][0][0])
    finally:
        lockstep.config.set_doctor(True)
    monkeypatch.setitem(os.environ, "LOCKSTEP_DOCTOR", "0")
    fit(strategy, PROGRAMS["softmax-from-logits"][0][0])
    assert reported() == []


def fitted_twice(first, second, rate=None, **options):
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    for batch in (first, second):
        with contextlib.suppress(EnoughError):
            given = batch if isinstance(batch, dict) else {"batch_size": batch}
            model.fit(X, Y, **given, verbose=0, callbacks=[*options.get("callbacks", ()), Stop()])
        if rate:
            model.optimizer.learning_rate = rate


@pytest.mark.parametrize(
    ("batches", "options", "names"),
    [
        ((16, 64), {}, ["batch-without-rate"]),
        ((64, 16), {}, ["batch-without-rate"]),
        ((16, 20), {}, []),
        ((len(X) // 2, 2 * len(X)), {}, []),
        ((len(X), 2 * len(X)), {}, []),
        ((16, {"steps_per_epoch": len(X) // 16}), {}, []),
        ((32, {"steps_per_epoch": len(X) // 8}), {}, ["batch-without-rate"]),
        ((16, 64), {"rate": 0.04}, []),
        ((16, 64), {"callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)]}, []),
    ],
)
def test_check_changed_batch_reports_a_batch_size_without_its_rate(batches, options, names, reported, monkeypatch):
    monkeypatch.setattr("lockstep.doctor.data_checks._is_known", lambda kind: True)  # Stop is a class of our own.
    fitted_twice(*batches, **options)
    assert reported() == names


@pytest.mark.parametrize(("accumulated", "names"), [(4, []), (None, ["batch-without-rate"])])
def test_check_changed_batch_counts_the_rows_of_an_update(accumulated, names, strategy, reported):
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS, optimizer=keras.optimizers.SGD(0.1))
        model.fit(X, Y, batch_size=32, verbose=0)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)
        model.compile(optimizer, FROM_LOGITS)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert reported() == names


def test_check_changed_batch_reports_a_change_in_a_generator(strategy, reported):
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    for rows in (16, 48):
        model.fit(((X[:rows], Y[:rows]) for _ in range(2)), shuffle=False, verbose=0)
    assert reported() == ["batch-without-rate"]


class InBatches(keras.utils.PyDataset):
    def __init__(self, rows, batch):
        super().__init__()
        self.rows, self.batch = rows, batch

    def __len__(self):
        return -(-self.rows // self.batch)

    def __getitem__(self, number):
        chosen = slice(number * self.batch, min(self.rows, (number + 1) * self.batch))
        return X[chosen], Y[chosen]


@pytest.mark.parametrize(("rows", "names"), [(10, []), (24, ["batch-without-rate"])])
def test_check_changed_batch_ignores_a_pass_of_a_single_batch(rows, names, strategy, reported):
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    model.fit(InBatches(rows, 12), verbose=0)
    model.fit(InBatches(len(X), 32), verbose=0)
    assert reported() == names


def test_fit_checks_leave_a_model_that_is_not_compiled_to_keras(strategy, reported):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert reported() == []


def test_fit_checks_log_a_check_that_fails_and_train(strategy, caplog, monkeypatch):
    def broken(program):
        raise ZeroDivisionError("in a check")

    caplog.set_level(logging.INFO, "lockstep")
    monkeypatch.setattr("lockstep.doctor.check_lists.BATCH_CHECKS", (broken,))
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    assert model.fit(X, Y, verbose=0).history["loss"]
    assert "the checks of this fit failed (ZeroDivisionError: in a check)" in caplog.text


class WithoutConfig(keras.optimizers.SGD):
    def get_config(self):
        raise ValueError


OPTIMIZERS = {
    "several": lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1)),
    "without a config": lambda: WithoutConfig(0.1),
    "a schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fit_checks_accept_any_optimizer(make, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(make(), "mse")
    assert len(model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0).history["loss"]) == 1


def test_check_changed_batch_ignores_runs_with_user_defined_callbacks(reported):
    fitted_twice(16, 64)
    assert reported() == []


@pytest.mark.parametrize(("batch", "is_reported"), [(48, True), (16, False)])
def test_check_changed_batch_reports_a_resumed_run(batch, is_reported, caplog, tmp_path):
    caplog.set_level(logging.INFO, "lockstep")
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
    for size, epochs in ((16, 1), (batch, 2)):
        with strategy.scope():
            model = net(dense(), loss=FROM_LOGITS)
        backup = lockstep.callbacks.BackupAndRestore(tmp_path, allow_changes=True)
        model.fit(X, Y, batch_size=size, epochs=epochs, verbose=0, callbacks=[backup])
    lines = [record.getMessage() for record in caplog.records if "batch-without-rate" in record.getMessage()]
    assert len(lines) == is_reported
    assert not is_reported or "48 rows, 16 in the resumed run, and the learning rate is 0.01 as before" in lines[0]


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise EnoughError


@pytest.mark.slow
def test_check_changed_batch_ignores_the_smaller_batch_at_which_a_run_is_resumed(caplog, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.doctor.data_checks._is_known", lambda kind: True)  # StopAt is a class of our own.
    caplog.set_level(logging.INFO, "lockstep")
    for batch in (2, 1, None):  # Of 4 rows, and one of 16 after it.
        with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
            model = net(dense(), loss=FROM_LOGITS)
        backup = lockstep.callbacks.BackupAndRestore(tmp_path, save_freq=1)
        with contextlib.suppress(EnoughError):
            model.fit(X[:36], Y[:36], batch_size=16, epochs=2, verbose=0, callbacks=[backup, StopAt(batch)])
    assert "resumes from" in caplog.text
    assert "batch-without-rate" not in caplog.text


def test_sample_rows_spreads_the_rows_evenly():
    large = np.broadcast_to(np.float32(0), (10**7, 100))  # 4 GB, were it there.
    found, which_rows = sample_rows(large, 10**6)
    assert found.size <= 10**6
    assert which_rows == "10,000 of 10,000,000 rows, evenly spread"


def test_fit_checks_read_a_bounded_number_of_rows(strategy, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "lockstep.doctor.loss_checks.sample_rows", lambda array, n: looked.append(n) or sample_rows(array, n)
    )
    fit(strategy, PROGRAMS["labels-out-of-range"][1][0])
    assert 1 <= len(looked) <= len(BATCH_CHECKS + CALL_CHECKS)
    assert set(looked) == {1_000_000}


def accuracy(model):
    model.fit(X, Y, batch_size=32, epochs=20, shuffle=False, verbose=0)
    return (model.predict(X, verbose=0).argmax(-1) == Y).mean(), float(FROM_LOGITS(Y, logits(model)))


def logits(model):
    outputs = model.predict(X, verbose=0)
    return np.log(outputs) if model.layers[-1].activation is keras.activations.softmax else outputs


@pytest.mark.slow
def test_remedies_of_loss_findings_improve_training(strategy):
    optimizer = keras.optimizers.SGD
    with strategy.scope():
        kernel = {"kernel_initializer": keras.initializers.GlorotUniform(1)}
        twice = net(dense("softmax", **kernel), loss=FROM_LOGITS, optimizer=optimizer(0.3))
        never = net(dense(**kernel), loss=SPARSE, optimizer=optimizer(0.3))
        once = net(dense("softmax", **kernel), loss=SPARSE, optimizer=optimizer(0.3))
        cured = net(dense(**kernel), loss=FROM_LOGITS, optimizer=optimizer(0.3))
    for wrong, right in ((twice, once), (never, cured)):
        assert accuracy(right)[0] > 0.99
        assert accuracy(wrong)[1] > 2 * accuracy(right)[1]


def on_mesh(layout, hidden):
    """The findings about a net with a mesh of one row of two devices."""
    mesh = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, layout, devices=["cpu:0", "cpu:1"])
    with mesh.scope():
        hidden = [keras.layers.Dense(size, name=f"hidden_{number}") for number, size in enumerate(hidden)]
        model = keras.Sequential([keras.Input((64,)), *hidden], name="net")
        model.compile("sgd", "mse")
    size = model.output_shape[-1]
    report = mesh.doctor(model, np.random.default_rng(0).normal(size=(64, 64)), np.ones((64, size)), batch_size=16)
    return {finding.name: finding for finding in report.findings}


def test_rules_of_a_mesh_are_checked_before_training():
    found = on_mesh({"net/hiden.*": (None, "model")}, (256, 64))["layout-rule"]
    assert "rule 'net/hiden.*' matches no variable of model 'net'" in found.what
    assert "layout-rule" not in on_mesh({"net/hidden_0/kernel": (None, "model")}, (256, 64))


@pytest.mark.parametrize(("hidden", "is_found"), [((256, 64), False), ((64, 257), True)])
def test_a_mesh_that_shards_little_is_named(hidden, is_found):
    found = on_mesh({"net/hidden_0/kernel": (None, "model"), "net/hidden_1/kernel": (None, "model")}, hidden)
    assert ("variables-whole" in found) == is_found
    assert not is_found or "'net/hidden_1/kernel'" in found["variables-whole"].what


@pytest.mark.slow
def test_weights_that_are_whole_by_design_are_no_finding():
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(64)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    report = strategy.doctor(model, np.ones((64, 64)), np.ones((64, 64)), batch_size=16)
    assert "variables-whole" not in {finding.name for finding in report.findings}
