"""Trains as any process of any job of ``matrix.py``. The holder of a phase says that it is there, and stays until it may go on.

The argument is JSON: ``kind`` of the strategy, ``epochs``, ``folder`` of this attempt, ``checkpoints``, ``timeout``, ``phase`` and
``holder``, and whether ``lockstep run`` has ``launched`` it.
"""

import functools
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.checkpoint import serialization
from lockstep.distributed.control.connect import _Join
from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint
from lockstep.parameter_server import evaluator
from lockstep.parameter_server.process_role import ProcessContext
from lockstep.parameter_server.variable_server import VariableService
from lockstep.parameter_server.worker_fit import WorkerFit
from tests.support import compile_cache

CONFIG = json.loads(sys.argv[1])
FOLDER = Path(CONFIG["folder"])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
NAME = f"{TASK['type']}{TASK['index']}"
ROWS, BATCH = 24, 8  # 3 steps an epoch
PATIENCE = 100.0  # seconds; the test comes much earlier
SHOWN = ("updates_per_sec", "bytes_per_sec", "staleness")


def come_by(phase):
    """Hold the job in a phase, once in an attempt."""
    if (phase, NAME) != (CONFIG.get("phase"), CONFIG.get("holder")):
        return
    try:
        (FOLDER / "reached").touch(exist_ok=False)
    except FileExistsError:
        return
    until = time.monotonic() + PATIENCE
    while not (FOLDER / "go").exists():
        if time.monotonic() > until:
            os._exit(99)
        time.sleep(0.005)


def before(owner, name, phase, nth=1):
    """Come by a phase before the ``nth`` call of a function."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def coming_by(*arguments, **options):
        if next(calls) == nth:
            come_by(phase)
        return original(*arguments, **options)

    setattr(owner, name, coming_by)


class Arrays(dict):
    """Arrays of a checkpoint, of which half are written when the job is in the phase "checkpoint"."""

    def items(self):
        for number, item in enumerate(super().items()):
            if number == len(self) // 2:
                come_by("checkpoint")
            yield item


class Validates(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


def install():
    """Place the phases; "compile" is placed when the model is there, and "end" in ``main``."""
    before(_Join, "_wait_for_welcome", "rendezvous")
    before(ProcessContext, "serve_dispatcher", "rendezvous")
    before(ProcessContext, "connect_to_dispatcher", "rendezvous")
    before(FitCheckpoint, "on_step_end", "step", 5)  # The first step of the second epoch; validation is a step, too.
    before(WorkerFit, "_run_task", "step", 3)
    before(WorkerFit, "_report", "after a push", 3)  # and before its report; no phase of the table
    before(VariableService, "_push", "step", 3)
    before(Validates, "on_test_batch_end", "validation", 2)
    before(evaluator, "_evaluate", "validation")
    write, checkpoints = serialization.write_arrays, itertools.count(1)

    def write_arrays(file, arrays):
        return write(file, Arrays(arrays) if next(checkpoints) == 2 else arrays)

    serialization.write_arrays = write_arrays


def strategy():
    if CONFIG["kind"] == "servers":
        return lockstep.ParameterServerStrategy(max_staleness=0, timeout_seconds=CONFIG["timeout"])
    options = lockstep.CommunicationOptions(timeout_seconds=CONFIG["timeout"])
    return lockstep.MultiWorkerMirroredStrategy(
        devices=["cpu:0"], replicas=2, deterministic=True, communication_options=options
    )


def digest(model, history):
    numbers = {name: values for name, values in history.history.items() if name not in SHOWN}
    found = hashlib.sha256(repr(numbers).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(np.asarray(variable.value).tobytes())
    return found.hexdigest()


def share_compiled():
    """Take compiled programs from other attempts, as the fork server does for the processes that it starts; gives the own folder."""
    private = FOLDER / f"{NAME}.{os.getpid()}.compiled"
    private.mkdir()
    compile_cache.fill(private, compile_cache.shared_folder("children"))
    compile_cache.use(private)
    return private


def main():
    (FOLDER / f"{NAME}.{os.getpid()}.pid").touch()
    compiled = share_compiled() if CONFIG["launched"] else None
    install()
    keras.utils.set_random_seed(5)
    with strategy().scope():
        first = keras.layers.Dense(8, "relu")
        model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dropout(0.3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), "mse")
    before(type(first), "call", "compile")
    before(keras.optimizers.Adam, "update_step", "compile")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=(ROWS, 1)).astype("float32")
    backup = lockstep.callbacks.BackupAndRestore(CONFIG["checkpoints"], save_freq=2)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=CONFIG["epochs"],
        validation_data=(x[:BATCH], y[:BATCH]),
        callbacks=[backup, Validates()],
        verbose=0,
    )
    come_by("end")
    (FOLDER / f"{NAME}.{os.getpid()}.digest").write_text(digest(model, history))
    if compiled:
        compile_cache.publish(compiled, compile_cache.shared_folder("children"))


main()
