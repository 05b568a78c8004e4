"""strategy.doctor measures real steps, says what it looked at, and leaves everything as it was, bit for bit."""

import os
import random
import sys
import time

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.data.random_state import capture_random_state
from lockstep.devices.host_memory import HostMemory
from lockstep.doctor import environment_checks
from lockstep.doctor.base import FitCall, RuntimeSettings
from lockstep.doctor.data_checks import MeasuredSteps, ProbedBatches, check_input_speed, check_tf_data_order
from lockstep.doctor.environment_checks import (
    check_allocator,
    check_cores,
    check_memory,
    check_thread_pool_size,
    check_versions,
)

from .programs import FROM_LOGITS, PROGRAMS, REFUSED, X, Y, dense, net

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def strategy_of(devices=1, **options):
    return lockstep.MirroredStrategy([f"cpu:{n}" for n in range(devices)], replicas=2, **options)


def noisy(optimizer="adam"):
    return net(
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        dense(),
        loss=FROM_LOGITS,
        optimizer=optimizer,
        metrics=["accuracy"],
    )


def bits(model):
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(variable.value).tobytes() for variable in variables]


def cut(rows=32):
    return [(X[start : start + rows], Y[start : start + rows]) for start in range(0, len(X), rows)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        random.random()  # A data set may draw.
        return cut()[number]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (lambda: (X, Y), {}),
        pytest.param(lambda: (Batches(), None), {}, marks=pytest.mark.slow),
        pytest.param(lambda: (X, Y), {"deterministic": True}, marks=pytest.mark.slow),
    ],
)
def test_doctor_changes_no_bit_of_the_training_that_follows(given, options):
    found = []
    for is_looked_at in (False, True):
        keras.utils.set_random_seed(1)
        strategy = strategy_of(1 + bool(options), **options)
        with strategy.scope():
            model = noisy()
        x, y = given()
        model.fit(x, y, epochs=1, verbose=0)
        if is_looked_at:
            before = bits(model), capture_random_state()
            report = strategy.doctor(model, x, y)
            assert (bits(model), capture_random_state()) == before
            assert "training steps on a copy of the state" in str(report)
        model.fit(x, y, epochs=2, verbose=0)
        found.append(bits(model))
    assert found[0] == found[1]


class Prepared(Batches):
    """Has rows only in an epoch."""

    def on_epoch_begin(self):
        self.rows = cut()

    def __getitem__(self, number):
        return self.rows[number]


def test_doctor_reads_data_that_an_epoch_makes():
    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    assert "3 batches of Prepared" in str(strategy.doctor(model, Prepared()))


@pytest.mark.slow
def test_doctor_loses_no_row_of_a_generator():
    asked, trained = [], []

    def read():
        for number, batch in enumerate(cut(8)):
            asked.append(number)
            yield batch

    class Rows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trained.append(batch)

    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    batches = read()
    report = strategy.doctor(model, batches, shuffle=False)
    assert asked == list(range(6))
    assert "6 batches of generator 'read'" in str(report)
    model.fit(batches, shuffle=False, verbose=0, callbacks=[Rows()])
    assert asked == trained == list(range(12))


@pytest.mark.slow
def test_doctor_reports_an_input_slower_than_the_steps():
    def read():
        while True:
            time.sleep(0.1)
            yield cut()[0]

    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    report = strategy.doctor(model, read())
    assert names_of(report.findings) == ["input-bound"]
    assert report


class Slow(Batches):
    def __getitem__(self, number):
        time.sleep(0.05)
        return super().__getitem__(number)


@pytest.mark.slow
def test_doctor_accepts_a_slow_input_that_is_read_once():
    strategy = strategy_of(input_options=lockstep.InputOptions(cache="memory"))
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    assert not strategy.doctor(model, Slow(), shuffle=False).findings


@pytest.mark.parametrize(
    ("reads", "runs", "is_prefetched", "told"),
    [(0.1, 0.01, True, "90 %"), (0.01, 0.1, True, None), (0.1, 0.01, False, None), (0.0011, 0.0001, True, None)],
)
def test_check_input_speed_compares_the_input_with_the_step(reads, runs, is_prefetched, told):
    found = check_input_speed(
        ProbedBatches([], reads, is_prefetched, "input", None), MeasuredSteps(runs, {}, None), "fit"
    )
    assert names_of(found) == ["input-bound"] * bool(told)
    assert not told or found[0].what == f"{told} of the time is spent waiting for data"


