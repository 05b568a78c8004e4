"""One process, eight logical CPU devices on a fixed thread pool, and nothing left behind by any test."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import pytest

import lockstep

# Many tests compile the same programs. Processes that tests start do not share them: one that is killed might leave half a file.
_COMPILED = tempfile.TemporaryDirectory(prefix="lockstep-compiled-")
jax.config.update("jax_compilation_cache_dir", _COMPILED.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
lockstep.config.set_logical_cpu_devices(8)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Law 5: a test leaves neither the environment nor Keras's classes changed, nor a distribution behind."""
    environment = dict(os.environ)
    classes = {cls: dict(vars(cls)) for cls in (*keras.Model.__mro__, keras.layers.BatchNormalization)}
    yield
    changed = {
        k for k in {*environment, *os.environ} - {"PYTEST_CURRENT_TEST"} if environment.get(k) != os.environ.get(k)
    }
    assert not changed, f"environment variables changed: {changed}"
    for cls, before in classes.items():
        different = [
            name
            for name in ("__init__", "compile", "fit", "make_train_function")
            if vars(cls).get(name) is not before.get(name)
        ]
        assert not different, f"{cls.__name__} was left with another {different}"


@pytest.fixture(autouse=True, scope="module")
def _memory_of_compiled_programs():
    yield
    jax.clear_caches()


@pytest.fixture
def data_folder():
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder or not os.path.isdir(folder):
        reason = "LOCKSTEP_DATA does not name the folder of data sets"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture
def cats_vs_dogs(data_folder):
    folder = Path(data_folder) / "cats_vs_dogs"
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder}")
    return folder
