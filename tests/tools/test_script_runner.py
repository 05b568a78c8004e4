"""A script is run up to its first fit, whatever stands around that."""

import os
import sys
import threading
import time
from dataclasses import asdict

import jax
import keras
import pytest

from lockstep import OptionError
from lockstep.tools.scaling.results import Budget, ScalingSetting
from lockstep.tools.scaling.workload import Workload
from lockstep.tools.script_runner import run_child, run_until_fit
from tests.support.processes import FOR_TESTS

# pytest tells of threads that end by SystemExit; Python does not.
pytestmark = pytest.mark.filterwarnings("ignore:(?s)Exception in thread.*\\nSystemExit")
BUILD = """
import keras, lockstep, numpy as np, sys
def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
x = np.ones((5, 2))
"""
PLAIN = """
model = build()
model.fit(x, np.ones((5, 1)), batch_size=3, epochs=2)
raise RuntimeError("too far")
"""
STRATEGY = """
with lockstep.MirroredStrategy(replicas=2).scope():
    model = build()
    try:
        model.fit(x, np.ones((5, 1)), batch_size=3, epochs=int(sys.argv[1]))
    except Exception:
        pass
raise RuntimeError("too far")
"""
OWN_CLASS = """
class Own(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, batch_size=3, **kwargs)
with lockstep.MirroredStrategy(replicas=2).scope():
    inputs = keras.Input((2,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
model.fit(x, np.ones((5, 1)), epochs=2)
raise RuntimeError("too far")
"""


THREAD = """
import threading
def work():
    build().fit(x, np.ones((5, 1)), batch_size=3, epochs=2)
    raise RuntimeError("too far")
thread = threading.Thread(target=work)
thread.ready = threading.Event()
thread.start()
thread.join()
"""


@pytest.fixture
def script(tmp_path):
    def write(code):
        (tmp_path / "train.py").write_text(code)
        return str(tmp_path / "train.py")

    return write


def found_in(path, *arguments):
    found = []
    run_until_fit(path, arguments, found.append)
    (only,) = found
    return only


@pytest.mark.parametrize("code", [PLAIN, STRATEGY, OWN_CLASS, THREAD])
def test_the_first_fit_is_handed_over_with_its_line_and_the_script_ends_there(script, code):
    path = script(BUILD + code)
    found = found_in(path, "2")
    assert found.kwargs["batch_size"] == 3
    assert found.kwargs["epochs"] == 2
    assert found.args[0].shape == (5, 2)
    file, _, line = found.where.rpartition(":")
    assert file == path
    assert ".fit(" in (BUILD + code).splitlines()[int(line) - 1]


@pytest.mark.slow
def test_what_it_would_have_done_can_be_done(script):
    path, histories = script(BUILD + STRATEGY), []
    run_until_fit(path, ["2"], lambda found: histories.append(found.fit(*found.args, **found.kwargs, verbose=0)))
    assert len(histories[0].history["loss"]) == 2


def test_calls_of_fit_while_the_first_one_is_handed_over_end_their_threads(script):
    """And if the script is at its end by then, the runner waits for it."""
    path = script(BUILD + THREAD.replace("thread.join()", "thread.ready.wait(20)"))
    calls = []

    def look(found):
        calls.append(found)
        other = threading.Thread(target=lambda: keras.Model.fit(found.model, *found.args, **found.kwargs))
        other.start()
        other.join(20)
        assert not other.is_alive()
        threading.current_thread().ready.set()
        time.sleep(0.1)
        raise OptionError("seen")

    with pytest.raises(OptionError, match="seen"):
        run_until_fit(path, [], look)
    assert len(calls) == 1


def test_a_helper_module_beside_the_script_is_found_and_its_line_named(script, tmp_path):
    (tmp_path / "helper_of_train.py").write_text("def train(model, x):\n    model.fit(x, x[:, :1])\n")
    found = found_in(script(f"{BUILD}\nfrom helper_of_train import train\ntrain(build(), x)"))
    assert found.where == f"{tmp_path / 'helper_of_train.py'}:2"


def test_nothing_is_left_behind(script):
    fit, argv, path = keras.Model.fit, list(sys.argv), list(sys.path)
    with pytest.raises(ZeroDivisionError):
        found_in(script(f"{BUILD}\n1 / 0"))
    assert (keras.Model.fit, sys.argv, sys.path) == (fit, argv, path)