def test_doctor_reports_a_loss_that_is_not_finite():
    strategy = strategy_of()
    with strategy.scope():
        model = net(layers.Dense(1), loss="mse", optimizer=keras.optimizers.SGD(1e20))
    report = strategy.doctor(model, X, Y)
    assert names_of(report.findings) == ["loss-not-finite"]
    assert report.findings[0].what.startswith(("the loss is nan after", "the loss is inf after"))


def test_report_without_findings_lists_what_was_checked():
    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    report = strategy.doctor(model, X, Y)
    assert str(report).startswith("no findings\nchecked:\n")
    assert "KiB on each device" in str(report)
    assert report.as_dict()["findings"] == []


def test_report_shows_location_reason_and_remedy_of_a_finding():
    strategy = strategy_of()
    with strategy.scope():
        model, data = PROGRAMS["softmax-from-logits"][0][0]()
    text = str(strategy.doctor(model, *data))
    assert text.startswith("1 finding\n\nsoftmax-from-logits: the output is a softmax")
    assert all(f"\n  {word}" in text for word in ("where", "why", "fix"))
    assert "test_full_check.py:" in text


@pytest.mark.parametrize("name", list(REFUSED))
def test_doctor_reports_findings_if_the_training_step_fails(name):
    strategy = strategy_of()
    with strategy.scope():
        model, data = REFUSED[name][0]()
    report = strategy.doctor(model, *data)
    assert names_of(report.findings) == [name]
    assert "left out:\n  training steps: the first one fails: ValueError: Arguments `target` and `output`" in str(
        report
    )


def test_doctor_raises_if_a_step_fails_without_findings():
    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        strategy.doctor(model, X[:, :1], Y)


def test_doctor_checks_a_model_without_weights_without_steps():
    strategy = strategy_of()
    with strategy.scope():
        model = keras.Sequential([dense("softmax")])
        model.compile("sgd", FROM_LOGITS)
    report = strategy.doctor(model, X, Y)
    assert not model.built
    assert "left out:\n  steps, their memory and their wait for data: the model has no weights yet" in str(report)


def test_doctor_refuses_foreign_and_uncompiled_models():
    strategy = strategy_of()
    with strategy_of().scope():
        other = net(dense(), loss=FROM_LOGITS)
    with strategy.scope():
        bare = keras.Sequential([keras.Input((2,)), dense()])
    for model in (other, bare):
        with pytest.raises(lockstep.ModelError, match=r"doctor: .* is not a compiled model of MirroredStrategy"):
            strategy.doctor(model, X, Y)


# --- memory and the process ----------------------------------------------------------------------------------------


def program(cache=None, devices=1, has_strategy=True):
    setting = RuntimeSettings(2, tuple(jax.devices()[:devices]), 1, lockstep.InputOptions(cache=cache), has_strategy)
    return FitCall(net(dense(), loss=FROM_LOGITS), Batches(), settings=setting)


def names_of(findings):
    return [finding.name for finding in findings]


@pytest.mark.parametrize(
    ("cache", "of_a_step", "batches", "free", "names"),
    [
        ("memory", 1000, (10, 100), 2001, []),
        ("memory", 1000, (10, 100), 1999, ["host-memory"]),
        (None, 1000, (10, 100), 1001, []),
        (None, 1000, None, 999, ["host-memory"]),
        ("device", 1000, (10, 100), 1999, ["host-memory"]),  # The devices are CPUs.
        ("a/file", 1000, (10, 100), 1001, []),
        (None, None, None, 20, ["host-memory"]),
        (None, 1000, None, None, []),
    ],
)
def test_check_memory_reports_too_little_host_memory(cache, of_a_step, batches, free, names):
    host = HostMemory(10**12, None, free)
    assert names_of(check_memory(program(cache), of_a_step, batches, host)) == names


class Accelerator:
    process_index, platform = 0, "gpu"

    def memory_stats(self):
        return {"bytes_limit": 1500}


