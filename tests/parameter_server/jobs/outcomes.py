"""What the program ``train.py`` leaves, by task, case and kind of value."""

from pathlib import Path

import numpy as np

from tests.support.processes import Job

PROGRAM = Path(__file__).parent / "programs" / "train.py"


def server_job(forks, folder, workers=1, servers=1, evaluator=False):
    """A job of a chief, so many workers and servers; nothing runs yet."""
    others = {"chief": 1, "ps": servers, "evaluator": int(evaluator)}
    return Job(forks, folder, workers, others, program=PROGRAM, environ={"LOCKSTEP_SECRET": "known" * 8})


def train(job, **options):
    """Run a job to its end; gives what the chief leaves."""
    job.run(**options)
    return arrays(job, "chief", 0)


def arrays(job, task, index):
    """What a process has left: for each case its weights, other variables, optimizer, history."""
    with np.load(job.folder / f"{task}{index}.npz", allow_pickle=False) as found:
        return dict(found)


def bits(arrays, *kinds):
    """The bytes of some kinds of values, of all by default."""
    return {name: value.tobytes() for name, value in arrays.items() if not kinds or name.split("/")[1] in kinds}


def assert_close(found, expected, tolerance=2e-5, but=()):
    """All that both have, within what another order of additions makes of float32."""
    names = [name for name in expected if not any(part in name for part in but)]
    assert set(names) <= set(found)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
