"""Processes that have imported Keras, JAX and Lockstep, for all tests."""

import itertools

import pytest

from tests.workers.jobs import Forks


@pytest.fixture(scope="session")
def forks():
    """Two, because forks of one process have their objects at the same addresses, and the same order of sets."""
    started = Forks(), Forks()
    yield started
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def python(forks):
    """Run code, a script or a module in a fork, as ``subprocess.run`` would in a new interpreter: see `Forks.run_python`.

    The two servers take turns, so that runs that are compared do not have the same order of sets.
    """
    turns = itertools.cycle(forks)

    def run(**options):
        return next(turns).run_python(**options)

    return run
