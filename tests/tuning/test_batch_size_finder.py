"""batch_size_finder against a search that compiles each size; and what it must leave alone."""

import contextlib
import random

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.devices.host_memory import host_memory
from lockstep.tuning.batch_size_finder import BatchMeasurement, BatchSizes, find_largest, powers_of_two

ROWS = 44
X = np.random.default_rng(0).normal(size=(ROWS, 6))
Y = np.random.default_rng(1).integers(0, 3, ROWS)

STRATEGIES = {
    "plain Keras": lambda: None,
    "one device": lambda: lockstep.MirroredStrategy(["cpu:0"], replicas=2),
    "two devices": lambda: lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=2),
    "deterministic": lambda: lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=2, deterministic=True),
    "central storage": lambda: lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
}


def model_of(strategy=None, **options):
    keras.utils.set_random_seed(4)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inner = [layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3)]
        model = keras.Sequential([*inner, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], **options)
    return model


def trained(strategy, *, is_looked_for):
    """All that training leaves, with a search in the middle of it, or without."""
    model, histories = model_of(strategy), []
    for number in range(2):
        if is_looked_for and number:
            before = left_by(model)
            lockstep.batch_size_finder(model, X, Y, batch_sizes=[20], steps=1)
            assert left_by(model) == before
        # Four batches of one shape, which is uneven for two replicas.
        histories.append(model.fit(X, Y, batch_size=11, epochs=1, verbose=0).history)
    draws = [float(keras.random.uniform(())), float(np.random.random()), random.random()]
    return histories, draws, left_by(model)


def left_by(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables] if model.built else []
    return [np.asarray(variable).tobytes() for variable in variables]


NIGHTLY = ("plain Keras", "one device")  # What they leave out, the others do, too.


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.nightly if k in NIGHTLY else pytest.mark.slow) for k in STRATEGIES]
)
def test_batch_size_finder_changes_no_bit(kind):
    strategy = STRATEGIES[kind]()
    assert trained(strategy, is_looked_for=True) == trained(strategy, is_looked_for=False)


def naive(model, strategy, rows):
    """Bytes of a step, by compiling what Keras would run, placed as it would be."""
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    state, batch = (
        tuple([variable.value for variable in kind] for kind in kinds),
        (X[:rows].astype("float32"), Y[:rows]),
    )
    if strategy:
        functions, placement = strategy._functions_of(model), strategy._placement
        step, places = functions.build_step(functions.executor, "train"), placement.replicated
        state, batch = placement.put(state), placement.place(batch)
    else:
        step, places = model.train_step, None
    found = jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, batch).compile().memory_analysis()
    size = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
    return (size - found.alias_size_in_bytes) * (len(strategy.devices) if strategy else 1)


@pytest.mark.parametrize(
    "kind", ["one device", *(pytest.param(k, marks=pytest.mark.slow) for k in ("plain Keras", "two devices"))]
)
def test_largest_equals_that_of_compiling_each_size(kind):
    strategy = STRATEGIES[kind]()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, verbose=0)
    sizes = {rows: naive(model, strategy, rows) for rows in range(36, 42, 2)}
    limit = (sizes[36] + sizes[38]) // 2
    found = lockstep.batch_size_finder(model, X, Y, steps=1, memory_limit=limit)
    expected = max(rows for rows, size in sizes.items() if size <= limit)
    assert expected <= found.largest <= expected + (1 if strategy is None else 0)
    by_rows = {measured.rows: measured for measured in found.measurements}
    measured = sizes.keys() & by_rows.keys()
    assert measured
    assert all(by_rows[rows].memory_bytes == sizes[rows] for rows in measured)
    assert not by_rows[ROWS].fits
    assert by_rows[ROWS].note == f"it needs {by_rows[ROWS].memory_bytes:,} bytes, and {limit:,} are available"


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("largest", [0, 7, 8, 31, 33, 100, 640, 641, 999, 1000])
def test_find_largest_equals_trying_each_size(largest, replicas):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= largest

    sizes = powers_of_two(1000, 3)
    assert sizes == [8, 16, 32, 64, 128, 256, 512, 1000]
    found = find_largest(sizes, fits, replicas)
    low = max((size for size in sizes if size <= largest), default=None)
    if low in (None, 1000):
        assert found == low
    else:
        step = max(1, low // 32 // replicas) * replicas
        tried = [size for size in range(low - low % replicas, min(largest, 999) + 1, step) if size > low]
        assert found == max([low, *tried])
    assert len(asked) == len(set(asked)) <= len(sizes) + 6
    assert find_largest(sizes, lambda size: size <= largest, None) == low


def test_few_rows_and_many_replicas():
    assert powers_of_two(5, 2) == [5]
    assert powers_of_two(40, 12) == [16, 32, 40]


@pytest.mark.slow
def test_batch_size_finder_handles_a_lack_of_memory_and_raises_other_errors():
    model = model_of(STRATEGIES["plain Keras"]())
    found = lockstep.batch_size_finder(model, X, Y, batch_sizes=[8], steps=1)
    step = model.train_step

    def failing(state, data):
        if len(data[1]) > 8:
            raise jax.errors.JaxRuntimeError(words)
        return step(state, data)

    model.train_step = failing
    words = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore"
    found = lockstep.batch_size_finder(model, X, Y, steps=1)
    assert found.largest == 8
    assert "the device has no memory for it: RESOURCE_EXHAUSTED: Out of memory" in str(found)
    assert "more\n" not in str(found)
    words = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        lockstep.batch_size_finder(model, X, Y, steps=1)


def test_the_table_ends_with_the_recommendation():
    found = BatchSizes(
        (
            BatchMeasurement(8, True, 900, 0.001),
            BatchMeasurement(16, True, 12_345, 0.00102),
            BatchMeasurement(32, True, 2_000_000, 0.002),
            BatchMeasurement(64, False, None, None, "no memory"),
        ),
        largest=32,
        available_bytes=3 * 10**9,
        is_estimate=True,
        is_all=False,
    )
    assert (found.fastest, found.recommended) == (32, 16)
    lines = str(found).splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["rows", "ms", "a", "step", "rows/s", "memory"],
        ["8", "1.00", "8,000", "900", "B"],
        ["16", "1.02", "15,686", "12.1", "KiB"],
        ["32", "2.00", "16,000", "1.9", "MiB"],
        ["64", "-", "-", "-", "no", "memory"],
    ]
    assert lines[5].startswith(
        "Memory is an estimate: that of the default executor's program. Largest that fits: 32 (2.8 GiB may be used)."
    )
    assert lines[6].startswith("Recommended: 16, the smallest with at least 95% of the fastest's rows a second")
    assert lines[6].endswith("The learning rate: see lockstep.callbacks.LearningRateScaling.")


