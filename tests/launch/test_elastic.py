"""``--nnodes MIN:MAX``: rendezvous before each generation, loss and return of nodes. Nodes are supervisors on this machine."""

import contextlib
import json
import signal
import socket
from pathlib import Path

import pytest

from tests.launch.launching import program, run, send, started, text_of, wait_for_message
from tests.support.processes import own_host
from tests.support.waiting import DEADLINE, has_ended, wait_until

pytestmark = pytest.mark.waits

GENERATION = "generation = int(os.environ['LOCKSTEP_GENERATION'])\nworkers = int(os.environ['WORLD_SIZE'])\n"
RUNNING = GENERATION + "write(f'{generation}.{rank}', str(os.getpid()))\n"
FOREVER = "time.sleep(100)\n"


class Nodes:
    """The supervisors of one job."""

    def __init__(self, held, path, options):
        self._held, self._path, self._options = held, path, options
        self._folder = Path(path).parent
        self.coordinator = f"{own_host()}:12421"

    def start(self, *words, **variables):
        common = ("--coordinator", self.coordinator, *self._options, *words)
        return self._held.enter_context(started(*common, self._path, **variables))

    def start_two(self):
        """Start nodes 1 and 0, and return them and the processes of their first workers; node 1 waits when node 0 starts the server."""
        second = self.start("--node-rank", 1)
        wait_for_message(second, "rendezvous at")
        first = self.start("--node-rank", 0)
        return first, second, [text_of(self._folder / f"0.{rank}") for rank in range(2)]


@pytest.fixture
def job(tmp_path):
    """Return a function that makes a job of a program's code; all its processes are killed at the end."""
    with contextlib.ExitStack() as held:

        def make(code, nnodes="1:2", *options, join=2, restarts=3, grace=5):
            limits = ("--join-seconds", join, "--max-restarts", restarts, "--grace", grace, "--start-seconds", 30)
            return Nodes(held, program(tmp_path, code), ("--nnodes", nnodes, *limits, *options))

        yield make


def end_of(supervisor):
    """Return exit code, output and messages."""
    printed, messages = supervisor.communicate(timeout=DEADLINE)
    return supervisor.returncode, printed, messages


@pytest.mark.slow
def test_all_nodes_start_at_once_and_are_told_where_they_are(job):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TF_CONFIG")
    nodes = job(f"print(json.dumps([os.environ[name] for name in {names}]))", "1:3", join=1000)
    ends = [
        end_of(one)
        for one in [nodes.start("-n", number, "--node-rank", rank) for rank, number in ((2, 1), (0, 2), (1, 1))]
    ]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    lines = sorted(line for _, printed, _ in ends for line in printed.splitlines())
    host = nodes.coordinator.partition(":")[0]
    addresses = [f"{host}:12422", f"{host}:12423", "127.0.0.1:12422", "127.0.0.1:12423"]
    places = [
        ("0", "4", "0", "2", "0"),
        ("1", "4", "1", "2", "0"),
        ("2", "4", "0", "1", "1"),
        ("3", "4", "0", "1", "2"),
    ]
    for rank, (line, place) in enumerate(zip(lines, places, strict=True)):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        *told, seen = json.loads(line.removeprefix(f"[worker {rank}] "))
        assert (*told, json.loads(seen)) == (*place, "3", config)


@pytest.mark.slow
def test_nodes_on_the_machine_of_the_rendezvous_need_no_rank(job):
    nodes = job("print(rank)", "3:3")
    ends = [end_of(one) for one in [nodes.start() for _ in range(3)]]
    assert sorted(printed for _, printed, _ in ends) == [f"[worker {rank}] {rank}\n" for rank in range(3)]


def test_hosts_may_be_named_instead(job, tmp_path):
    hosts = [own_host(), own_host()]
    path = program(tmp_path, "print(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])")
    common = ("--hosts", f"{hosts[0]},{hosts[1]}:500", "--nnodes", "1:2")
    with started(*common, "--node-rank", 0, path) as one, started(*common, "--node-rank", 1, path) as two:
        ends = [end_of(one), end_of(two)]
    expected = [f"{hosts[0]}:12422", f"{hosts[1]}:501"]
    assert [(code, printed) for code, printed, _ in ends] == [(0, f"[worker {rank}] {expected}\n") for rank in range(2)]


