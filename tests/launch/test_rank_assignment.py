"""Addresses, ranks and GPUs of workers, on one node and on several."""

import json
import os
import socket
import subprocess
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lockstep._errors import ClusterError, OptionError
from lockstep.distributed import jax_init
from lockstep.distributed.cluster import env_reader
from lockstep.distributed.cluster.env_reader import gpu_files, has_accelerators, job_generation, visible_gpus
from lockstep.distributed.jax_init import _idle_gpus, share_of_gpus
from lockstep.distributed.resolvers import resolve
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import (
    NodeProcesses,
    ProcessName,
    RankAssignment,
    find_node_rank,
    reserved_addresses,
)
from lockstep.launch.restart_policy import RestartBudget
from lockstep.launch.supervisor import LocalRestartLoop
from lockstep.launch.worker_environment import gpu_variables, inherited_variables
from tests.distributed.threaded_job import ThreadedJob
from tests.launch.launching import program, started


def job(**options):
    return LaunchConfig(("train.py",), **options)


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ({}, None),
        ({"workers": 2, "coordinator": "10.0.0.1"}, ("10.0.0.1:12421", "10.0.0.1:12422")),
        ({"nodes": 2, "workers": 2, "hosts": ("a", "b:77")}, ("a:12421", "a:12422", "b:77", "b:78")),
        ({"nodes": 2, "hosts": ("fd00::1", "[fd00::2]:9")}, ("[fd00::1]:12421", "[fd00::2]:9")),
        ({"coordinator": "[fd00::1]"}, ("[fd00::1]:12421",)),
        ({"nodes": 2, "coordinator": "a:1"}, None),
    ],
)
def test_addresses_are_known_as_far_as_the_options_tell(options, addresses):
    assert job(**options).addresses == addresses


