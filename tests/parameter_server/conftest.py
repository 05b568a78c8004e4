"""Jobs with servers for the tests of this folder."""

import pytest

from tests.parameter_server.outcomes import PROGRAM, arrays

collect_ignore = ["programs"]  # They are for processes of their own.


@pytest.fixture
def job(job):
    """Makes a job of a chief, so many workers and servers; what is left of it is ended with the test."""

    def make(workers=1, servers=1, evaluator=False):
        others = {"chief": 1, "ps": servers, "evaluator": int(evaluator)}
        return job(workers, others=others, program=PROGRAM, environ={"LOCKSTEP_SECRET": "known"})

    return make


@pytest.fixture
def alone(job):
    """Runs cases in one process, on plain Keras or on so many replicas; gives what that leaves."""

    def run(cases, **config):
        made = job()
        process = made.start("alone", 0, cases=cases, **config)
        assert process.end() == 0, process.said
        return arrays(made, "alone", 0)

    return run
