"""A mesh over the devices of several workers: the numbers of one device, the same bits on every worker and after a resume."""

import keras
import numpy as np
import pytest

pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param({"data": 2, "model": 2}, {"shard": "variables", "recompute": "blocks"}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "model": 2}, {}, marks=pytest.mark.nightly),
        pytest.param({"data": 1, "model": 4}, {}, marks=pytest.mark.nightly),  # No worker has all shards of a variable.
    ],
    ids=str,
)
def test_a_mesh_over_two_workers_has_the_numbers_of_one_device(job, mesh, options):
    run = job(2)
    chief, other = run.run("meshed", mesh=mesh, options=options, devices=2, shard_from=64)
    assert chief == other
    (alone,) = job(1).run("meshed")
    for name, curve in alone["history"].items():
        np.testing.assert_allclose(chief["history"][name], curve, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(chief["predicted"], alone["predicted"], rtol=1e-4, atol=1e-5)
    here, stated, everywhere = chief["bytes"]
    assert here == stated < 0.7 * everywhere
    assert chief["resumed"] == chief["bits"]
    assert (chief["loaded"], chief["checked"]) == (True, 64)
    keras.models.load_model(run.folder / "model.keras")


@pytest.mark.slow
def test_workers_with_other_meshes_are_refused(job):
    run = job(2)
    for index, mesh in enumerate(({"data": 2, "model": 1}, {"data": 1, "model": 2})):
        run.start("worker", index, "meshed", mesh=mesh)
    for process in run.processes.values():
        assert process.end() == 13
        assert "The workers do not agree on 'the strategy': worker 1 of 2 (" in process.said
        assert "differs in 'mesh.data': it has 1, worker 0 of 2 (" in process.said
