"""Sharded variables over workers: the bits of one process, shards on each device, and files that each of them reads."""

import keras
import numpy as np
import pytest

from tests.support.processes import AS_FOR_USERS

pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("shard", "devices", "most"),
    [
        pytest.param("variables", 1, 0.6, marks=pytest.mark.slow),
        pytest.param("variables", 2, 0.45, marks=pytest.mark.nightly),
        pytest.param("optimizer", 1, 0.75, marks=pytest.mark.nightly),
    ],
)
def test_sharded_variables_of_two_workers_are_as_those_of_one_process(job, shard, devices, most):
    run = job(2, environ=AS_FOR_USERS)
    chief, other = run.run("sharded", shard=shard, devices=devices, shard_from=64)
    assert chief == other
    process = job(1, environ=AS_FOR_USERS).start("alone", 0, "sharded", run=str(run.folder / "run"))
    assert process.end() == 0, process.said
    alone = process.told
    assert chief["bits"] == alone["bits of 2"]
    assert chief["resumed"] == alone["resumed"] == alone["bits of 4"]
    np.testing.assert_allclose(chief["history"], alone["history"], rtol=1e-6)
    np.testing.assert_allclose(chief["eager"], chief["history"][:1], rtol=1e-5)
    here, everywhere = chief["bytes"]
    assert here == chief["layout"]
    assert chief["parts"] == [2, 0]  # The second directory is on the chief's disk.
    assert here < most * everywhere
    assert (chief["zeros"], chief["same again"], chief["trained on"], chief["checked"]) == (0.0, [True, True], True, 64)
    assert chief["read"] == 8
    for name in ("model.keras", "best.keras", "made_before.keras"):
        keras.models.load_model(run.folder / name)


@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "devices"), [(3, 1), (5, 1), (2, 4)])
def test_any_number_of_devices_resumes_a_checkpoint_without_shards_to_the_same_bits(job, workers, devices):
    alone = job(1, environ=AS_FOR_USERS)
    process = alone.start("alone", 0, "sharded", tells_bits=True, replicas=8)
    assert process.end() == 0, process.said
    run = job(workers, environ=AS_FOR_USERS)
    options = {"whole": str(alone.folder / "whole"), "devices": devices, "replicas": 8, "shard_from": 64}
    for told in run.run("sharded", **options):
        assert told["bits"] == process.told["bits of 2"]
        assert told["resumed"] == process.told["bits of 4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "does", ["read", *(pytest.param(does, marks=pytest.mark.nightly) for does in ("set", "save", "compute"))]
)
def test_a_sharded_variable_that_one_worker_uses_alone_ends_the_job_with_its_name(job, does):
    run = job(2)
    run.start_all("sharded", alone=does, timeout=5, shard_from=64)
    for process in run.processes.values():
        assert process.end() == 13
        assert "which all workers" in process.said
        assert any(word in process.said for word in ("hidden_0", "hidden_1", "save a model"))
