"""A pytest plugin: each test runs in the scope that ``LOCKSTEP_CONFORMITY`` names, so that Keras's tests test Lockstep."""

import contextlib
import os
import sys

import jax
import keras
import psutil
import pytest

import lockstep
from tests.support import compile_cache

WAY = os.environ.get("LOCKSTEP_CONFORMITY", "plain")  # Some tests empty the environment.
TWO = ["cpu:0", "cpu:1"]
STRATEGIES = {
    "replicas": lambda: lockstep.MirroredStrategy(["cpu:0"], replicas=2),
    "devices": lambda: lockstep.MirroredStrategy(TWO),
    "deterministic": lambda: lockstep.MirroredStrategy(TWO, replicas=2, deterministic=True),
}
LIMIT = 3 << 30  # bytes of a process from which on its compiled programs are let go

_COMPILED = pytest.StashKey[compile_cache.SharedPrograms]()  # The ways have most of their programs in common.


def skip_if_backend(name, reason):
    """Some tests import this from Keras's ``conftest``, which is not in the source distribution."""
    return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)


def pytest_configure(config):
    """Begin only as a plugin: the suite imports this file to search it for examples."""
    sys.modules["conftest"] = sys.modules[__name__]
    config.stash[_COMPILED] = compile_cache.SharedPrograms("conformity")


@pytest.fixture(autouse=True)
def _scope(request):
    """Open a strategy's scope; none for the way "plain"."""
    with contextlib.nullcontext() if WAY == "plain" else STRATEGIES[WAY]().scope():
        yield
    request.config.stash[_COMPILED].exchange()
    if psutil.Process().memory_info().rss > LIMIT:
        jax.clear_caches()


def pytest_sessionfinish(session):
    """Keep the programs for the next way."""
    session.config.stash[_COMPILED].publish()
