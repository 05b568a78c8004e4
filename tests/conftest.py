"""Processes for all tests: new ones start fast, and some have imported Keras, JAX and Lockstep."""

import functools
import itertools
import os

import pytest

from tests.distributed.jobs.outcomes import REPLICAS, arrays
from tests.support import compile_cache
from tests.support.processes import AS_FOR_USERS, PROGRAMS, STARTUP, ForkServer, Job

collect_ignore = ["support/startup"]  # It is for interpreters of their own.


@pytest.fixture(scope="session", autouse=True)
def _new_interpreters_start_fast():
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), STARTUP]
    with compile_cache.in_new_interpreters("children") as variables:
        os.environ |= variables | {"PYTHONPATH": os.pathsep.join(path)}
        yield


@pytest.fixture(scope="session")
def forks():
    """Two, because forks of one process have their objects at the same addresses, and the same order of sets."""
    started = ForkServer(), ForkServer()
    yield started
    for each in started:
        each.close()


@pytest.fixture
def job(forks, tmp_path):
    """Makes a job of so many workers; what is left of it is ended with the test."""
    made = []

    def make(workers=2, **options):
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Job(forks, folder, workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean()


@pytest.fixture(scope="session")
def alone(forks, tmp_path_factory):
    """What one process leaves, made once: of a net on plain Keras, or with determinism on so many devices."""

    @functools.cache
    def found(net, devices=None):
        folder = tmp_path_factory.mktemp("alone")
        config = {"folder": str(folder), "nets": [[net, bool(devices)]], "plain": not devices}
        config |= {"devices": devices, "replicas": REPLICAS}
        process = forks[0].start(folder, "alone", PROGRAMS / "laws.py", config, AS_FOR_USERS)
        assert process.end() == 0, process.said
        return arrays(folder)

    return found


@pytest.fixture(scope="session")
def python(forks):
    """Run code, a script or a module in a fork, as ``subprocess.run`` would in a new interpreter: see `ForkServer.run_python`.

    The two servers take turns, so that runs that are compared do not have the same order of sets.
    """
    turns = itertools.cycle(forks)

    def run(**options):
        return next(turns).run_python(**options)

    return run


@pytest.fixture
def shard_all(monkeypatch):
    """The variables of small models are sharded, too, but for the two numbers of a seed."""
    monkeypatch.setattr("lockstep.devices.placement.SHARD_FROM", 3)