@pytest.mark.slow
def test_the_job_goes_on_without_a_node_that_was_killed(job, tmp_path):
    nodes = job(RUNNING + "if generation == 0: " + FOREVER + "print('done by', workers)")
    first, second, processes = nodes.start_two()
    second.kill()
    code, printed, messages = end_of(first)
    assert (code, printed) == (0, "[worker 0] done by 1\n"), messages
    assert "restart 1 of 3 in 1 s or later: node 1 (" in messages
    assert f"process {second.pid}): lost, its connection closed" in messages
    assert "start 1: node 0 of 1, worker 0 of 1" in messages
    assert all(has_ended(process) for process in processes)


@pytest.mark.slow
def test_a_node_that_comes_later_takes_part_from_the_next_start_on(job, tmp_path):
    nodes = job(
        RUNNING + "if generation == 0: wait_for(lambda: is_there('go')); sys.exit(9)\nprint('done by', workers)"
    )
    first = nodes.start("--node-rank", 0)
    text_of(tmp_path / "0.0")
    second = nodes.start()
    assert "waiting for node 0 (" in wait_for_message(second, " to end, ")
    (tmp_path / "go").touch()
    ends = [end_of(first), end_of(second)]
    assert sorted(printed for _, printed, _ in ends) == [f"[worker {rank}] done by 2\n" for rank in range(2)]
    assert [code for code, *_ in ends] == [0, 0]


@pytest.mark.slow
def test_a_node_that_was_killed_may_come_back(job, tmp_path):
    nodes = job(RUNNING + "if generation == 0: " + FOREVER + "print('done by', workers)", join=1000)
    first, second, _ = nodes.start_two()
    second.kill()
    wait_for_message(first, "restart 1 of 3")
    ends = [end_of(nodes.start("--node-rank", 1)), end_of(first)]
    assert [(code, printed) for code, printed, _ in ends] == [(0, f"[worker {rank}] done by 2\n") for rank in (1, 0)]


@pytest.mark.slow
def test_a_node_that_was_asked_to_end_is_not_waited_for(job, tmp_path):
    code = RUNNING + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nif generation == 0: " + FOREVER
    nodes = job(code + "print('done by', workers)")
    first, second, _ = nodes.start_two()
    second.terminate()
    assert end_of(second)[0] == 75
    code, printed, messages = end_of(first)
    assert (code, printed) == (0, "[worker 0] done by 1\n"), messages
    assert "): it was asked to stop" in messages


@pytest.mark.slow
@pytest.mark.parametrize("handles", [True, False])
def test_rendezvous_ends_all_nodes_when_node_0_gets_sigterm(job, tmp_path, handles):
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" if handles else ""
    nodes = job(handler + RUNNING + FOREVER)
    first, second, _ = nodes.start_two()
    first.terminate()
    code, _, messages = end_of(second)
    assert end_of(first)[0] == code == (75 if handles else 143)
    assert messages.splitlines()[-1].endswith("): it was asked to stop.")


@pytest.mark.slow
def test_rendezvous_ends_the_job_when_node_0_dies(job, tmp_path):
    nodes = job(RUNNING + FOREVER)
    first, second, processes = nodes.start_two()
    first.kill()
    code, _, messages = end_of(second)
    assert code == 75
    sentence = (
        f"lockstep run: node 0 (rendezvous at {nodes.coordinator}) was lost (its connection closed), and the job cannot"
    )
    assert messages.splitlines()[-1] == f"{sentence} continue without it."
    wait_until(lambda: all(has_ended(process) for process in processes), "the end of all processes")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(9)", 9), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
@pytest.mark.slow
def test_all_nodes_end_with_the_code_of_the_first_failure_when_no_restart_is_left(job, end, code):
    body = RUNNING + "wait_for(lambda: is_there(f'{generation}.{1 - rank}'))\nif rank == 1: " + end + "\n"
    nodes = job(body + "if generation: sys.exit(75)\n" + FOREVER, join=1000, restarts=1)
    first, second = nodes.start("--node-rank", 0), nodes.start("--node-rank", 1)
    ends = [end_of(first), end_of(second)]
    assert [found for found, *_ in ends] == [code, code], ends
    assert "node 1 (" in ends[0][2].splitlines()[-1]  # Why stands last: it is on the other node.
    assert ends[1][2].splitlines()[-1].startswith("lockstep run: worker 1")


