"""Environment of a program under ``lockstep run``, its output, and wrong usage."""

import dataclasses
import errno
import json
import os
import re
import runpy
import subprocess
import sys
from unittest.mock import Mock

import pytest

import lockstep
from lockstep import OptionError, cli
from lockstep.launch import supervisor
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import ProcessName, RankAssignment
from tests.launch.launching import environment, program, run, started
from tests.support.waiting import DEADLINE


def lines_of(done, rank):
    prefix = f"[worker {rank}] "
    return [line.removeprefix(prefix) for line in done.stdout.splitlines() if line.startswith(prefix)]


@pytest.mark.slow
def test_each_line_says_which_worker_printed_it(tmp_path):
    done = run("-n", 3, program(tmp_path, "print('out', rank); print('err', rank, file=sys.stderr)"))
    assert done.returncode == 0, done.stderr
    assert all(lines_of(done, rank) == [f"out {rank}", f"err {rank}"] for rank in range(3))
    assert len(done.stdout.splitlines()) == 6
    assert "3 workers on this machine; allocator: " in done.stderr


@pytest.mark.parametrize("flags", [["package/script.py"], ["link.py"], ["-m", "package.module"], ["-m", "package"]])
def test_a_program_sees_what_it_sees_without_lockstep(tmp_path, flags):
    code = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "seen": vars(sys).get("seen"), "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "file": __file__,
    "package": __package__, "spec": __spec__ and __spec__.name, "doc": __doc__, "cached": __cached__,
    "loader": type(__loader__).__name__, "main": vars(main) is globals(), "stdin": sys.stdin.read(),
    "builtins": type(__builtins__).__name__, "annotations": globals().get("__annotations__"),
    "flags": str(sys.flags), "names": sorted(globals()), "cwd": __import__("os").getcwd(),
}))
"""
    (tmp_path / "package").mkdir()
    for name in ("package/script.py", "package/module.py", "package/__main__.py"):
        (tmp_path / name).write_text('"""A doc."""\nfrom __future__ import annotations\n' + code)
    (tmp_path / "package" / "__init__.py").write_text("import sys\nsys.seen = list(sys.argv)\n")
    (tmp_path / "link.py").symlink_to("package/script.py")
    words = [*flags, "-n", "5", "--", "--tee", "a b", "-m"]
    common = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
    plain = subprocess.run([sys.executable, *words], env=environment(), **common)
    ours = subprocess.run([sys.executable, "-m", "lockstep.cli", "run", *words], env=environment(), **common)
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout.removeprefix("[worker 0] ")) == json.loads(plain.stdout)


def test_files_in_the_current_directory_are_not_taken_for_modules_of_python(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "program.py").write_text("print('here')")
    for name in ("logging", "types", "signal", "json", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not of Python')")
    command = [sys.executable, "-P", "-m", "lockstep.cli", "run", "scripts/program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[worker 0] here\n", done.stderr


@pytest.mark.parametrize("before", [[], ["--"]])
@pytest.mark.parametrize(
    "words", [["-n", "7", "--max-restarts", "x", "--", "-m", "--help", "--print=ray"], ["--", "--foo"], ["--"], []]
)
def test_what_stands_after_the_script_is_the_scripts(monkeypatch, words, before):
    jobs = []
    monkeypatch.setattr(supervisor, "supervise", lambda job, *_: jobs.append(job) or 0)
    assert cli.main(["run", "-n", "1", *before, "x.py", *words]) == 0
    assert [list(job.program) for job in jobs] == [["x.py", *words]]


def test_the_script_gets_options_and_a_separator_of_its_own(tmp_path):
    path = program(tmp_path, "print(json.dumps(sys.argv[1:]))")
    words = ["-n", "7", "--", "-m", "--help", "--print=ray"]
    assert json.loads(lines_of(run("-n", 1, "--", path, *words), 0)[0]) == words


def test_options_are_also_spelled_as_for_torchrun(tmp_path):
    done = run("--nproc_per_node=2", "--max_restarts=0", program(tmp_path, "print('here')"))
    assert done.stdout.count("here") == 2


def test_variables_of_jax_for_one_process_in_each_pod_are_not_inherited(tmp_path):
    variables = {"JAX_COORDINATOR_ADDRESS": "pod-0:29500", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
    code = f"print([name for name in {list(variables)} if name in os.environ])"
    done = run("-n", 2, program(tmp_path, code), **variables)
    assert [lines_of(done, rank) for rank in range(2)] == [["[]"]] * 2


def test_a_program_may_start_processes_that_import_it_again(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("""
import multiprocessing
def square(number):
    return number**2
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [1, 2, 3]))
""")
    assert lines_of(run(path), 0) == ["[1, 4, 9]"]


def test_a_fork_of_the_program_ends_as_without_lockstep(tmp_path):
    code = """
process = os.fork()
if process == 0:
    raise ValueError("of the fork")