@pytest.mark.parametrize("address", ["a:0", "a:65536", "a b", "a:x:", "http://a"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises((ClusterError, OptionError)):
        assert job(coordinator=address)


@pytest.mark.parametrize(
    ("options", "option"),
    [({"coordinator": "127.0.0.1:5"}, "--coordinator"), ({"hosts": ("localhost", "b")}, "--hosts")],
)
def test_worker_0_of_several_nodes_needs_an_address_that_the_others_can_reach(options, option):
    with pytest.raises(OptionError, match=rf"{option}: 'local.*|{option}: '127.*"):
        job(nodes=2, **options)
    job(nodes=2, hosts=("127.0.0.1:5", "127.0.0.1:9"))  # On one machine.
    job(nodes=1, coordinator="127.0.0.1:5")


def test_ports_may_not_run_out():
    with pytest.raises(OptionError, match="a:65535: there are no ports for 2 workers"):
        job(workers=2, coordinator="a:65535")
    job(workers=2, nodes=2, min_nodes=1, coordinator="a:65533")  # The rendezvous has the first port.
    with pytest.raises(OptionError, match="a:65534: there are no ports for 2 workers from 65535 to 65535"):
        job(workers=2, nodes=2, min_nodes=1, coordinator="a:65534")


def test_this_node_is_found_among_the_hosts():
    hosts = ("198.51.100.1", "127.0.0.1", "no-such-host.invalid")
    assert find_node_rank(job(nodes=3, hosts=hosts)) == 1
    with pytest.raises(OptionError, match="2 of the hosts are this machine"):
        find_node_rank(job(nodes=2, hosts=("127.0.0.1:1", "localhost:2")))
    assert find_node_rank(job(nodes=2, hosts=("127.0.0.1:1", "localhost:2"), node_rank=1)) == 1


def test_a_reserved_port_is_given_to_nobody_but_who_asks_for_it():
    with reserved_addresses(3) as addresses:
        ports = {int(address.rpartition(":")[2]) for address in addresses}
        assert len(ports) == 3
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", next(iter(ports))))
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_workers_are_numbered_over_the_nodes():
    variables = RankAssignment(3, 1, 2, workers=2, first=2, all_workers=4, coordinator="a:5", addresses=None).variables(
        0
    )
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    expected |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5", "LOCKSTEP_GENERATION": "3"}
    expected["LOCKSTEP_JOB_GENERATION"] = "3"
    assert variables == expected | {"LOCKSTEP_COORDINATOR": "a:5"}


def test_addresses_that_no_variable_can_hold_are_left_out():
    for workers, is_known in ((100, True), (5000, False)):
        addresses = [f"node-{number:04d}.cluster.example:12421" for number in range(workers)]
        variables = RankAssignment(0, 1, workers, 1, 1, workers, addresses[0], addresses).variables(0)
        assert ("TF_CONFIG" in variables) == is_known
        assert subprocess.run(["true"], env={**os.environ, **variables}).returncode == 0
        assert resolve(variables).group().coordinator == addresses[0]


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [0, 1])
def test_nodes_that_restart_on_their_own_meet_whatever_each_has_restarted(restarted):
    environments = []
    for node in range(2):
        waiting = SimpleNamespace(wait=lambda seconds: time.sleep(seconds) or ((), ()))
        two = job(nodes=2, coordinator="10.0.0.1", max_restarts=1)
        starts = LocalRestartLoop(two, node, RestartBudget(1), waiting, log=lambda line: None).assignments()
        started_again = [next(starts) for _ in range(2 if node == restarted else 1)]
        environments.append(started_again[-1].variables(0))
    assert environments[restarted]["LOCKSTEP_GENERATION"] == "1"
    with ThreadedJob(
        2, lambda index: {"generation": job_generation(environments[index])}, timeout_seconds=5
    ) as workers:
        assert workers.errors == {}


@pytest.mark.parametrize("where", ["--coordinator 127.0.0.1:{port}", "--hosts 127.0.0.1:{port},localhost:{next}"])
def test_two_supervisors_make_one_job(tmp_path, where):
    """Two nodes on one machine."""
    code = """
cluster = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {}}'))["cluster"]
told = [os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCKSTEP_COORDINATOR", "LOCKSTEP_PORT")]
print(json.dumps([rank, *told, cluster.get("worker")]))
"""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        words = where.format(port=port, next=port - 2).split()
        path = program(tmp_path, code)
        common = ("--nnodes", "2", "-n", "2", *words)
        variables = {"LOCKSTEP_COORDINATOR": "elsewhere:1", "LOCKSTEP_PORT": "1"}  # What was said here counts more.
        with (
            started(*common, "--node-rank", "0", path, **variables) as first,
            started(*common, "--node-rank", "1", path, **variables) as second,
        ):
            printed = [one.communicate(timeout=60)[0].splitlines() for one in (first, second)]
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}", f"localhost:{port - 2}", f"localhost:{port - 1}"]
    known = addresses if "hosts" in where else None
    for node, lines in enumerate(printed):
        for local, line in enumerate(sorted(lines)):
            rank = 2 * node + local
            expected = [rank, "4", str(local), None if known else addresses[0], None, known]
            assert line.startswith(f"[worker {rank}] ")
            assert json.loads(line.partition("] ")[2]) == expected


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [({"workers": 2}, False), ({"servers": 1}, False), ({"workers": 2, "coordinator": "10.0.0.1"}, True)],
)
def test_an_address_to_listen_on_is_inherited_only_by_workers_that_have_given_addresses(options, is_kept):
    """Else they have loopback addresses, at which nobody would listen."""
    assert ("LOCKSTEP_BIND" in inherited_variables(job(**options), {"LOCKSTEP_BIND": "10.0.0.1"})) == is_kept


@pytest.mark.parametrize("options", [{"workers": 2}, {"servers": 1}, {"workers": 2, "coordinator": "10.0.0.1"}])
def test_an_address_of_another_job_is_not_inherited(options):
    kept = inherited_variables(job(**options), {"LOCKSTEP_COORDINATOR": "192.0.2.1:5", "LOCKSTEP_PORT": "7"})
    assert not kept.keys() & {"LOCKSTEP_COORDINATOR", "LOCKSTEP_PORT"}


