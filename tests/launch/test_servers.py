"""``lockstep run --workers W --servers S``: chief, workers that the job can lose, and variable servers."""

import json
import re
import signal
import subprocess

import pytest

from lockstep import cli
from tests.launch.launching import program, run, started, text_of, wait_for_message
from tests.support.marks import diagonal_first
from tests.support.waiting import DEADLINE

pytestmark = pytest.mark.waits

WAIT = "wait_for(lambda: is_there('done'))\n"
GO = "wait_for(lambda: is_there('go'))"
AFTER_IT = "wait_for(lambda: is_there('pid') and has_ended((here / 'pid').read_text()))"
CHIEF = "if task['type'] == 'chief':\n    {}\n    write('done'); sys.exit()\n"


def part(job, index=0):
    """Return the condition that a process is this one."""
    return f"task == {{'type': {job!r}, 'index': {index}}}"


def job_of(folder, *lines, chief="pass"):
    """Write a program that runs these lines and then waits until the chief is done."""
    return program(folder, "\n".join(lines) + "\n" + CHIEF.format(chief) + WAIT)


def run_and_release(folder, text, *arguments):
    """Run to the end; create the file ``go`` when the supervisor prints the text."""
    with started(*arguments) as supervisor:
        heard = ""
        while text not in heard:
            heard += (line := supervisor.stderr.readline())
            assert line, heard
        (folder / "go").touch()
        printed, rest = supervisor.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(arguments, supervisor.returncode, printed, heard + rest)


def messages_of(done):
    """Return the messages without the first, which describes the configuration."""
    return [line.removeprefix("lockstep run: ") for line in done.stderr.splitlines()[1:]]


@pytest.mark.slow
def test_each_process_is_told_who_is_who_and_has_a_name(tmp_path):
    names = ("CUDA_VISIBLE_DEVICES", "LOCKSTEP_GENERATION", "JAX_PLATFORMS", "LOCKSTEP_SECRET")
    others = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "LOCKSTEP_COORDINATOR": "b:1", "TF_CONFIG": "{}"}
    code = f"print(json.dumps([os.environ['TF_CONFIG'], *(os.environ.get(name) for name in {names}), {{*os.environ}} & "
    code += f"{{*{[*others][:-1]}}} == set()]))"
    path = job_of(tmp_path, code)
    words = ("--workers", 2, "--servers", 2, "--evaluator", "--log-dir", tmp_path / "logs", "--tee")
    done = run(*words, path, CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="", **others)
    assert done.returncode == 0, done.stderr
    assert "1 chief, 2 workers, 2 ps and 1 evaluator on this machine; allocator: " in done.stderr
    shown = dict(re.fullmatch(r"\[(.*?)\] (.*)", line).groups() for line in done.stdout.splitlines())
    seen = {name: json.loads(text) for name, text in shown.items()}
    assert sorted(seen) == ["chief", "evaluator", "ps 0", "ps 1", "worker 0", "worker 1"]
    configs = {name: json.loads(config) for name, (config, *_) in seen.items()}
    cluster = configs["chief"]["cluster"]
    assert {job: len(own) for job, own in cluster.items()} == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    assert len({address for own in cluster.values() for address in own}) == 6
    for name, (_, gpus, generation, platforms, _, is_clean) in seen.items():
        job, _, index = name.partition(" ")
        assert configs[name] == {"cluster": cluster, "task": {"type": job, "index": int(index or 0)}}
        assert (gpus, generation, platforms, is_clean) == ("", "0", "" if job == "worker" else "cpu", True)
        assert (tmp_path / "logs" / f"{name.replace(' ', '-')}.log").read_text() == shown[name] + "\n"
    assert len({secret for *_, secret, _ in seen.values()} - {None}) == 1