print("code", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
sys.exit(4)
"""
    done = run(program(tmp_path, code))
    assert (done.returncode, lines_of(done, 0)[-1]) == (4, "code 1")
    assert done.stderr.endswith("code 1\n")


def test_code_that_runs_at_the_exit_of_python_runs(tmp_path):
    done = run(program(tmp_path, "import atexit; atexit.register(print, 'last')"))
    assert lines_of(done, 0) == ["last"]


def test_workers_are_told_who_they_are_and_where_the_others_are(tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    code = f"print(json.dumps([os.environ['TF_CONFIG'], *(os.environ[name] for name in {names})]))"
    done = run("-n", 2, program(tmp_path, code), TF_CONFIG="{}")
    seen = [json.loads(lines_of(done, rank)[0]) for rank in range(2)]
    configs = [json.loads(config) for config, *_ in seen]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    host, port = addresses[0].split(":")
    for rank, (config, (_, *rest)) in enumerate(zip(configs, seen, strict=True)):
        assert config == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        assert rest == [str(rank), "2", str(rank), "2", "0", host, port]
    assert "TF_CONFIG of the environment is not used" in done.stderr


def test_resolvers_find_the_workers(tmp_path):
    code = "from lockstep.cluster_resolver import resolve; group = resolve().group()\n"
    code += "print(group.workers, group.index, group.local_index, group.local_workers, group.source, group.notes)"
    done = run("-n", 2, program(tmp_path, code))
    assert [lines_of(done, rank) for rank in range(2)] == [[f"2 {rank} {rank} 2 TF_CONFIG ()"] for rank in range(2)]


def test_worker_0_can_listen_where_it_is_said_to_be(tmp_path):
    code = """
import socket
address = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
if rank == 0:
    with socket.create_server((address[0], int(address[1]))) as server:
        write("listens")
        print(server.accept()[0].recv(10))
else:
    wait_for(lambda: is_there("listens"))
    socket.create_connection(address, timeout=20).sendall(b"hello")
"""
    assert lines_of(run("-n", 2, program(tmp_path, code)), 0) == ["b'hello'"]


def test_programs_have_no_input(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "run", program(tmp_path, "print(sys.stdin.read())")],
        input="something",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[worker 0] \n"


def test_an_unknown_option_shows_the_usage_of_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["env", "more"])
    assert capsys.readouterr().err.startswith("usage: lockstep env ")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"


def test_python_runs_the_package_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lockstep", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lockstep", run_name="__main__")
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_file.py"], "no_such_file.py: there is no such file"),
        ([os.path.dirname(__file__)], "is a folder, not a script. Fix: "),
        (["-n", "0", "x.py"], "--nproc-per-node: expected a whole number of at least 1, got 0"),
        (["--nnodes", "2", "x.py"], "--nnodes 2: the address of worker 0 is missing"),
        (
            ["--nnodes", "2", "--coordinator", "a:1", "x.py"],
            "--nnodes 2: the rank of this node is missing. Fix: give --node-rank 0 to 1",
        ),
        (["--hosts", "a,b", "--node-rank", "2", "x.py"], "--node-rank: expected 0 to 1, got 2"),
        (["--hosts", "a,b", "--nnodes", "3", "x.py"], "--hosts: expected 3 hosts"),
        (["--hosts", "a,b", "--coordinator", "a:1", "x.py"], "give one of the two options"),
        (["--hosts", "a,a", "--node-rank", "0", "x.py"], "two workers would have the address a:12421"),
        (["--hosts", "198.51.100.1,198.51.100.2", "x.py"], "none of the hosts is this machine"),
        (["--coordinator", "a:b", "x.py"], "--coordinator: expected an address"),
        (["--tee", "x.py"], "--log-dir is missing"),
        (["--nnodes", "2", "--join-seconds", "9", "x.py"], "--join-seconds: it is for a range of nodes. Fix: "),
        (["--start-seconds", "9", "x.py"], "--start-seconds: it is for a range of nodes. Fix: "),
        (["--grace", "-1", "x.py"], "--grace: expected a number of seconds, 0 or more, got -1"),
        (["--timeout", "nan", "x.py"], "--timeout: expected a number of seconds, 0 or more, got nan"),
    ],
)
def test_wrong_usage_ends_with_one_line(capfd, words, message):
    assert cli.main(["run", *words]) == 2
    said = capfd.readouterr().err
    assert said.startswith("lockstep run: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_folder_of_logs_that_cannot_be_made_ends_the_command_with_one_line():
    done = run("--log-dir", "/dev/null/logs", __file__)
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep run: ")
    assert "--log-dir /dev/null/logs: " in done.stderr.splitlines()[-1]
    assert done.stderr.count("\n") <= 3


@pytest.mark.parametrize(("workers", "what"), [(8, r"worker \d"), (40, "40 processes")])
def test_too_few_descriptors_end_with_one_line(tmp_path, workers, what):
    few = ("sh", "-c", 'ulimit -n 24 && exec "$@"', "sh")
    with started("-n", workers, program(tmp_path, "time.sleep(50)"), before=few) as process:
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    line = rf"lockstep run: {what} cannot be started: \[Errno 24\] Too many open files.*\. Fix: start fewer .*"
    assert re.fullmatch(line, said.splitlines()[-1])


@pytest.mark.parametrize(
    ("error", "is_at_limit"),
    [
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (OSError(errno.E2BIG, "Argument list too long", "python"), False),
    ],
)
def test_limits_of_the_machine_are_named_only_if_they_are_the_reason(monkeypatch, error, is_at_limit):
    monkeypatch.setattr(supervisor, "WorkerProcess", Mock(side_effect=error))
    fields = dict.fromkeys(field.name for field in dataclasses.fields(supervisor._Supervisor))
    output = Mock(prefix=Mock(return_value=b""))
    one = supervisor._Supervisor(
        **fields | {"job": LaunchConfig(("a.py",)), "environment": {}, "gpus": [], "output": output}
    )
    assignment = RankAssignment(0, 0, 1, 1, 0, 1, "a:1", ("a:1",))
    with pytest.raises(OptionError) as raised:
        one._start(assignment, ProcessName("worker", 0))
    sentence, _, fix = str(raised.value).partition(" Fix: ")
    assert sentence == f"worker 0 cannot be started: {error}."
    assert ("ulimit -u" in fix) == is_at_limit


def test_the_supervisor_loads_nothing_that_is_slow():
    code = "import sys, lockstep.launch.supervisor, lockstep.launch.worker_main, lockstep.cli\n"
    code += "print({name.split('.')[0] for name in sys.modules} & {'jax', 'keras', 'numpy'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