@pytest.mark.slow
def test_a_node_that_has_done_its_work_waits_for_the_others_and_starts_again_with_them(job):
    body = GENERATION + "print('generation', generation)\nif rank == 1 and generation == 0: sys.exit(9)"
    nodes = job(body, join=1000)
    ends = [end_of(one) for one in (nodes.start("--node-rank", 0), nodes.start("--node-rank", 1))]
    printed = [f"[worker {rank}] generation 0\n[worker {rank}] generation 1\n" for rank in range(2)]
    assert [(code, text) for code, text, _ in ends] == [(0, text) for text in printed]


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [((), 2, "worker 1 ended with exit code 2 (wrong usage)"), (("--timeout", 3), 124, "longer than --timeout allows")],
)
@pytest.mark.slow
def test_what_is_final_on_one_node_is_final_on_all(job, tmp_path, options, code, why):
    nodes = job(RUNNING + f"if rank == 1 and {code} == 2: sys.exit(2)\n" + FOREVER, join=1000)
    first = nodes.start("--node-rank", 0)
    second = nodes.start("--node-rank", 1, *options)
    ends = [end_of(first), end_of(second)]
    assert [found for found, *_ in ends] == [code, code], ends
    assert why in ends[0][2].splitlines()[-1]


@pytest.mark.slow
def test_too_few_nodes_end_in_time_and_say_who_is_missing(tmp_path):
    host = own_host()
    limits = ("--start-seconds", 2.5, "--node-rank", 0)
    path = program(tmp_path, "print('ran')")
    done = run("--nnodes", "2:3", "--hosts", f"{host},gone.invalid,away.invalid", *limits, path)
    assert (done.returncode, done.stdout) == (75, "")
    assert "waiting for 1 more node of gone.invalid and away.invalid (1 of 2:3 here), " in done.stderr
    assert "expected at least 2 nodes within 2.5 s, got 1" in done.stderr.splitlines()[-1]
    assert "absent: gone.invalid and away.invalid" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_nodes_that_were_there_are_named_when_too_few_are_left(job, tmp_path):
    nodes = job(RUNNING + FOREVER, "2:2", "--start-seconds", 3)
    first, second, _ = nodes.start_two()
    second.kill()
    code, _, messages = end_of(first)
    assert code == 75
    assert f"process {second.pid}): lost, its connection closed." in messages.splitlines()[-1]


@pytest.mark.slow
def test_join_without_a_server_times_out(tmp_path):
    address = f"{own_host()}:12421"
    common = ("--nnodes", "1:2", "--coordinator", address, "--node-rank", 1)
    done = run(*common, "--start-seconds", 0.5, program(tmp_path, ""))
    assert done.returncode == 75
    sentence = f"node 0 (rendezvous at {address}) was not reached within 0.5 s: Connection refused. Fix: start the same command there"
    assert sentence in done.stderr
    assert run(*common, "--timeout", 0.5, program(tmp_path, "")).returncode == 124


@pytest.mark.slow
def test_a_node_that_cannot_listen_says_why_at_once(tmp_path):
    options = ("--nnodes", "1:2", "--coordinator", "127.0.0.1:12421")
    done = run(*options, program(tmp_path, ""), LOCKSTEP_BIND="192.0.2.1", LOCKSTEP_SECRET="own" * 11)
    assert done.returncode == 2
    assert "The rendezvous cannot listen on port 12421 of 192.0.2.1 (LOCKSTEP_BIND)" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = run("--nnodes", "1:2", "--coordinator", address, program(tmp_path, ""))
    assert done.returncode == 2
    assert "something that is no Lockstep job uses it" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_node_that_waits_may_be_asked_to_end(job, rank):
    nodes = job("", "2:2")
    waiting = nodes.start("--node-rank", rank)
    wait_for_message(waiting, "waiting for ")
    waiting.terminate()
    assert end_of(waiting)[0] == 143


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "variables", "why"),
    [
        (("--max-restarts", 2), {}, "was started with --max-restarts 2, node 0 with 3"),
        (("--nnodes", "1:3"), {}, 'was started with --nnodes "1:3", node 0 with "1:2"'),
        ((), {"LOCKSTEP_SECRET": "other" * 8}, "it and this process were given different secrets"),
        ((), {"LOCKSTEP_SECRET": ""}, "it asks for a secret that this process was not given"),
    ],
)
def test_rendezvous_rejects_other_options_and_secrets(job, tmp_path, words, variables, why):
    nodes = job(RUNNING + "if generation == 0: wait_for(lambda: is_there('go'))\nprint('done by', workers)", join=0.3)
    first = nodes.start("--node-rank", 0, LOCKSTEP_SECRET="own" * 11)
    text_of(tmp_path / "0.0")
    code, printed, messages = end_of(
        nodes.start("--node-rank", 1, *words, **{"LOCKSTEP_SECRET": "own" * 11, **variables})
    )
    assert (code, printed) == (2, "")
    assert why in messages
    (tmp_path / "go").touch()
    code, printed, messages = end_of(first)
    assert (code, printed) == (0, "[worker 0] done by 1\n")
    assert ("was closed: it was given another secret" in messages) == bool(variables)