def test_the_control_groups_of_a_container_limit_the_memory(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "5\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert (host_memory(tmp_path).free, host_memory(tmp_path).limit) == (8000 * 1024, None)
    outer = tmp_path / "sys" / "fs" / "cgroup" / "outer"
    for name, text in {"max": "5000000", "current": "3000000", "stat": "anon 7\ninactive_file 1000000\n"}.items():
        (outer / f"memory.{name}").write_text(text)
    assert (host_memory(tmp_path).free, host_memory(tmp_path).limit) == (3_000_000, 5_000_000)
    assert host_memory(tmp_path / "none").free is None


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (
            {"batch_sizes": [8, 45]},
            {},
            lockstep.OptionError,
            "sizes, each of at most 44 rows, the rows of x, got .8, 45.",
        ),
        ({"batch_sizes": []}, {}, lockstep.OptionError, "expected one or more sizes"),
        ({"steps": 0}, {}, lockstep.OptionError, "batch_size_finder: steps: expected a whole number"),
        ({"memory_limit": 0}, {}, lockstep.OptionError, "memory_limit: expected a whole number"),
        (
            {"memory_limit": 100},
            {},
            lockstep.OptionError,
            "not even a batch of 8 rows fits: it needs .* 100 are available",
        ),
        ({}, {"run_eagerly": True}, lockstep.ModelError, "runs uncompiled, so its memory is unknown"),
        ({}, {"jit_compile": False}, lockstep.ModelError, "runs uncompiled"),
    ],
)
def test_batch_size_finder_refuses_wrong_arguments(given, options, error, message):
    with pytest.raises(error, match=message):
        lockstep.batch_size_finder(model_of(**options), X, Y, **given)


def test_a_model_that_is_not_compiled_and_an_input_of_another_kind():
    with pytest.raises(lockstep.ModelError, match="is not compiled"):
        lockstep.batch_size_finder(keras.Sequential([layers.Dense(3)]), X, Y)
    with pytest.raises(lockstep.InputError, match=r"x must be a tree of arrays, .* got generator"):
        lockstep.batch_size_finder(model_of(), (batch for batch in ()))


def test_batch_size_finder_refuses_a_keras_distribution():
    model = model_of()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(lockstep.ScopeError, match=r"a keras.distribution is active"):
            lockstep.batch_size_finder(model, X, Y)
    finally:
        keras.distribution.set_distribution(None)


def test_batch_size_finder_refuses_parameter_servers():
    model = model_of()
    strategy = object.__new__(lockstep.ParameterServerStrategy)  # One that has met its cluster needs processes.
    lockstep._keras.trainer.attach_strategy(model, strategy, lambda: None, lambda kind: None)
    with pytest.raises(lockstep.ScopeError, match="under ParameterServerStrategy each worker has separate batches"):
        lockstep.batch_size_finder(model, X, Y)
