"""Jobs for the tests of this folder, one at a time."""

import pytest

from tests.workers.jobs import Forks, Job

collect_ignore = ["programs", "program.py"]  # They are for processes of their own.


@pytest.fixture(scope="session")
def forks():
    """Two, because forks of one process have their objects at the same addresses, and the same order of sets."""
    started = Forks(), Forks()
    yield started
    for each in started:
        each.close()


@pytest.fixture
def job(forks, tmp_path):
    """Makes a job of so many workers; what is left of them is ended with the test."""
    made = []

    def make(workers=2, **options):
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Job(forks, folder, workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean()
