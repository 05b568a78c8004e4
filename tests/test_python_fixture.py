"""The fixture ``python`` gives what ``subprocess.run`` of a new interpreter gives, to each program."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.processes import ForkServer

ENDS = """
import atexit, sys, threading, time
def late():
    time.sleep(0.2)
    print("a thread")
atexit.register(print, "at exit")
threading.Thread(target=late).start()
print("not flushed", end=" ")
"""
PROGRAMS = {
    "nothing": "",
    "names": "import sys; print(__name__, sys.argv, repr(sys.path[0]), sorted(vars(sys.modules['__main__'])) == sorted(globals()))",
    "streams": "import sys; print(sys.stdin.read() == '', 'é'); print('to stderr', file=sys.stderr)",
    "thread_and_atexit": ENDS,
    "thread_and_atexit_after_an_error": ENDS + "1 / 0",
    "exit_code": "raise SystemExit(3)",
    "exit_message": "import sys; sys.exit('it says why')",
    "traceback": "def f():\n    raise ValueError('wrong')\ntry:\n    f()\nexcept ValueError as error:\n    raise KeyError(1) from error",
    "syntax_error": "if True\n    pass",
    "own_excepthook": "import sys\nsys.excepthook = lambda *of: print('hook', of[0].__name__, of[2].tb_lineno)\n1 / 0",
    "last_error": "import atexit, sys\natexit.register(lambda: print(sys.last_type, sys.last_value))\n1 / 0",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "child": "import os, sys; print(os.getcwd(), flush=True); os.system('echo child'); sys.exit(os.fork() and os.wait()[1])",
    "signals": "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))",
}


def cold(folder, *arguments, env=None):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=folder, env=env
    )


def assert_alike(found, expected):
    assert (found.stdout, found.returncode) == (expected.stdout, expected.returncode)
    if expected.returncode == -signal.SIGINT:  # Its traceback begins with frames of the fixture.
        assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    else:
        assert without_source(found.stderr) == without_source(expected.stderr)


def without_source(traceback):
    """The lines of a traceback without those of code, which Python has for ``-c`` only from 3.13 on."""
    return [line for line in traceback.splitlines() if not line.startswith("    ")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_runs_code_as_a_new_interpreter_does(name, python, tmp_path):
    assert_alike(
        python(code=PROGRAMS[name], arguments=["a", "b"], cwd=tmp_path),
        cold(tmp_path, "-c", PROGRAMS[name], "a", "b"),
    )


def test_python_runs_a_script_and_a_module_as_a_new_interpreter_does(python, tmp_path):
    (tmp_path / "beside.py").write_text("found = 'beside'\n")
    says = "import sys, beside\nprint(__file__, sys.argv, sys.path[0], beside.found)\n"
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/inside.py"):
        (tmp_path / name).write_text(says + "if sys.argv[1:]:\n    raise ValueError('wrong')\n")
    for given in ((), ("fails",)):
        done = python(script="script.py", arguments=given, cwd=tmp_path)
        assert_alike(done, cold(tmp_path, "script.py", *given))
        done, expected = (
            python(module="package.inside", arguments=given, cwd=tmp_path),
            cold(tmp_path, "-m", "package.inside", *given),
        )
        assert (done.stdout, done.returncode) == (expected.stdout, expected.returncode)
        assert done.stderr.splitlines()[-3:] == expected.stderr.splitlines()[-3:]


def test_python_has_the_environment_of_the_test_with_its_changes(python, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_A", "set by the test")
    monkeypatch.setenv("LOCKSTEP_C", "removed")
    monkeypatch.delenv("KERAS_BACKEND")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    done = python(code=code, environ={"LOCKSTEP_B": "2", "LOCKSTEP_C": None}, cwd=tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_C"} | {"LOCKSTEP_B": "2"}
    assert_alike(done, cold(tmp_path, "-c", code, env=env))


def test_python_warns_unless_told_not_to(python):
    code = "import warnings; warnings.warn('told')"
    assert "UserWarning: told" in python(code=code).stderr
    assert python(code=code, warnings=["ignore"]).stderr == ""


def test_python_draws_other_numbers_each_time(python):
    code = "import random, numpy, keras; "
    code += "print(random.random(), numpy.random.random(), keras.initializers.RandomNormal().seed)"
    first, second = (python(code=code).stdout.split() for _ in range(2))
    assert len(first) == 3
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_python_keeps_to_the_limits_of_keras_that_the_environment_sets(python):
    code = "import keras; print(keras.config.max_epochs(), keras.config.max_steps_per_epoch())"
    limits = {"KERAS_MAX_EPOCHS": "2", "KERAS_MAX_STEPS_PER_EPOCH": "3"}
    assert python(code=code, environ=limits).stdout == "2 3\n"
    assert python(code=code).stdout == "None None\n"


def test_python_has_imported_keras_and_not_started_jax(python):
    code = "import sys; print({'jax', 'keras', 'lockstep'} <= set(sys.modules)); "
    code += "import jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.local_device_count())"
    assert python(code=code).stdout == "True\n3\n"


def test_python_kills_the_process_group_after_its_time(python, tmp_path):
    code = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(1000)"
    code = f"import os; os.dup2(os.open({str(tmp_path / 'pids')!r}, os.O_CREAT | os.O_WRONLY), 1); {code}"
    with pytest.raises(AssertionError, match="still runs after 1 s"):
        python(code=code, timeout=1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    until_ended(*pids)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked for it")
def test_python_ends_with_a_server_that_is_killed(tmp_path):
    server = ForkServer()
    process = server.start_python(tmp_path, code="import time; print('{\"runs\": 1}', flush=True); time.sleep(1000)")
    process.until("runs")
    os.kill(parent_of(process.pid), signal.SIGKILL)
    until_ended(process.pid)
    server.close()


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def until_ended(*pids):
    until = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # A zombie has ended.
    except FileNotFoundError:
        return False
