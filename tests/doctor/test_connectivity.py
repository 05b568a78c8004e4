"""What the network of a cluster is found to be, on real sockets of this machine."""

import socket
import threading

import pytest

from lockstep.cluster_resolver import SimpleClusterResolver
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.doctor import environment_checks
from lockstep.doctor.environment_checks import ClusterPeer, check_network, peers_of
from tests.support.waiting import DEADLINE


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


def names_and_texts(*peers, **options):
    return [(finding.name, finding.what) for finding in check_network(peers, **options)]


def test_check_network_reaches_a_worker_that_listens(listener):
    assert names_and_texts(ClusterPeer("worker 0", listener, is_own=False, listens=True)) == []


def test_check_network_reports_a_worker_that_is_not_started(free):
    ((name, what),) = names_and_texts(ClusterPeer("worker 0", free, is_own=False, listens=True))
    assert name == "worker-not-reached"
    assert what == f"worker 0 at {free} refused: nothing listens there yet"
    assert names_and_texts(ClusterPeer("worker 1", free, is_own=False, listens=False)) == []  # Its machine is there.


def test_check_network_reports_a_name_without_an_address():
    ((name, what),) = names_and_texts(ClusterPeer("worker 0", "no-such-host.invalid:2222", is_own=False, listens=True))
    assert (name, what) == ("worker-not-reached", "worker 0: the name 'no-such-host.invalid' has no address")


@pytest.mark.slow
def test_check_network_reports_an_own_port_in_use(listener, free):
    ((name, what),) = names_and_texts(ClusterPeer("worker 0", listener, is_own=True, listens=True))
    assert (name, what) == ("port-not-free", f"worker 0, which is this process, cannot listen at {listener}")
    assert names_and_texts(ClusterPeer("worker 0", free, is_own=True, listens=True)) == []
    assert names_and_texts(ClusterPeer("worker 1", listener, is_own=True, listens=False)) == []


def test_check_network_reports_a_loopback_address_among_several_machines(listener):
    own = ClusterPeer("worker 0", "10.255.255.1:2222", is_own=True, listens=False)
    other = ClusterPeer("worker 1", listener, is_own=False, listens=False)
    ((name, _),) = names_and_texts(own, other, network=NetworkOptions(b"known"))
    assert name == "loopback-in-cluster"


def test_check_network_reports_that_several_machines_need_a_secret():
    address = "192.0.2.1:2222"
    ((name, what),) = names_and_texts(ClusterPeer("worker 1", address, is_own=True, listens=False))
    assert (name, what) == ("no-secret", f"worker 1, which is this process, is at {address} and has no secret")


def test_check_network_connects_in_parallel(monkeypatch):
    asked = threading.Barrier(19)

    def silent(address, timeout):
        asked.wait(DEADLINE)
        raise TimeoutError

    monkeypatch.setattr(environment_checks.socket, "create_connection", silent)
    found = names_and_texts(*peers_elsewhere(19), limit=DEADLINE)
    assert not asked.broken
    assert [name for name, _ in found] == ["worker-not-reached"] * 19


@pytest.mark.slow
def test_check_network_has_a_time_limit(monkeypatch):
    answered = threading.Event()

    def silent(address, timeout):
        answered.wait(DEADLINE)
        raise ConnectionRefusedError

    monkeypatch.setattr(environment_checks.socket, "create_connection", silent)
    found = names_and_texts(*peers_elsewhere(3), limit=0.5)
    assert not answered.is_set()
    answered.set()
    assert [name for name, _ in found] == ["worker-not-reached"] * 3
    assert all("no answer within" in text for _, text in found)


def peers_elsewhere(number):
    return [ClusterPeer(f"worker {n}", f"10.0.0.{n}:2222", is_own=False, listens=n == 0) for n in range(number)]


def test_peers_of_marks_the_processes_that_listen():
    def called(cluster, task):
        resolver = SimpleClusterResolver(cluster, task_type=task, task_id=0, environ={})
        peers = peers_of(resolver.membership)
        return [peer.name for peer in peers if peer.listens], [peer.name for peer in peers if peer.is_own]

    assert called({"worker": ["a:1", "b:1"]}, "worker") == (["worker 0"], ["worker 0"])
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1", "d:1"]}
    assert called(cluster, "ps") == (["chief 0", "ps 0", "ps 1"], ["ps 0"])
