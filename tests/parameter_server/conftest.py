"""Jobs with servers for the tests of this folder."""

import pytest

from tests.parameter_server.jobs import ServerJob
from tests.workers.jobs import Forks

collect_ignore = ["programs"]  # They are for processes of their own.


@pytest.fixture(scope="session")
def forks():
    started = Forks()
    yield started
    started.close()


@pytest.fixture
def job(forks, tmp_path):
    """Makes a job of so many workers and servers; what is left of it is ended with the test."""
    made = []

    def make(workers=1, servers=1, **options):
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(ServerJob(forks, folder, workers, servers, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean()


@pytest.fixture
def alone(forks, tmp_path):
    """Runs cases in one process, on plain Keras or on so many replicas; gives what that leaves."""

    def run(cases, **config):
        made = ServerJob(forks, tmp_path, 0, 0)
        process = made.start("alone", 0, cases=cases, **config)
        assert process.end() == 0, process.said
        return made.arrays("alone", 0)

    return run
