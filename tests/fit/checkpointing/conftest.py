"""Trainings of real processes, and disks that fail."""

import functools

import pytest

from tests.fit.checkpointing import disks
from tests.fit.checkpointing.attempts import Training

collect_ignore = ["programs"]  # They are for processes of their own.


@pytest.fixture
def training(forks, tmp_path):
    """Makes a training; processes that are left are ended with the test."""
    made = []

    def make(workers=1, **config):
        made.append(Training(forks, tmp_path / str(len(made)), workers, **config))
        return made[-1]

    yield make
    for each in made:
        each.clean()


@pytest.fixture(scope="session")
def whole(forks, tmp_path_factory):
    """The digest of a run that nothing happened to, made once for each kind. It has compiled everything for itself."""

    @functools.cache
    def made_once(**config):
        made = Training(forks, tmp_path_factory.mktemp("whole"), compiles=True, **config)
        try:
            return made.finished_as_a_whole()
        finally:
            made.clean()

    return lambda **config: made_once(**{"net": "mlp", "workers": 1} | config)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 1 MiB, and what can become of it."""
    reason = disks.why_not(tmp_path)
    if reason:
        pytest.skip(reason)
    with disks.Disk(tmp_path / "disk") as made:
        yield made