@pytest.mark.parametrize(("of_a_step", "names"), [(1600, ["device-memory"]), (1400, [])])
def test_check_memory_reports_too_little_accelerator_memory(of_a_step, names):
    setting = RuntimeSettings(2, (Accelerator(), Accelerator()))
    found = check_memory(
        FitCall(net(dense(), loss=FROM_LOGITS), X, Y, settings=setting), of_a_step, None, HostMemory(1, None, 1)
    )
    assert names_of(found) == names


@pytest.mark.slow
def test_measure_steps_returns_the_memory_that_jax_reports():
    strategy = strategy_of()
    with strategy.scope():
        small, large = (net(dense(units=n), dense(), loss=FROM_LOGITS) for n in (4, 100_000))
    sizes = [str(strategy.doctor(model, X, Y)).partition("memory of a step: ")[2] for model in (small, large)]
    (_, small_unit), (large, large_unit) = (size.split()[:2] for size in sizes)
    assert (small_unit, large_unit) == ("KiB", "MiB")
    assert float(large) > 32 * 100_000 * 4 / 2**20  # The activations alone are so large.


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"keras": "3.15.0", "jax": "0.10"}, []),
        ({"keras": "3.15.7", "jax": "1.0.1"}, []),
        ({"keras": "3.14.9", "jax": "0.10.1"}, [("keras 3.14.9", "pip install 'keras>=3.15,<3.16'")]),
        ({"keras": "3.16.0", "jax": "0.10.1"}, [("keras 3.16.0", "pip install 'keras>=3.15,<3.16'")]),
        ({"keras": "3.15.0", "jax": "0.9.2"}, [("jax 0.9.2", "pip install 'jax>=0.10'")]),
    ],
    ids=str,
)
def test_check_versions_finds_those_before_the_first_and_from_the_one_that_no_longer_works(
    monkeypatch, versions, expected
):
    monkeypatch.setattr(environment_checks, "version", versions.__getitem__)
    found = list(check_versions(FitCall(None, None), {}))
    assert {one.name for one in found} <= {"bad-version"}
    assert [(one.what, one.fix) for one in found] == expected


class DatasetV2:
    """As tf.data shows itself: from the last step to the first."""

    def __init__(self, *steps):
        self.steps = steps

    def __debug_string__(self):
        return "\n".join(f"-<_{step}Dataset element_spec=...>" for step in reversed(self.steps))


DatasetV2.__module__ = "tensorflow.python.data.ops.dataset_ops"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (("Range", "Shuffle", "Cache", "Batch"), ["shuffle-before-cache"]),
        (("Range", "Prefetch", "Cache"), ["prefetch-before-cache"]),
        (("Range", "Cache", "Shuffle", "Prefetch"), []),
        (("Range", "Shuffle", "Cache", "Shuffle", "Batch"), []),  # The second shuffles anew in each epoch.
    ],
)
def test_check_tf_data_order_reports_an_order_that_defeats_a_cache(steps, told):
    assert names_of(check_tf_data_order(FitCall(None, DatasetV2(*steps)))) == told


def test_check_allocator_reports_returned_memory():
    assert names_of(check_allocator(program(), {"LOCKSTEP_KEEP_MEMORY": "0"})) == ["memory-given-back"]
    for chosen in ({}, {"LOCKSTEP_KEEP_MEMORY": "0", "LD_PRELOAD": "libjemalloc.so"}):
        assert names_of(check_allocator(program(), chosen)) == []


@pytest.mark.parametrize(("devices", "cores", "told"), [(2, 2, True), (2, 8, False), (1, 1, False)])
def test_check_cores_reports_more_cpu_devices_than_cores(devices, cores, told):
    found = names_of(check_cores(program(devices=devices), {}, cores))
    assert found == ["cpu-devices-without-cores"] * told


def test_usable_cores_are_all_cores_without_affinity(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (found,) = check_cores(program(devices=2), {})
    assert found.what == "2 CPU devices on 2 cores"


def test_check_thread_pool_size_reports_a_deadlock_of_plain_keras():
    plain = program(has_strategy=False)
    assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "4"})) == []
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "4"})) == ["cpu-thread-pool"]
        assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "64"})) == []
    finally:
        keras.distribution.set_distribution(None)
