"""Training under ``lockstep run``: launcher and strategy work together."""

import re

import pytest

from lockstep.distributed.cluster.env_reader import GENERATION, OPEN
from lockstep.distributed.cluster.secret import SECRET
from lockstep.launch.rank_assignment import RankAssignment
from tests.launch.launching import program, run

pytestmark = pytest.mark.waits

TRAINING = """
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np
strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
def fail(epoch, logs):
    if rank == 1 and epoch == 1 and os.environ["LOCKSTEP_GENERATION"] == "0":
        {failure}
x, y = np.ones((100, 4)), np.ones((100, 1))
model.fit(x, y, batch_size=32, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)])
if strategy.is_chief:
    print("trained on", strategy.num_replicas_in_sync)
"""


SERVERS = """
os.environ["KERAS_BACKEND"] = "jax"
import keras, lockstep, numpy as np
strategy = lockstep.ParameterServerStrategy()
if strategy.is_chief:
    write("chief", str(os.getpid()))
class Validation(keras.utils.PyDataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        if task["type"] == "evaluator":
            write("busy")
            wait_for(lambda: has_ended((here / "chief").read_text()))
        return np.ones((4, 4)), np.ones((4, 1))
def fail(epoch, logs):
    wait_for(lambda: is_there("busy"))
    raise ValueError("of the chief")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, validation_data=Validation(), callbacks=[callback])
"""


@pytest.mark.slow
def test_the_names_of_variables_are_those_that_strategies_read(tmp_path):
    assert GENERATION in RankAssignment(0, 0, 1, 1, 0, 1, "a:1", None).variables(0)
    path = program(tmp_path, f"print(os.environ.get('{SECRET}', 'none'))")
    secrets = [run(path).stdout.split()[-1] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
    assert secrets[0] != secrets[1]
    own = "own" * 11
    assert run(path, **{SECRET: own}).stdout == f"[worker 0] {own}\n"
    done = run("--nnodes", 2, "--node-rank", 0, "--coordinator", "a:1", path, **{OPEN: "1"})
    assert done.stdout == "[worker 0] none\n"


@pytest.mark.slow
def test_a_program_without_a_strategy_is_told_that_each_worker_ran_it(tmp_path):
    code = 'os.environ["KERAS_BACKEND"] = "jax"\nimport keras\n'
    line = "the program has made no strategy, so each of the 2 workers ran it by itself. Fix: "
    plain = program(tmp_path, code)
    assert run("-n", 2, plain).stdout.count(line) == 1
    assert line not in run("-n", 1, plain).stdout
    other = program(tmp_path, "", "other.py")
    assert line not in run("-n", 2, other).stdout


@pytest.mark.slow
def test_the_error_of_one_worker_is_what_stands_last(tmp_path):
    done = run("-n", 2, "--grace", 10, program(tmp_path, TRAINING.format(failure="raise ValueError('of worker 1')")))
    assert done.returncode == 13
    assert done.stderr.endswith("ValueError: of worker 1\n")
    assert "worker 1 ended with exit code 13" in done.stderr


@pytest.mark.slow
def test_the_error_of_the_chief_is_what_stands_last_while_the_evaluator_is_busy(tmp_path):
    done = run("--workers", 1, "--servers", 1, "--evaluator", program(tmp_path, SERVERS))
    assert done.returncode == 13
    assert "\nlockstep run: chief ended with exit code 13 (an error in the program). Its traceback:" in done.stderr
    assert done.stderr.endswith("ValueError: of the chief\n")
    assert "[chief] ValueError: of the chief\n" in done.stdout


@pytest.mark.slow
def test_a_job_that_lost_a_worker_is_trained_after_a_restart(tmp_path):
    failure = "os.kill(os.getpid(), signal.SIGKILL)"
    done = run("-n", 2, "--max-restarts", 1, program(tmp_path, TRAINING.format(failure=failure)))
    assert done.returncode == 0, done.stderr
    assert "worker 1 was killed by SIGKILL" in done.stderr
    assert done.stdout.splitlines()[-1] == "[worker 0] trained on 2"
    assert "has made no strategy" not in done.stdout
