"""A signal to one worker stops all of them after the same step, with one checkpoint; fewer or more go on with the same bits.

``lockstep run`` and srun stop a job soon after one of its processes has ended, so none ends before the checkpoint is written.
"""

import pytest

from lockstep.checkpoint.store import CheckpointStore
from tests.support.processes import Job

pytestmark = pytest.mark.xdist_group(__name__)

STEPS = 5  # of an epoch, and of its validation
MOMENTS = {
    "in a step": ("on_train_batch_end", 3, "SIGTERM", range(3, 6)),
    "in a validation": ("on_test_batch_end", 2, "SIGUSR1", range(5, 6)),
    "where the other comes to its end": ("on_train_end", 1, "SIGTERM", range(10, 11)),
}


@pytest.fixture(scope="module")
def uninterrupted(forks, tmp_path_factory):
    """The digest of a run that gets no signal."""
    alone = Job(forks, tmp_path_factory.mktemp("uninterrupted"), 1)
    try:
        return alone.run("preempted", folder=None)[0]["digest"]
    finally:
        alone.clean()


@pytest.mark.parametrize(
    ("moment", "worker"),
    [
        *(("in a step", 1), ("in a validation", 0), ("where the other comes to its end", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("in a step", 0), ("in a validation", 1), ("where the other comes to its end", 0))
        ),
    ],
)
def test_preemption_stops_all_after_same_step_and_other_workers_resume(job, moment, worker, uninterrupted, tmp_path):
    method, number, signal, steps = MOMENTS[moment]
    folder = str(tmp_path / "run")
    first = job(2)
    told = {"worker": worker, "method": method, "number": number, "signal": signal, "write_seconds": 1}
    processes = first.start_all("preempted", folder=folder, **told)
    assert processes[1].end() == 75, processes[0].said
    (step, *_) = set(CheckpointStore(folder).steps()) - {STEPS} or {STEPS}
    assert processes[0].end() == 75, processes[0].said
    assert step in steps
    stopped = f"worker {worker} of 2: {signal}: stopped after step {step}; the checkpoint of step {step} is in {folder}"
    assert stopped in processes[0].said
    assert job(1 if worker else 3).run("preempted", folder=folder)[0]["digest"] == uninterrupted