CATCHES = """
try:
    {fit}
except {what}:
    pass
{then}
"""


@pytest.mark.parametrize("what", ["", "BaseException", "Exception"])
@pytest.mark.parametrize("then", ["", "print(history)", "sys.exit(3)", "build().fit(x, x[:, :1])"])
def test_a_script_that_catches_everything_has_had_its_fit(script, what, then):
    path = script(BUILD + CATCHES.format(fit="history = build().fit(x, x[:, :1])", what=what, then=then))
    assert found_in(path).kwargs == {}


RETRIES = f"""
{BUILD}
while True:
    try:
        build().fit(x, x[:, :1], batch_size=2)
        break
    except BaseException:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["plan", "scale"])
def test_a_child_whose_script_calls_fit_again_for_ever_ends_with_its_result(script, tool):
    workload = asdict(Workload("script", path=script(RETRIES)))
    request = {
        "plan": {"ask": "survey", "batches": [2]},
        "scale": {"setting": asdict(ScalingSetting(1, 2)), "budget": asdict(Budget(epochs=1))},
    }
    module = {"plan": "lockstep.tools.plan.compile_process", "scale": "lockstep.tools.scaling.benchmark"}
    found = run_child(module[tool], request[tool] | {"workload": workload}, 60, {**os.environ, **FOR_TESTS})
    assert not found.failure
    assert found.content["survey" if tool == "plan" else "setting"]


def test_what_goes_wrong_in_the_look_is_told_whatever_the_script_catches(script):
    path = script(BUILD + CATCHES.format(fit="build().fit(x, x[:, :1])", what="Exception", then=""))

    def look(_):
        raise OptionError("A batch of 64 rows is more than there are.")

    with pytest.raises(OptionError, match="A batch of 64 rows"):
        run_until_fit(path, [], look)


def test_a_script_without_fit_or_that_is_not_there_is_told(script, tmp_path):
    with pytest.raises(OptionError, match="ended without a call of fit"):
        found_in(script("raise SystemExit(0)"))
    with pytest.raises(OptionError, match=r"other\.py: no such file"):
        found_in(str(tmp_path / "other.py"))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()", "2"),
        ("raise SystemExit('no data found')", "'no data found'"),
    ],
)
def test_a_script_that_fails_before_fit_is_told_with_its_exit_code(code, shown, script):
    with pytest.raises(OptionError) as raised:
        found_in(script(code))
    assert f"the script ended by sys.exit({shown}), before a call of fit, so" in str(raised.value)
    assert "Fix: run it by python with the same arguments, which shows why; lockstep doctor, plan" in str(raised.value)


def with_variable(name, value):
    return f"import os\nos.environ[{name!r}] = {value!r}\n{BUILD}\nbuild().fit(x, x[:, :1])"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_ENABLE_X64", "1"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest"),
        ("JAX_PLATFORMS", "tpu,cpu"),
        ("JAX_DISABLE_JIT", "1"),
    ],
)
def test_variables_of_jax_that_a_script_sets_too_late_for_this_process_are_told(script, monkeypatch, name, value):
    """JAX reads them when it is imported, which a tool has done before the script starts."""
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    path = script(with_variable(name, value))
    with pytest.raises(
        OptionError, match=f"train.py: sets {name}={value} for JAX, .* Fix: export {name}={value} before"
    ):
        found_in(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_ENABLE_X64", "False"),
        ("JAX_PLATFORMS", jax.default_backend()),
        ("JAX_LOG_COMPILES", "1"),  # It changes no number.
        ("JAX_PROCESS_NUMBER_OF_A_SCRIPT", "3"),  # JAX has no such option.
        ("XLA_FLAGS", ""),
    ],
)
def test_variables_that_change_nothing_are_not_told(script, monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert found_in(script(with_variable(name, value)))


def test_variables_that_the_command_already_has_win(script, monkeypatch):
    """As JAX_PLATFORMS=cpu, which lockstep plan sets for a script that trains elsewhere."""
    monkeypatch.setenv("JAX_PLATFORMS", jax.default_backend())
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert found_in(script(with_variable("JAX_PLATFORMS", "tpu")))
