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
from lockstep.data.iterator_state import capture_random_state
from lockstep.devices.memory import HostMemory
from lockstep.doctor.environment_checks import (
    BadVersion,
    check_allocator,
    check_cores,
    check_memory,
    check_thread_pool_size,
)
from lockstep.doctor.fit_call import FitCall, RuntimeSettings
from lockstep.doctor.pipeline_checks import ProbedBatches, StepTimings, check_input_speed, check_tf_data_order

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (lambda: (X, Y), {}),
        pytest.param(lambda: (Batches(), None), {}, marks=pytest.mark.slow),
        pytest.param(lambda: (X, Y), {"deterministic": True}, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_changed_and_what_follows_has_the_same_bits(given, options):
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


@pytest.mark.slow
def test_no_row_of_a_generator_is_lost():
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


def test_an_input_that_is_slower_than_the_steps_is_measured():
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


@pytest.mark.parametrize(
    ("reads", "runs", "is_prefetched", "told"),
    [(0.1, 0.01, True, "90 %"), (0.01, 0.1, True, None), (0.1, 0.01, False, None), (0.0011, 0.0001, True, None)],
)
def test_an_input_is_slow_where_it_takes_longer_than_the_step(reads, runs, is_prefetched, told):
    found = check_input_speed(ProbedBatches([], reads, is_prefetched, "input", None), StepTimings(runs, None), "fit")
    assert names_of(found) == ["input-bound"] * bool(told)
    assert not told or found[0].what == f"{told} of the time is spent waiting for data"


def test_the_report_says_plainly_that_nothing_was_found_and_what_was_looked_at():
    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    report = strategy.doctor(model, X, Y)
    assert str(report).startswith("no findings\nlooked at:\n")
    assert "MiB on each device" in str(report)
    assert report.as_dict()["findings"] == []


def test_a_finding_is_a_block_with_its_place_its_reason_and_its_cure():
    strategy = strategy_of()
    with strategy.scope():
        model, data = PROGRAMS["softmax-from-logits"][0][0]()
    text = str(strategy.doctor(model, *data))
    assert text.startswith("1 finding\n\nsoftmax-from-logits: the output is a softmax")
    assert all(f"\n  {word}" in text for word in ("where", "why", "cure"))
    assert "test_full_check.py:" in text


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_was_found_is_told_where_the_training_step_fails(name):
    strategy = strategy_of()
    with strategy.scope():
        model, data = REFUSED[name][0]()
    report = strategy.doctor(model, *data)
    assert names_of(report.findings) == [name]
    assert "left out:\n  training steps: the first one fails: ValueError: Arguments `target` and `output`" in str(
        report
    )


def test_a_training_step_that_fails_for_a_reason_nobody_knows_is_an_error():
    strategy = strategy_of()
    with strategy.scope():
        model = net(dense(), loss=FROM_LOGITS)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        strategy.doctor(model, X[:, :1], Y)


def test_a_model_without_weights_is_looked_at_as_far_as_that_goes():
    strategy = strategy_of()
    with strategy.scope():
        model = keras.Sequential([dense("softmax")])
        model.compile("sgd", FROM_LOGITS)
    report = strategy.doctor(model, X, Y)
    assert not model.built
    assert "left out:\n  steps, their memory and their wait for data: the model has no weights yet" in str(report)


def test_a_model_of_another_strategy_or_that_is_not_compiled_is_refused():
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
def test_more_memory_than_there_is_is_told(cache, of_a_step, batches, free, names):
    host = HostMemory(10**12, None, free)
    assert names_of(check_memory(program(cache), of_a_step, batches, host)) == names


class Accelerator:
    process_index, platform = 0, "gpu"

    def memory_stats(self):
        return {"bytes_limit": 1500}


@pytest.mark.parametrize(("of_a_step", "names"), [(1600, ["device-memory"]), (1400, [])])
def test_more_memory_than_an_accelerator_has_is_told(of_a_step, names):
    setting = RuntimeSettings(2, (Accelerator(), Accelerator()))
    found = check_memory(
        FitCall(net(dense(), loss=FROM_LOGITS), X, Y, settings=setting), of_a_step, None, HostMemory(1, None, 1)
    )
    assert names_of(found) == names


@pytest.mark.slow
def test_a_memory_of_a_step_is_what_jax_says_of_its_program():
    strategy = strategy_of()
    with strategy.scope():
        small, large = (net(dense(units=n), dense(), loss=FROM_LOGITS) for n in (4, 100_000))
    sizes = [str(strategy.doctor(model, X, Y)).partition("memory of a step: ")[2] for model in (small, large)]
    assert float(sizes[0].split()[0]) < 1
    assert float(sizes[1].split()[0]) > 32 * 100_000 * 4 / 2**20  # The activations alone are so large.


def test_versions_that_are_bad_are_those_of_the_table():
    bad = BadVersion("keras", (3, 15), (3, 16), "why", "source")
    assert [bad.includes(version) for version in ((3, 14), (3, 15), (3, 16))] == [True, False, True]
    assert not BadVersion("jax", (0, 10), (), "why", "source").includes((1, 0))


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
def test_an_order_that_defeats_a_cache_is_told(steps, told):
    assert names_of(check_tf_data_order(FitCall(None, DatasetV2(*steps)))) == told


def test_an_allocator_that_gives_memory_back_is_told():
    assert names_of(check_allocator(program(), {"LOCKSTEP_KEEP_MEMORY": "0"})) == ["memory-given-back"]
    for chosen in ({}, {"LOCKSTEP_KEEP_MEMORY": "0", "LD_PRELOAD": "libjemalloc.so"}):
        assert names_of(check_allocator(program(), chosen)) == []


@pytest.mark.parametrize(("devices", "cores", "told"), [(2, 2, True), (2, 8, False), (1, 1, False)])
def test_cpu_devices_without_cores_of_their_own_are_told(devices, cores, told):
    found = names_of(check_cores(program(devices=devices), {}, cores))
    assert found == ["cpu-devices-without-cores"] * told


def test_a_system_that_does_not_say_which_cores_are_usable_has_all(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (found,) = check_cores(program(devices=2), {})
    assert found.what == "2 CPU devices on 2 cores"


def test_plain_keras_on_cpu_devices_that_would_dead_lock_is_told():
    plain = program(has_strategy=False)
    assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "4"})) == []
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "4"})) == ["cpu-thread-pool"]
        assert names_of(check_thread_pool_size(plain, {"PJRT_NPROC": "64"})) == []
    finally:
        keras.distribution.set_distribution(None)
