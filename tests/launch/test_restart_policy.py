"""``--max-restarts``: all workers restart as a new generation."""

import json
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lockstep.launch import local_workers, restart_policy
from lockstep.launch.rank_assignment import NodeProcesses, ProcessName
from lockstep.launch.worker_process import ProcessFailure
from tests.launch.launching import program, run, started, text_of, wait_for_message
from tests.support.waiting import DEADLINE

GENERATION = "generation = int(os.environ['LOCKSTEP_GENERATION'])\n"


@pytest.mark.slow
def test_all_workers_start_again_with_new_ports_until_the_work_is_done(tmp_path):
    code = GENERATION + "print(json.dumps([generation, os.environ['TF_CONFIG']]))\nsys.stdout.flush()\n"
    code += (
        "write(f'{rank}.{generation}')\nwait_for(lambda: is_there(f'0.{generation}') and is_there(f'1.{generation}'))\n"
    )
    code += "if generation < 1 and rank == 1: sys.exit(9)\nif generation < 1: time.sleep(100)"
    done = run("-n", 2, "--max-restarts", 3, program(tmp_path, code))
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line[len("[worker 0] ") :]) for line in done.stdout.splitlines()]
    assert sorted(generation for generation, _ in seen) == [0, 0, 1, 1]
    addresses = [set(json.loads(config)["cluster"]["worker"]) for _, config in seen]
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
    assert "worker 1 ended with exit code 9" in done.stderr
    assert "lockstep run: restart 1 of 3 in 1 s.\n" in done.stderr


@pytest.mark.slow
def test_the_last_failure_stands_last_and_gives_the_code(tmp_path):
    done = run("--max-restarts", 1, program(tmp_path, GENERATION + "raise ValueError(f'in generation {generation}')"))
    assert done.returncode == 13
    assert done.stderr.count("ValueError: in generation 0") == 1
    assert done.stderr.endswith("ValueError: in generation 1\n")


@pytest.mark.parametrize("code", [0, 2])
def test_what_starting_again_cannot_change_is_not_started_again(tmp_path, code):
    done = run("--max-restarts", 3, program(tmp_path, f"sys.exit({code})"))
    assert done.returncode == code
    assert "restart" not in done.stderr


def test_a_run_that_was_asked_to_end_does_not_start_again(tmp_path):
    code = "if is_there('ready'): print('again')\nwrite('ready'); time.sleep(100)"
    with started("--max-restarts", 3, program(tmp_path, code)) as supervisor:
        text_of(tmp_path / "ready")
        supervisor.send_signal(signal.SIGTERM)
        printed, messages = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, printed) == (143, "")
    assert "restart" not in messages


@pytest.mark.slow
@pytest.mark.parametrize(("code", "is_over"), [(75, True), (4, False)])
def test_workers_that_have_saved_before_a_preemption_do_not_start_again(tmp_path, code, is_over):
    handler = f"signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code} if rank else 75))\n"
    waiting = "write(f'ready{rank}'); time.sleep(100)"
    with started(
        "-n", 2, "--max-restarts", 1, program(tmp_path, f"{GENERATION}if generation: sys.exit(0)\n{handler}{waiting}")
    ) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(signal.SIGUSR1)
        _, messages = supervisor.communicate(timeout=60)
    assert supervisor.returncode == (75 if is_over else 0), messages
    assert ("restart" in messages) != is_over


@pytest.mark.slow
def test_a_worker_may_take_longer_to_save_than_the_others(tmp_path):
    code = f"""{GENERATION}
if generation: sys.exit()
def save(*_):
    if rank == 1:
        wait_for(lambda: has_ended((here / "ready0").read_text()))
        time.sleep(1.2)  # A lost worker is noticed after a second.
        print("saved")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
write(f"ready{{rank}}", str(os.getpid()))
time.sleep(100)
"""
    with started("-n", 2, "--max-restarts", 1, program(tmp_path, code)) as supervisor:
        text_of(tmp_path / "ready0"), text_of(tmp_path / "ready1")
        supervisor.send_signal(signal.SIGUSR1)
        printed, messages = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, printed) == (75, "[worker 1] saved\n"), messages
    assert "restart" not in messages


class Worker:
    """A process that ends with 75 when the test calls ``read_exit``, and also when it is asked to end."""

    def __init__(self, process, file):
        self.process, self.file = process, file
        self.code, self.failure, self.ended_at, self.received = None, None, 0.0, []

    def read_exit(self):
        self.code, self.ended_at = 75, time.monotonic()
        self.failure = ProcessFailure(self.process, 75, self.ended_at, None, "")

    def send(self, number):
        self.received.append(number)
        if number == signal.SIGTERM:
            self.read_exit()


