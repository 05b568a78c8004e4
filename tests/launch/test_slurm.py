"""The printed job script under Slurm's own daemons: a job of two nodes is requeued after a signal and after the loss of a node, with the same bits."""

import json
import sys

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.launch.job_scripts import JOB_SCRIPTS
from lockstep.launch.launch_config import LaunchConfig
from tests.launch.launching import DEADLINE
from tests.launch.slurm_cluster import SlurmCluster, missing

reason = missing()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group(__name__),
    pytest.mark.skipif(reason is not None, reason=reason or ""),
]

PROGRAM = """
import os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import hashlib, json, keras, numpy as np, lockstep

folder, seconds = sys.argv[1], float(sys.argv[2])
keras.utils.set_random_seed(1)
strategy = lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0"], replicas=2, deterministic=True)
with strategy.scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
callbacks = [
    lockstep.callbacks.BackupAndRestore(folder + "/run", save_freq=5),
    keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(seconds)),
]
history = model.fit(x, x.sum(axis=1), batch_size=8, epochs=2, callbacks=callbacks, verbose=0).history
if strategy.is_chief:
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    result = {"loss": history["loss"], "digest": hashlib.sha256(weights).hexdigest(), "job": os.environ["SLURM_JOB_ID"]}
    with open(folder + "/result.json", "w") as file:
        json.dump(result | {"restarts": os.environ.get("SLURM_RESTART_COUNT", "0")}, file)
"""


@pytest.fixture
def cluster(tmp_path):
    started = SlurmCluster(tmp_path)
    yield started
    started.close()


def submitted(cluster, name, seconds=0.0):
    """The folder and the number of a job of two nodes with a worker each."""
    folder = cluster.folder / name
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    job = LaunchConfig((str(folder / "train.py"), str(folder), str(seconds)), nodes=2, grace=20.0)
    script = JOB_SCRIPTS["slurm"](job).replace("lockstep run", f"{sys.executable} -m lockstep.cli run")
    return folder, cluster.submit(script)


def result_of(cluster, folder, job):
    cluster.wait_for(lambda: cluster.state_of(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 3 * DEADLINE)
    assert cluster.state_of(job)["JobState"] == "COMPLETED", cluster.said
    return json.loads((folder / "result.json").read_text())


def newest_step(folder):
    steps = CheckpointStore(folder / "run").steps() if (folder / "run").exists() else []
    return max(steps, default=0)


def wait_for_progress(cluster, folder, since=5):
    """Wait until a job has a newer checkpoint."""
    cluster.wait_for(lambda: newest_step(folder) > since)


def stop(cluster, folder, job, name):
    """Send a signal to a job, as Slurm does before its time limit, and wait until it has gone on after that."""
    cluster.call("scancel", f"--signal={name}", job)
    cluster.wait_for(lambda: f"SIG{name}: stopped after step" in cluster.said)
    wait_for_progress(cluster, folder, newest_step(folder))


def test_a_job_is_requeued_after_signals_and_after_the_loss_of_a_node_with_the_same_bits(cluster):
    folder, job = submitted(cluster, "whole")
    whole = result_of(cluster, folder, job)
    assert whole.pop("restarts") == "0"

    folder, job = submitted(cluster, "preempted", seconds=0.2)
    wait_for_progress(cluster, folder)
    stop(cluster, folder, job, "TERM")
    stop(cluster, folder, job, "USR1")
    preempted = result_of(cluster, folder, job)
    assert preempted.pop("restarts") == "2"

    folder, job = submitted(cluster, "lost", seconds=0.2)
    wait_for_progress(cluster, folder)
    lost = cluster.nodes[1]
    cluster.lose_node(lost)
    cluster.wait_for(lambda: cluster.state_of(job)["JobState"] == "PENDING")
    cluster.start_node(lost)
    resumed = result_of(cluster, folder, job)
    assert int(resumed.pop("restarts")) >= 1

    assert len({each.pop("job") for each in (whole, preempted, resumed)}) == 3
    assert preempted == resumed == whole
