"""Every strategy says whether its process prints and writes, so that a script can change its strategy."""

import json

import pytest

import lockstep
from tests.support.processes import own_host


def parameter_server_chief(monkeypatch):
    host = own_host()
    cluster = {job: [f"{host}:{port}"] for job, port in [("chief", 12431), ("worker", 12432), ("ps", 12433)]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    return lockstep.ParameterServerStrategy()


ONE_PROCESS = {
    "mirrored": lambda: lockstep.MirroredStrategy(["cpu:0"]),
    "central storage": lambda: lockstep.CentralStorageStrategy(["cpu:0"]),
    "no strategy": lockstep.get_strategy,
    "several workers": lambda: lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0"]),
    "older name": lockstep.experimental.MultiWorkerMirroredStrategy,
    "mesh": lambda: lockstep.ModelParallelStrategy({"data": 1, "model": 1}, devices=["cpu:0"]),
}


@pytest.mark.parametrize("kind", ONE_PROCESS)
def test_the_only_process_is_the_chief(kind):
    assert ONE_PROCESS[kind]().is_chief is True


def test_the_chief_of_parameter_servers_is_the_chief(monkeypatch):
    strategy = parameter_server_chief(monkeypatch)
    try:
        assert strategy.is_chief is True
    finally:
        strategy.close()
