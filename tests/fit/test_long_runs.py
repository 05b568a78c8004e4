"""A long run takes no more memory, threads and descriptors at its end than at its beginning."""

import gc
import threading
from pathlib import Path

import jax
import pytest

from lockstep.callbacks import BackupAndRestore, NanGuard, TensorBoard, ThroughputMonitor
from tests.fit.monitoring.runs import built, fit

CALLS, STEPS = 300, 7  # 2,100 steps
FIRST = 60  # calls after which nothing is made for the first time


def callbacks(folder):
    return (
        BackupAndRestore(folder / "run", save_freq=5, extend=True, keep=1),
        TensorBoard(folder / "logs"),
        NanGuard("skip"),
        ThroughputMonitor(),
    )


def taken():
    """Arrays, threads, descriptors and bytes of this process."""
    gc.collect()
    counts = len(jax.live_arrays()), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    return counts, int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "given", [lambda folder: (), pytest.param(callbacks, marks=pytest.mark.nightly)], ids=["plain", "callbacks"]
)
def test_two_thousand_steps_in_three_hundred_calls_take_nothing(given, devices, tmp_path):
    model = built(devices=devices)
    before = None
    for number in range(CALLS):
        if number == FIRST:
            before = taken()
        fit(model, *given(tmp_path), rows=8 * STEPS, epochs=1, shuffle=True)
    now = taken()
    assert now[0] == before[0]
    assert now[1] - before[1] < 20e6
    assert int(model.optimizer.iterations) == CALLS * STEPS
