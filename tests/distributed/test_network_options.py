"""Secrets: what is one, where it comes from, and which processes need one."""

import os
import socket

import pytest

from lockstep import ClusterError
from lockstep.distributed import jax_init
from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.connect import open_control_channel
from lockstep.distributed.control.handshake import open_listener
from lockstep.parameter_server.process_role import ProcessContext, ProcessRole
from tests.launch.launching import program, run
from tests.support.processes import own_host

SECRET = "0123456789abcdef" * 2
ELSEWHERE = "192.0.2.1:12421"  # Of no machine.


def options(**variables):
    return NetworkOptions.of({f"LOCKSTEP_{name.upper()}": value for name, value in variables.items()})


def test_without_variables_there_is_no_secret_and_nothing_is_open():
    assert NetworkOptions.of({}) == options(secret="", open="0") == NetworkOptions(None, is_open=False, bind_host=None)
    assert options(bind=" [::1] ") == options(bind="::1") == NetworkOptions(bind_host="::1")


def test_a_secret_is_text_or_in_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    assert options(secret=f" {SECRET} ") == options(secret_file=str(path)) == NetworkOptions(SECRET.encode())


def test_a_short_secret_is_refused_with_what_makes_a_good_one(tmp_path):
    path = tmp_path / "secret"
    path.write_text("hunter2\n")
    path.chmod(0o600)
    for name, value in (("secret", "hunter2"), ("secret_file", str(path)), ("secret_file", os.devnull)):
        with pytest.raises(ClusterError, match=r"openssl rand -hex 32|no regular file") as caught:
            options(**{name: value})
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ClusterError, match=r"^LOCKSTEP_SECRET: expected a secret of at least 32 bytes, got 31\. Fix:"):
        options(secret=SECRET[1:])


def test_a_secret_that_every_user_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    with pytest.raises(ClusterError, match=r"every user of this machine can read .* Fix: chmod 600 secret"):
        options(secret_file=str(path))


def test_a_file_that_is_none_is_refused_without_a_wait(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "missing", "."):
        with pytest.raises(ClusterError, match=r"^LOCKSTEP_SECRET_FILE: "):
            options(secret_file=str(tmp_path / name))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"secret": SECRET, "secret_file": "x"}, "are both set"),
        ({"open": "yes"}, "LOCKSTEP_OPEN: expected 1, 0 or nothing, got 'yes'"),
    ],
)
def test_variables_that_contradict_are_refused(variables, said):
    with pytest.raises(ClusterError, match=said):
        options(**variables)


def context(job, network):
    role = ProcessRole(job, 0, ELSEWHERE, (ELSEWHERE,), (ELSEWHERE,))
    return ProcessContext(role, {}, None, None, True, network, 0.1, str)


START = {
    "chief": lambda network: open_control_channel(
        WorkerGroup(2, 0, ELSEWHERE), {}, network=network, timeout_seconds=1.5, log=str
    ),
    "worker": lambda network: open_control_channel(
        WorkerGroup(2, 1, ELSEWHERE), {}, network=network, timeout_seconds=1.5, log=str
    ),
    "dispatcher": lambda network: context("chief", network).serve_dispatcher(None),
    "client of the dispatcher": lambda network: context("worker", network).connect_to_dispatcher(),
    "parameter server": lambda network: context("ps", network).serve_variables(None, 1),
    "rendezvous and others": lambda network: open_listener(ELSEWHERE, network, str, "the rendezvous"),
}


@pytest.mark.parametrize("start", START.values(), ids=START)
def test_every_process_needs_a_secret_where_other_machines_may_reach_it(start):
    with pytest.raises(
        ClusterError, match=r"has no secret: .* Fix: give all processes of the job one secret: LOCKSTEP_SECRET="
    ):
        start(NetworkOptions())


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "a-name", "0.0.0.0", "[::]", "127.0.0.1.example.com", "127.example.com"]
)
def test_only_loopback_addresses_need_no_secret(address):
    with pytest.raises(ClusterError, match="has no secret"):
        open_listener(f"{address}:12421", NetworkOptions(), str)
    with pytest.raises(ClusterError, match="has no secret"):
        open_listener(f"{own_host()}:12421", NetworkOptions(bind_host="0.0.0.0"), str)


def test_an_open_listener_says_so_at_each_start():
    with socket.create_server(("0.0.0.0", 0)) as free:
        address = f"0.0.0.0:{free.getsockname()[1]}"
    lines = []
    for _ in range(2):
        open_listener(address, NetworkOptions(is_open=True), lines.append, "ps 0").close()
    assert len(lines) == 2
    assert lines[0].startswith(f"LOCKSTEP_OPEN=1: ps 0 listens on port {address[8:]} of 0.0.0.0 without a secret.")


def test_a_listener_is_at_the_address_that_was_set():
    host = own_host()
    with open_listener("a-name:12421", NetworkOptions(bind_host=host), str) as listener:
        assert listener.getsockname() == (host, 12421)


def test_a_listener_at_all_ipv6_addresses_takes_ipv4_too():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with open_listener(f"a-name:{port}", NetworkOptions(bind_host="::", is_open=True), str) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5).close()


@pytest.mark.parametrize("host", ["worker-0..svc", ".svc", "x" * 64])
def test_a_name_that_no_lookup_accepts_is_no_address(host):
    with pytest.raises(ClusterError, match="expected an address such as"):
        split_address("TF_CONFIG", f"{host}:12421")


@pytest.mark.parametrize("nodes", [("--hosts", "192.0.2.1,192.0.2.2"), ("--nnodes", "1:2", "--coordinator", ELSEWHERE)])
def test_lockstep_run_needs_a_secret_for_several_machines(nodes, tmp_path):
    done = run(*nodes, "--node-rank", 0, program(tmp_path, "print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "This node uses 192.0.2.1:12421, which other machines may reach, and has no secret" in done.stderr


def test_lockstep_run_takes_a_secret_from_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    code = "print(os.environ['LOCKSTEP_SECRET_FILE'], 'LOCKSTEP_SECRET' in os.environ)"
    done = run(program(tmp_path, code), LOCKSTEP_SECRET_FILE=str(path))
    assert done.stdout == f"[worker 0] {path} False\n"


@pytest.mark.parametrize(
    ("host", "bind_host", "address"),
    [("10.0.0.1", None, "[::]:50"), ("localhost", None, "localhost:50"), ("10.0.0.1", "10.0.0.2", "10.0.0.2:50")],
)
def test_the_service_of_jax_listens_at_the_port_that_the_workers_know(host, bind_host, address):
    assert (
        jax_init._bind_address(f"{host}:50", NetworkOptions(bind_host=bind_host)) == address
    )  # None: JAX reads a variable.