@pytest.mark.slow
def test_two_nodes_of_one_rank_do_not_both_come(job, tmp_path):
    nodes = job(RUNNING + FOREVER, restarts=0)
    first, second, _ = nodes.start_two()
    third = nodes.start("--node-rank", 1)
    assert "another node 1 has joined (" in wait_for_message(third, "waiting for the rendezvous at node 0")
    second.terminate()
    assert end_of(first)[0] == 75


@pytest.mark.slow
def test_a_node_that_is_done_with_a_job_that_ends_waits_for_the_next_one(job, tmp_path):
    end = "signal.signal(signal.SIGTERM, lambda *_: (wait_for(lambda: is_there('go')), sys.exit()))\n"
    nodes = job(f"if rank: wait_for(lambda: is_there('0.0')); sys.exit(2)\n{end}{RUNNING}{FOREVER}", "2:2", grace=1000)
    first, second = nodes.start("--node-rank", 0), nodes.start("--node-rank", 1)
    assert end_of(second)[0] == 2
    program(tmp_path, "print('the next job')")
    second = nodes.start("--node-rank", 1)
    wait_for_message(second, "waiting for the rendezvous at node 0")
    (tmp_path / "go").touch()
    assert end_of(first)[0] == 2
    ends = [end_of(nodes.start("--node-rank", 0)), end_of(second)]
    assert [(code, printed) for code, printed, _ in ends] == [
        (0, f"[worker {rank}] the next job\n") for rank in range(2)
    ]


@pytest.mark.slow
def test_rendezvous_rejects_a_second_job_at_its_address(job):
    nodes = job("", "2:2")
    wait_for_message(nodes.start("--node-rank", 0), "waiting for ")
    code, _, messages = end_of(nodes.start("--node-rank", 0))
    assert code == 2
    assert "another Lockstep job uses it. Fix: end that ('ss -ltnp' shows its process), or give" in messages


@pytest.mark.parametrize("nnodes", ["2:1", "0:2", "a:2", ":2", "1:2:3"])
def test_other_ranges_are_refused(tmp_path, nnodes):
    done = run("--nnodes", nnodes, "--coordinator", "127.0.0.1:1", program(tmp_path, ""))
    assert done.returncode == 2
    assert "--nnodes: " in done.stderr


def test_rendezvous_needs_an_address(tmp_path):
    done = run("--nnodes", "1:2", program(tmp_path, ""))
    assert (done.returncode, "--nnodes 1:2: the address of worker 0 is missing" in done.stderr) == (2, True)


@pytest.mark.slow
def test_no_process_is_left_when_all_supervisors_are_killed(job, tmp_path):
    nodes = job(RUNNING + FOREVER)
    *supervisors, processes = nodes.start_two()
    for supervisor in supervisors:
        send(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: all(has_ended(process) for process in processes), "the end of all processes")


@pytest.mark.nightly
def test_the_job_goes_on_without_a_node_that_was_stopped_and_keeps_one_that_runs_for_longer(job, tmp_path):
    nodes = job(RUNNING + "if generation == 0 and rank: " + FOREVER + "print('done by', workers)", "1:3")
    first = nodes.start("--node-rank", 0)
    others = [nodes.start("--node-rank", rank) for rank in (1, 2)]
    for rank in range(3):
        text_of(tmp_path / f"0.{rank}")
    others[1].send_signal(signal.SIGSTOP)
    line = wait_for_message(first, "restart 1 of 3")
    assert f"process {others[1].pid}): lost, it sent nothing for 60 s (stopped, or cut off)" in line
    ends = [end_of(one) for one in (first, others[0])]
    assert [(code, printed) for code, printed, _ in ends] == [
        (0, "[worker 0] done by 3\n[worker 0] done by 2\n"),
        (0, "[worker 1] done by 2\n"),
    ]
    others[1].send_signal(signal.SIGCONT)
    code, _, messages = end_of(others[1])
    assert code == 75
    assert "this node sent nothing for 60 s, and the job continues without it" in messages or "was lost" in messages
