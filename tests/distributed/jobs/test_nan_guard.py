"""Two workers and a row that is bad on one of them: both know, both do the same, one prints."""

import pytest

pytestmark = pytest.mark.xdist_group(__name__)


SHARDED = {"strategy": {"shard": "variables"}, "shard_from": 3}


@pytest.mark.parametrize(
    ("deterministic", "bad_row", "options"),
    [
        (False, 6, {}),
        pytest.param(True, 1, {}, marks=pytest.mark.nightly),
        pytest.param(False, 6, SHARDED, marks=pytest.mark.nightly, id="sharded"),
    ],
)
def test_all_workers_name_the_bad_replica_and_do_the_same(job, tmp_path, deterministic, bad_row, options):
    run, backup = job(2), str(tmp_path / "backup")
    chief, other = run.run("guard", deterministic=deterministic, bad_row=bad_row, folder=backup, **options)
    replica = bad_row // 4
    for index, told in enumerate((chief, other)):
        *found, message = told.pop("stopped")
        assert found == [1, [replica], "log", [bad_row]]
        name = "cpu:0" if replica == index else f"worker:{replica}/cpu:0"
        assert f"On replica {replica} of 2 ({name}), layer 'log' is the first that gives NaN" in message
    assert chief == other == {"before": True, "skipped": True, "back": True, "unchanged": True}
    said = [process.said for process in run.processes.values()]
    assert [text.count("The step is left out") for text in said] == [1, 0]
    assert [text.count("Training goes back to the checkpoint of step 1,") for text in said] == [1, 0]