@pytest.mark.slow
def test_a_process_finds_its_part(tmp_path):
    code = (
        "from lockstep.parameter_server.process_role import find_role; from lockstep.cluster_resolver import resolve\n"
    )
    done = run("--workers", 1, "--servers", 1, job_of(tmp_path, code + "print(find_role(resolve()).name)"))
    found = sorted(re.sub(r"\(127.0.0.1:\d+\)", "(ADDRESS)", line) for line in done.stdout.splitlines())
    assert found == [
        "[chief] chief (ADDRESS)",
        "[ps 0] ps 0 of 1 (ADDRESS)",
        "[worker 0] worker 0 of 1 (ADDRESS)",
    ]


LOSSES = ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(75)", "sys.exit(4)"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_a_lost_worker_is_started_again_alone_and_the_others_continue(tmp_path, loss):
    died = f"if {part('worker', 1)}:\n    print(os.environ['TF_CONFIG'])\n    if not is_there('died'):\n        write('died'); {loss}"
    came = f"write(task['type'] + str(task['index']) + ('again' if {part('worker', 1)} else ''))"
    once = "if is_there(f'once{task}'): print('twice')\nelse: write(f'once{task}')"
    path = job_of(
        tmp_path, died, came, once, chief="wait_for(lambda: is_there('worker1again') and is_there('worker0'))"
    )
    done = run("--workers", 2, "--servers", 1, "--max-restarts", 1, path)
    assert done.returncode == 0, done.stderr
    (line,) = messages_of(done)
    assert line.startswith("worker 1 ")
    assert line.endswith("; the other processes continue, and it restarts in 1 s (restart 1 of 1).")
    first, second = done.stdout.splitlines()  # The addresses are the same.
    assert first == second != ""


@pytest.mark.slow
def test_worker_without_restarts_stays_away(tmp_path):
    path = job_of(tmp_path, f"if {part('worker', 0)}: os.kill(os.getpid(), signal.SIGKILL)", chief=GO)
    done = run_and_release(tmp_path, "continue without it", "--workers", 2, "--servers", 1, path)
    assert done.returncode == 0
    (line,) = messages_of(done)
    assert line.startswith("worker 0 was killed by SIGKILL (")
    assert line.endswith("); the other processes continue without it.")


@pytest.mark.slow
def test_job_without_workers_fails_with_the_code_of_the_first(tmp_path):
    path = job_of(
        tmp_path,
        f"if {part('worker', 0)}: print('my last words'); sys.exit(5)",
        f"if {part('worker', 1)}: {GO}; os._exit(6)",
        chief="time.sleep(50)",
    )
    done = run_and_release(tmp_path, "continue without it", "--workers", 2, "--servers", 1, path)
    assert done.returncode == 5, done.stderr
    lines = messages_of(done)
    assert lines[:2] == [
        "worker 0 ended with exit code 5; the other processes continue without it.",
        "worker 1 ended with exit code 6; no worker is left.",
    ]
    assert done.stderr.endswith("worker 0 ended with exit code 5. Its last lines:\n\nmy last words\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "name", "end", "code"),
    diagonal_first(
        [("ps", "ps 0"), ("chief", "chief"), ("evaluator", "evaluator")],
        [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("sys.exit(7)", 7)],
    ),
)
def test_no_other_process_can_be_spared(tmp_path, job, name, end, code):
    done = run(
        "--workers", 1, "--servers", 1, "--evaluator", program(tmp_path, f"if {part(job)}: {end}\ntime.sleep(50)")
    )
    assert done.returncode == code, done.stderr
    assert messages_of(done)[0].startswith(f"{name} ")
    assert messages_of(done)[0].endswith("; the other processes have 30 s to exit.")
    assert done.stderr.rpartition("lockstep run: ")[2].startswith(f"{name} ")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ps", "chief"])
def test_those_who_end_because_of_another_are_not_the_cause(tmp_path, job):
    path = program(
        tmp_path, f"if {part(job)}:\n    write('pid', str(os.getpid())); sys.exit(7)\n{AFTER_IT}\nos._exit(75)"
    )
    done = run("--workers", 1, "--servers", 1, "--evaluator", "--max-restarts", 0, path)
    assert done.returncode == 7, done.stderr
    assert "worker 0" not in done.stderr
    assert done.stderr.rpartition("lockstep run: ")[2].startswith("ps 0 " if job == "ps" else "chief ")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("raise ValueError('mine')", 13), ("sys.exit(2)", 2)])
