"""Only the chief prints and writes, so that the same script is safe on all workers."""

import json

import keras
import pytest

import lockstep

pytestmark = pytest.mark.xdist_group(__name__)

WRITTEN = {
    *("epoch-1.keras", "epoch-2.keras", "last.weights.h5", "model.keras", "model.weights.h5", "second.keras"),
    *("runs", "listed", "log.csv"),
    *("late", "late.weights.h5"),
    *("one-0.csv", "own-0.keras", "own-1.keras"),  # What is in no strategy's scope every worker writes.
}


def test_the_chief_prints_and_writes_and_all_load_it_under_a_second_strategy(job, tmp_path):
    folder = tmp_path / "written"
    folder.mkdir()
    run = job(2)
    chief, other = run.run("chief", folder=str(folder))
    assert (chief.pop("chief"), other.pop("chief")) == (True, False)
    assert chief == other
    assert chief["same"] == [True, True]
    assert chief["is_complete"] is True
    assert chief["replicas"] == [2, 4]
    assert {path.name for path in folder.iterdir()} == WRITTEN
    assert (folder / "log.csv").read_text().count("\n") == 3
    for path in folder.glob("*.keras"):
        keras.models.load_model(path)
    assert ["Fix: take lockstep.callbacks.BackupAndRestore" in each for each in chief["backup"]] == [True] * 3
    chief, other = (process.out.read_text() for process in run.processes.values())
    assert "Epoch 2/2" in chief
    assert "━" in chief
    assert chief.count("saving model to") == 4  # before and after it is saved, twice
    assert "Epoch" not in other
    assert "━" not in other
    assert "lockstep:" not in run.processes["worker1"].said


def alone(monkeypatch, cluster, kind="worker", index=0):
    """A strategy in this process."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}))
    return lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


CLUSTERS = {
    "one worker": ({"worker": ["localhost:12421"]}, "worker"),
    "one chief": ({"chief": ["localhost:12421"]}, "chief"),
    "one worker and two ps": ({"worker": ["localhost:12421"], "ps": ["localhost:1", "localhost:2"]}, "worker"),
    "evaluator": ({"worker": ["a:12421", "b:12421"], "evaluator": ["c:12421"]}, "evaluator"),
}


@pytest.mark.parametrize("name", [*CLUSTERS, "nothing"])
def test_one_worker_alone_waits_for_nobody(monkeypatch, caplog, name):
    caplog.set_level("INFO", "lockstep")
    if name == "nothing":
        strategy = lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    else:
        cluster, kind = CLUSTERS[name]
        strategy = alone(monkeypatch, cluster, kind)
    assert strategy.is_chief
    assert strategy.num_replicas_in_sync == 2
    said = " ".join(caplog.messages)
    assert ("The 2 ps in the cluster are ignored" in said) == ("ps" in name)
    assert ("this process is the evaluator: it runs alone" in said) == (name == "evaluator")


def test_a_worker_alone_names_variables_of_a_job_that_do_not_suffice(monkeypatch, caplog):
    caplog.set_level("INFO", "lockstep")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    assert "trains alone, though variables of jobs of several processes are set: TPU_WORKER_ID" in caplog.text


def test_a_server_of_variables_does_not_train_in_step(monkeypatch):
    cluster = {"worker": ["localhost:12421"], "ps": ["localhost:1"]}
    with pytest.raises(
        lockstep.ClusterError, match="this process is ps 0, and MultiWorkerMirroredStrategy has no work"
    ):
        alone(monkeypatch, cluster, "ps")
