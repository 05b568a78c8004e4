"""What the chief writes of all workers while they train, and whom ``lockstep top`` names."""

import json

import pytest

from lockstep import cli
from lockstep.fit.monitoring.tensorboard import newest_steps

pytestmark = pytest.mark.xdist_group(__name__)


def test_the_worker_that_reads_slowly_is_named(job, tmp_path, capsys):
    run = job(2)
    run.run("watched", folder=str(tmp_path), steps=40, seconds=0.06)
    pids = [process.pid for process in run.processes.values()]
    for name in ("dataset", "generator"):
        status = json.loads((tmp_path / name / "status.json").read_text())
        assert [row["pid"] for row in status["workers"]] == pids
        assert [row["worker"] for row in status["workers"]] == [0, 1]
        first, second = (row["read"] for row in status["workers"])
        assert first < second / 2
        assert cli.main(["top", str(tmp_path / name), "--once"]) == 0
        printed = capsys.readouterr().out
        assert "2 workers, 2 devices" in printed
        assert "step 40 of " in printed or "step 40 (" in printed
        assert f"slowest: worker 1 ({status['workers'][1]['host']}, process {pids[1]}), which reads" in printed
    assert newest_steps(tmp_path / "logs" / "train")["epoch_loss"] == 0
    assert len(list((tmp_path / "logs" / "train").iterdir())) == 2  # One file a call of fit: the chief's.