def test_what_starting_again_cannot_change_in_a_worker_ends_the_job(tmp_path, end, code):
    done = run(
        "--workers", 2, "--servers", 1, job_of(tmp_path, f"if {part('worker', 1)}: {end}", chief="time.sleep(50)")
    )
    assert done.returncode == code
    assert messages_of(done)[0].startswith(f"worker 1 ended with exit code {code} (")


@pytest.mark.slow
def test_all_start_again_when_a_server_fails_and_restarts_are_counted_once(tmp_path):
    died = f"generation = int(os.environ['LOCKSTEP_GENERATION'])\nif {part('worker', 0)} and not is_there('died'):\n    write('died'); os._exit(9)"
    failed = f"if {part('ps')} and generation == 0:\n    wait_for(lambda: is_there('again')); sys.exit(8)"
    again = f"if {part('worker', 0)}: print('generation', generation); write('again')"
    path = job_of(tmp_path, died, failed, again, chief="time.sleep(50) if generation == 0 else None")
    done = run("--workers", 1, "--servers", 1, "--max-restarts", 2, path)
    assert done.returncode == 0, done.stderr
    assert "it restarts in 1 s (restart 1 of 2)." in done.stderr
    assert "lockstep run: restart 2 of 2 in 2 s.\n" in done.stderr
    assert done.stdout.splitlines() == ["[worker 0] generation 0", "[worker 0] generation 1"]


@pytest.mark.slow
def test_a_failed_server_costs_one_restart_though_workers_that_lost_it_were_started_again(tmp_path):
    lost = "generation, me = int(os.environ['LOCKSTEP_GENERATION']), f'{task[\"index\"]}'\n"
    lost += "if task['type'] == 'worker' and not is_there(f'lost{me}'): write(f'lost{me}'); os._exit(75)"
    again = "if task['type'] == 'worker': write(f'again{me}')"
    failed = f"if {part('ps')} and generation == 0:\n    wait_for(lambda: is_there('again0') and is_there('again1')); sys.exit(8)"
    path = job_of(tmp_path, lost, again, failed, chief="time.sleep(50) if generation == 0 else None")
    done = run("--workers", 2, "--servers", 1, "--max-restarts", 2, path)
    assert done.returncode == 0, done.stderr
    assert "it restarts in 2 s (restart 2 of 2)." in done.stderr
    assert "lockstep run: restart 1 of 2 in 1 s.\n" in done.stderr


@pytest.mark.slow
def test_who_does_not_end_when_the_chief_is_done_is_ended(tmp_path):
    path = program(
        tmp_path,
        f"if {part('worker')}: signal.signal(signal.SIGTERM, signal.SIG_IGN); write('ready.worker')\n"
        f"if {part('ps')}: write('ready.ps')\n"
        f"if {part('chief')}: wait_for(lambda: is_there('ready.worker') and is_there('ready.ps'))\n"
        "else: time.sleep(50)",
    )
    done = run("--workers", 1, "--servers", 1, "--grace", 1, path)
    assert done.returncode == 0, done.stderr
    assert messages_of(done) == [
        "worker 0 and ps 0 did not exit within 1 s after the job was done: sent SIGTERM.",
        "worker 0 did not exit within 1 s: killed.",
    ]


