"""A strategy and its models that are no longer used leave the process as they found it."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.callbacks import BackupAndRestore, NanGuard, TensorBoard, ThroughputMonitor

TWO = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects_are_searched():
    """What other tests have left would be searched for garbage each time, which takes a second."""
    gc.collect()
    gc.freeze()


KINDS = {
    "one device": lambda: lockstep.MirroredStrategy(["cpu:0"], replicas=2),
    "two devices": lambda: lockstep.MirroredStrategy(TWO),
    "deterministic": lambda: lockstep.MirroredStrategy(TWO, deterministic=True),
    "deterministic on one device": lambda: lockstep.MirroredStrategy(["cpu:0"], replicas=2, deterministic=True),
    "sharded optimizer": lambda: lockstep.MirroredStrategy(TWO, shard="optimizer"),
    "central storage": lambda: lockstep.experimental.CentralStorageStrategy(TWO),
}


def layers():
    yield keras.Input((4,))
    yield keras.layers.Dense(16, "relu")
    yield keras.layers.BatchNormalization()
    yield keras.layers.Dropout(0.5)
    yield keras.layers.Dense(1)


def used(strategy, callbacks=(), rows=10, epochs=2, **options):
    """A model of the strategy that has done everything once.

    With 10 rows both batches have 5, so each kind of step is one program; with 12 the last batch has another shape.
    """
    with strategy.scope():
        model = keras.Sequential(list(layers()))
        model.compile("adam", "mse", **options)
    x, y = np.ones((rows, 4), "float32"), np.zeros((rows, 1), "float32")
    model.fit(x, y, batch_size=5, epochs=epochs, validation_data=(x, y), callbacks=list(callbacks), verbose=0)
    model.evaluate(x, y, batch_size=5, verbose=0)
    model.predict(x, batch_size=5, verbose=0)
    return model


def dropped(make, *callbacks, **options):
    """Use a strategy and drop it; weak references to what must not stay."""
    strategy = make()
    model = used(strategy, [callback() for callback in callbacks], **options)
    functions = model._lockstep_functions
    return {
        name: weakref.ref(each)
        for name, each in {
            "strategy": strategy,
            "model": model,
            "executor": functions.executor,
            "functions": functions,
            "optimizer": model.optimizer,
        }.items()
    }


def left():
    """What of a process a strategy could have left behind."""
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return {"arrays": len(jax.live_arrays()), "threads": threading.active_count(), "descriptors": descriptors}


def assert_nothing_stays(make, *callbacks, **options):
    dropped(make, *callbacks, **options)  # What is made once in a process may stay.
    before = left()
    references = dropped(make, *callbacks, **options)
    assert left() == before
    assert not [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize(
    "kind",
    [
        # How programs are kept depends on the number of devices, and on determinism, and not on both.
        pytest.param(kind, marks=pytest.mark.nightly if kind == "deterministic on one device" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_strategy_that_is_dropped_leaves_nothing(kind):
    assert_nothing_stays(KINDS[kind], rows=12 if kind == "two devices" else 10)


@pytest.mark.slow
def test_callbacks_keep_no_dropped_strategy(tmp_path):
    callbacks = [
        lambda: BackupAndRestore(tmp_path / "run", allow_changes=True, extend=True),
        lambda: NanGuard("skip"),
        lambda: TensorBoard(tmp_path / "logs"),
        ThroughputMonitor,
    ]
    assert_nothing_stays(KINDS["two devices"], *callbacks)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": False}])
def test_no_way_to_run_a_step_keeps_a_dropped_strategy(options):
    # Of three batches the last is a call of its own where a call has two steps. Where each operation is a program, one step
    # of each kind has them all.
    rows, epochs = (12, 2) if "steps_per_execution" in options else (5, 1)
    assert_nothing_stays(KINDS["two devices"], rows=rows, epochs=epochs, **options)


MEASURE = """
from tests.strategies.test_lifetime import KINDS, dropped, resident
sizes = []
for _ in range(3):
    for _ in range(5):
        dropped(KINDS[{kind!r}], rows=12)
    sizes.append(resident())
print(*sizes)
"""


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_strategies_that_are_dropped_take_no_memory(kind):
    """In a new process: in one with the settings of the tests, memory grows though all objects and arrays are freed."""
    command = [sys.executable, "-c", MEASURE.format(kind=kind)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    _, before, after = map(int, done.stdout.split())
    assert after - before < 15e6  # 15 MB were kept for each.
