"""One process, eight logical CPU devices on a fixed thread pool, and nothing left behind by any test."""

import contextlib
import gc
import os
import signal
from collections import Counter
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import pytest

import lockstep
from tests.support import compile_cache
from tests.support.processes import FOR_TESTS

# Most of a first run's time is XLA compiling.
_compiled = compile_cache.SharedPrograms("in-process")
with pytest.MonkeyPatch.context() as environment:  # The processes of tests have flags of their own.
    if not os.environ.get("LOCKSTEP_TEST_OPTIMIZED"):
        environment.setenv("XLA_FLAGS", f"{FOR_TESTS['XLA_FLAGS']} {os.environ.get('XLA_FLAGS', '')}")
    lockstep.config.set_logical_cpu_devices(8)  # JAX starts, and XLA reads its flags.

with contextlib.suppress(ModuleNotFoundError):  # Some environments are for tests that draw nothing.
    import hypothesis

    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile("tests", hypothesis.settings.default, deadline=None)
    hypothesis.settings.load_profile("tests")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts a command in the background with Ctrl-C ignored, and processes of tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Mark tests that start processes slow, and spread those that wait over the run, so that they do not all wait at once."""
    groups, waiting, computing = {}, [], []
    for item in items:
        if "forks" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
        if group := item.get_closest_marker("xdist_group"):
            groups.setdefault(group.args[0], []).append(item)
        else:
            (waiting if item.get_closest_marker("waits") else computing).append([item])
    # A group runs in one process: the last one to start must not keep the others waiting.
    spread = ((list(groups.values()), 0.6), (waiting, 0.9), (computing, 1.0))
    placed = [(until * number / len(kind), part) for kind, until in spread for number, part in enumerate(kind)]
    items[:] = [item for _, part in sorted(placed, key=lambda one: one[0]) for item in part]


# The tests of these packages run in ./scripts/test-inputs, ./scripts/test-hub, ./scripts/test-accelerators and ./scripts/docs, or by hand.
_MAY_SKIP_IN_CI = (
    "tensorflow",
    "torch",
    "pandas",
    "libtpu",
    "yaml",
    "kubernetes_validate",
    "kubeflow_trainer_api",
    "Ray",
    "safetensors",
    "orbax",
    "prometheus",
    "wandb",
    "mlflow",
    "nbclient",
    "KerasHub",
)
_SKIPPED = set()


def pytest_collection_finish():
    """What was imported is not searched for garbage, and the rest seldom: searching takes a tenth of a trace's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_logreport(report):
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and not any(name in report.longrepr[2] for name in _MAY_SKIP_IN_CI):
        _SKIPPED.add(f"{report.nodeid}: {report.longrepr[2]}")


def pytest_sessionfinish(session):
    _compiled.publish()
    if os.environ.get("CI") and _SKIPPED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each folder, of all processes together, and in CI the tests that had to run and skipped."""
    if os.environ.get("CI") and _SKIPPED:
        terminalreporter.section("skipped, and CI has what they need")
        for line in sorted(_SKIPPED):
            terminalreporter.write_line(line, red=True)
    seconds, count = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                folder = os.path.dirname(report.nodeid.partition("::")[0])
                seconds[folder] += report.duration
                count[folder] += report.when == "call"
    if seconds:
        terminalreporter.section("seconds by folder")
    for folder, total in seconds.most_common():
        terminalreporter.write_line(f"{total:7.0f} s {count[folder]:6} tests  {folder}")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Law 5: a test leaves neither the environment nor Keras's classes changed, nor a distribution behind."""
    environment = dict(os.environ)
    classes = {cls: dict(vars(cls)) for cls in (*keras.Model.__mro__, keras.layers.BatchNormalization)}
    yield
    names = {*environment, *os.environ} - {"PYTEST_CURRENT_TEST", "MOSAIC_GPU_CUDA_ROOT"}  # JAX sets it for kernels.
    changed = {name for name in names if environment.get(name) != os.environ.get(name)}
    assert not changed, f"environment variables changed: {changed}"
    for cls, before in classes.items():
        different = [
            name
            for name in ("__init__", "compile", "fit", "make_train_function")
            if vars(cls).get(name) is not before.get(name)
        ]
        assert not different, f"{cls.__name__} was left with another {different}"


@pytest.fixture(autouse=True)
def _compiled_programs_are_shared():
    """The suite's other processes need many of them, too."""
    yield
    assert not _compiled.is_replaced, "a test, or the import of a file, has left another compile cache"
    _compiled.exchange()


@pytest.fixture(autouse=True)
def _compiled_programs_are_let_go():
    """From time to time: each has dozens of memory mappings, and a process may have 65,530 of them."""
    yield
    if _resident() > _after_letting_go["bytes"] + (1 << 30):
        jax.clear_caches()
        _after_letting_go["bytes"] = _resident()


def _resident():
    """Bytes of memory; 0 where the system does not say, as there is no such limit."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if told.exists() else 0


_after_letting_go = {"bytes": _resident()}


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
