"""Laws 2 and 3 under ``lockstep run --nnodes 1:2``: after the loss of a node the result is bit-identical to that of one process."""

import contextlib

import pytest

from tests.launch.launching import program, run, started, text_of
from tests.support.processes import PYTHON_PATH, own_host
from tests.support.waiting import DEADLINE

pytestmark = pytest.mark.waits

TRAINING = """
from tests.support.processes import FOR_TESTS, NOT_INHERITED
for name in NOT_INHERITED:
    os.environ.pop(name, None)
os.environ |= FOR_TESTS
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np
from tests.fit.checkpointing.runs import data, digest_of
keras.utils.set_random_seed(5)
workers, generation = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCKSTEP_GENERATION"])
strategy = lockstep.MultiWorkerMirroredStrategy(replicas=4, deterministic=True)
with strategy.scope():
    outputs = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((6, 6, 2)), *outputs, keras.layers.Dropout(0.3), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
heard = []
class Middle(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        heard.append(batch)
        if workers == 2 and len(heard) == 8:
            write(f"middle.{rank}", str(os.getpid()))
            time.sleep(100)
x, y = data()
callbacks = [lockstep.callbacks.BackupAndRestore(sys.argv[1], save_freq=2), Middle()]
history = model.fit(x, y, batch_size=16, epochs=4, callbacks=callbacks, verbose=0)
print("steps here", len(heard))
print("digest", digest_of(model, history), "on", workers)
"""


def digest_in(printed):
    (line,) = [line for line in printed.splitlines() if "] digest " in line]
    return line.split()[3]


@pytest.mark.slow
def test_a_node_is_lost_in_the_middle_and_the_bits_are_those_of_one_process(tmp_path):
    path, variables = program(tmp_path, TRAINING), {"PYTHONPATH": PYTHON_PATH}
    alone = run(path, tmp_path / "alone", deadline=4 * DEADLINE, **variables)
    assert alone.returncode == 0, alone.stderr
    limits = ("--nnodes", "1:2", "--join-seconds", 5, "--max-restarts", 1, "--grace", 10)
    common = (*limits, "--coordinator", f"{own_host()}:12421")
    with contextlib.ExitStack() as held:
        second, first = (
            held.enter_context(started(*common, "--node-rank", rank, path, tmp_path / "both", **variables))
            for rank in (1, 0)
        )
        for rank in range(2):
            text_of(tmp_path / f"middle.{rank}")
        second.kill()
        printed, messages = first.communicate(timeout=4 * DEADLINE)
    assert first.returncode == 0, messages
    assert "steps here 14" in printed  # Of 20; the eighth was not yet saved.
    assert "on 1" in printed
    assert digest_in(printed) == digest_in(alone.stdout)