@pytest.mark.slow
def test_a_failure_when_all_was_done_is_told_and_does_not_count(tmp_path):
    code = "if task['type'] == 'chief': write('pid', str(os.getpid())); time.sleep(0.3); sys.exit()\n"
    code += f"if {part('worker')}: sys.exit()\n"  # Before the chief, which is fine.
    code += f"{AFTER_IT}; time.sleep(0.3); sys.exit(6)"
    done = run("--workers", 1, "--servers", 1, program(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert messages_of(done) == ["ps 0 ended with exit code 6, after the job was done."]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_lost_worker_does_not_start_again_when_the_job_is_asked_to_end(tmp_path, number):
    died = f"if {part('worker', 0)}: os._exit(9)"
    end = f"signal.signal({int(number)}, lambda *_: (time.sleep(1.2), sys.exit(75))); write(f'ready{{task}}')"
    path = job_of(tmp_path, died, end, chief="time.sleep(50)")
    with started("--workers", 2, "--servers", 1, "--max-restarts", 3, path) as supervisor:
        wait_for_message(supervisor, "it restarts in 1 s (restart 1 of 3)")
        for job, index in (("worker", 1), ("ps", 0), ("chief", 0)):
            text_of(tmp_path / f"ready{dict(type=job, index=index)}")
        supervisor.send_signal(number)
        _, messages = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 75, messages
    assert "restart" not in messages


def ask_to_save(folder, handler, before="", restarts=1):
    """Run a worker, a server and a chief, which answer USR1 with this code; return the exit code of the job and its messages."""
    once = "if os.environ['LOCKSTEP_GENERATION'] != '0': sys.exit()"
    save = f"def save(*_):\n    {handler}\nsignal.signal(signal.SIGUSR1, save)"
    path = program(folder, "\n".join([once, before, save, "write(f'ready.{task[\"type\"]}'); time.sleep(50)"]))
    with started("--workers", 1, "--servers", 1, "--max-restarts", restarts, path) as supervisor:
        for job in ("worker", "ps", "chief"):
            text_of(folder / f"ready.{job}")
        supervisor.send_signal(signal.SIGUSR1)
        _, messages = supervisor.communicate(timeout=DEADLINE)
    return supervisor.returncode, messages


@pytest.mark.slow
def test_those_who_have_saved_do_not_start_again_though_a_worker_was_lost_before(tmp_path):
    died = f"if {part('worker')} and not is_there('died'): write('died'); os._exit(9)"
    code, messages = ask_to_save(tmp_path, "sys.exit(75)", died, restarts=2)
    assert (code, messages.count("restart 1 of 2")) == (75, 1), messages
    assert "restart 2 of 2" not in messages


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_has_saved_is_not_lost_while_the_chief_still_saves(tmp_path, restarts):
    begin = f"if {part('worker')}: write('pid', str(os.getpid()))"
    longer = f"if not {part('worker')}: {AFTER_IT}; time.sleep(1.2)"  # A lost worker is noticed after a second.
    code, messages = ask_to_save(tmp_path, f"{longer}\n    sys.exit(75)", begin, restarts)
    assert code == 75, messages
    assert "worker 0" not in messages


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--workers 2",
            "--workers needs --servers. Fix: give these options, too, or only -n for synchronous training without servers.",
        ),
        ("--servers 1", "--servers needs --workers. Fix: give these options"),
        ("--evaluator", "--evaluator needs --workers and --servers. Fix: give these options"),
        ("--workers 0 --servers 1", "--workers: expected a whole number of at least 1, got 0"),
        ("--workers 1 --servers 0", "--servers: expected a whole number of at least 1, got 0"),
        ("--workers 1 --servers 1 -n 2", "--nproc-per-node: with --servers, --workers is the number of workers"),
        (
            "--workers 1 --servers 1 --nnodes 2",
            "--nnodes: --servers is for one machine. Fix: on several machines, start each process",
        ),
        ("--workers 1 --servers 1 --nnodes 1:1", "--nnodes: --servers is for one machine"),
        ("--workers 1 --servers 1 --hosts a,b", "--hosts: --servers is for one machine"),
        ("--workers 1 --servers 1 --coordinator a:1", "--coordinator: --servers is for one machine"),
        ("--workers 1 --servers 1 --node-rank 0", "--node-rank: --servers is for one machine"),
        ("--workers 1 --servers 1 --print slurm", "--print: --servers is for one machine"),
    ],
)
def test_options_that_do_not_go_with_servers_are_refused(words, message, capsys):
    assert cli.main(["run", *words.split(), "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep run: {message}")


@pytest.mark.slow
def test_one_node_may_be_named(tmp_path):
    assert run("--workers", 1, "--servers", 1, "--nnodes", 1, job_of(tmp_path)).returncode == 0
