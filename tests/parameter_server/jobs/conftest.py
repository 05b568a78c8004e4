"""Jobs with servers for the tests of this folder."""

import pytest

from tests.parameter_server.jobs.outcomes import arrays, server_job

collect_ignore = ["programs"]  # They are for processes of their own.


@pytest.fixture
def job(forks, tmp_path):
    """Makes a job of a chief, so many workers and servers; what is left of it is ended with the test."""
    made = []

    def make(**options):
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(server_job(forks, folder, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean()


@pytest.fixture
def alone(job):
    """Runs cases in one process, on plain Keras or on so many replicas; gives what that leaves."""

    def run(cases, **config):
        made = job()
        process = made.start("alone", 0, cases=cases, **config)
        assert process.end() == 0, process.said
        return arrays(made, "alone", 0)

    return run