@pytest.mark.parametrize(
    ("seconds", "ends", "is_over", "received"),
    [
        (600, {0, 1}, True, [signal.SIGUSR1]),
        (0, {0, 1}, False, [signal.SIGUSR1]),
        (0, {0}, False, [signal.SIGUSR1, signal.SIGTERM]),
    ],
)
def test_usr1_announces_the_end_for_some_minutes_only(monkeypatch, seconds, ends, is_over, received):
    """A program may also save and continue, and lose another worker long after that."""
    monkeypatch.setattr(local_workers, "_SAVE_SECONDS", seconds)
    names = [ProcessName("worker", number) for number in range(2)]
    workers = [Worker(name, name.index) for name in names]
    until = time.monotonic() + DEADLINE

    def wait(limit, files):
        assert time.monotonic() < until
        return ([], ends & set(files)) if workers[0].received else ([signal.SIGUSR1], set())

    running = local_workers.LocalWorkers(
        processes=NodeProcesses(names),
        start=lambda process: workers[process.index],
        restarts=restart_policy.RestartBudget(1),
        signals=Mock(wait=wait),
        grace=30,
        stop_at=None,
        excluded=set(),
        log=print,
    )
    running.run()
    assert (running.code, running.is_final, workers[1].received) == (75, is_over, received)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_pause_before_a_restart_can_be_ended(tmp_path, number):
    with started("--max-restarts", 9, program(tmp_path, "sys.exit(4)")) as supervisor:
        wait_for_message(supervisor, "restart 2 of 9")
        supervisor.send_signal(number)
        assert supervisor.wait(timeout=60) == 4


@pytest.mark.parametrize(("workers", "started"), [(1, 1), (2, 0)])
@pytest.mark.parametrize("is_lost_before", [True, False])
def test_only_the_last_worker_starts_again_when_the_job_is_about_to_end(monkeypatch, workers, started, is_lost_before):
    monkeypatch.setattr(restart_policy, "backoff_seconds", lambda restart: 0.0)
    names = [ProcessName("worker", number) for number in range(workers)]
    again = []
    policy = restart_policy.WorkerLossPolicy(set(names), restart_policy.RestartBudget(3), again.append, print)
    failure = ProcessFailure(names[0], -9, 0.0, None, "")
    lost = Mock(failure=failure)
    if is_lost_before:
        policy.tolerated.add(lost)
        policy._on_loss(failure, 0.0)
    policy.delay_restarts(float("inf"))
    policy.update([lost])
    assert again == names[:1] * started


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_a_lost_worker_starts_again_later_if_the_job_does_not_end_after_all(monkeypatch, is_lost_before):
    now = [100.0]
    monkeypatch.setattr(restart_policy, "time", SimpleNamespace(monotonic=lambda: now[0]))
    names = [ProcessName("worker", number) for number in range(2)]
    again = []
    policy = restart_policy.WorkerLossPolicy(set(names), restart_policy.RestartBudget(3), again.append, print)
    failure = ProcessFailure(names[0], -9, 0.0, None, "")
    lost = Mock(failure=failure)
    policy.update([lost] if is_lost_before else [])
    policy.delay_restarts(700.0)
    for now[0] in (699.0, 700.0):
        assert again == []
        policy.update([lost])
    assert again == names[:1]


@pytest.mark.parametrize(
    ("workers", "codes", "left"), [(3, (75, 75), 3), (3, (75, -9), 2), (2, (75, -9, 75, 75, 75), 2)]
)
def test_restarts_of_workers_that_lost_another_process_are_returned_if_that_ends_the_job(workers, codes, left):
    """Also if it ends because no worker is left: workers that are started again lose a server that hangs once more."""
    names, restarts = [ProcessName("worker", number) for number in range(workers)], restart_policy.RestartBudget(3)
    policy = restart_policy.WorkerLossPolicy(set(names), restarts, print, print)
    for number, code in enumerate(codes):
        policy._on_loss(ProcessFailure(names[number % workers], code, 0.0, None, ""), 0.0)
        policy._restart_at.clear()
    policy.return_restarts()
    assert len(list(iter(restarts.take, None))) == left


@pytest.mark.slow
def test_log_files_of_all_generations_are_kept(tmp_path):
    code = GENERATION + "print('generation', generation); sys.exit(1 - generation)"
    done = run("--max-restarts", 1, "--log-dir", tmp_path / "logs", program(tmp_path, code))
    assert done.returncode == 0
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "generation 0\ngeneration 1\n"