def test_a_job_on_one_machine_gets_a_secret_unless_it_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inherited_variables(job(), {"LOCKSTEP_SECRET": "own"})["LOCKSTEP_SECRET"] == "own"
    made = [inherited_variables(job(), {"LOCKSTEP_SECRET": ""})["LOCKSTEP_SECRET"] for _ in range(2)]
    assert len({*made, ""}) == 3
    kept = inherited_variables(job(), {"LOCKSTEP_SECRET_FILE": "secret"})
    assert kept == {"LOCKSTEP_SECRET_FILE": str(tmp_path / "secret")}  # The program may change its directory.


def test_a_pause_before_a_restart_ends_at_the_limit_of_the_run():
    lines, waits = [], []
    signals = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or time.sleep(seconds) or ((), ()))
    loop = LocalRestartLoop(job(), 0, RestartBudget(9), signals, lines.append, stop_at=time.monotonic() + 0.1)
    assignments = loop.assignments()
    next(assignments)
    assert next(assignments, None) is None
    assert loop.code == 124
    assert "longer than --timeout allows" in lines[-1]
    assert sum(waits) < 1


def test_gpus_are_cut_into_shares(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-7"}, tmp_path) == ["2", "GPU-7"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == []
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == []
    assert gpu_files(tmp_path) == ["nvidia0", "nvidia1", "nvidia2"]


def test_workers_share_the_gpus_that_all_of_them_may_open():
    alike, others = ("a nvidia0 nvidia1", "0,1"), ("a nvidia2 nvidia3", "0,1")
    assert [share_of_gpus([alike, alike], index) for index in range(2)] == [[0], [1]]
    assert [share_of_gpus([alike, others], index) for index in range(2)] == [None, None]
    assert share_of_gpus([alike, alike, others, others], 3) == [1]


def test_gpus_that_no_worker_gets_are_counted():
    assert [_idle_gpus([("a", "0,1,2")] * workers, 0) for workers in (2, 3)] == [1, 0]


@pytest.mark.parametrize(("others", "refused"), [([["0 here"], ["0 here"]], True), ([["0 here"], ["0 there"]], False)])
def test_workers_that_would_share_a_gpu_are_refused(others, refused, monkeypatch):
    asked = []
    client = SimpleNamespace(
        peers=("worker 0 of 2", "worker 1 of 2"), gather=lambda what, own: asked.append(own) or others
    )
    monkeypatch.setattr(jax_init, "visible_gpus", lambda environ: ["4", "5"])
    gpus = [SimpleNamespace(local_hardware_id=1)]
    error = pytest.raises(ClusterError, match=r"^worker 0 of 2 and worker 1 of 2 .* number 0 ")
    with error if refused else nullcontext():
        jax_init.check_gpus_differ(client, gpus, {})
    assert asked[0][0].startswith("5 ")


@pytest.mark.parametrize("file", ["accel0", "vfio/0"])
def test_tpus_are_accelerators_if_jax_may_use_them(file, tmp_path, monkeypatch):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not has_accelerators({}, tmp_path)
    (tmp_path / file).touch()
    for is_installed in (False, True):
        monkeypatch.setattr(env_reader, "find_spec", lambda name, found=is_installed: found or None)
        assert has_accelerators({}, tmp_path) is is_installed
        assert has_accelerators({"JAX_PLATFORMS": "tpu,cpu"}, tmp_path) is is_installed
        assert not has_accelerators({"JAX_PLATFORMS": "cpu"}, tmp_path)


@pytest.mark.parametrize(
    ("gpus", "workers", "shares"),
    [
        ("0123", 2, ["0,1", "2,3"]),
        ("0123", 4, ["0", "1", "2", "3"]),
        ("01234", 2, ["0,1", "2,3,4"]),
        ("01", 1, [None]),
        ("0", 2, [None, None]),
        ("", 2, [None, None]),
    ],
)
def test_each_gpu_belongs_to_one_worker(gpus, workers, shares):
    here = NodeProcesses([ProcessName("worker", local) for local in range(workers)])
    found = [gpu_variables(list(gpus), process, here) for process in here.all]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in found] == shares
