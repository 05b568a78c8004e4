"""What the processes of an initialized JAX tell each other before they join; with real processes in ``jobs/test_jax_initialized_before.py``."""

import re
import socket
import threading

import pytest

import lockstep
from lockstep.distributed import attach_to_jax
from lockstep.distributed.attach_to_jax import _check_secrets, _gather_over_jax, _open_channel, compare_with_jax
from lockstep.distributed.cluster.membership import WorkerGroup


@pytest.fixture
def of_three(monkeypatch):
    """This process is number 1 of three of JAX."""
    monkeypatch.setattr(attach_to_jax.jax, "process_count", lambda: 3)
    monkeypatch.setattr(attach_to_jax.jax, "process_index", lambda: 1)


def group(workers, index, source="Slurm"):
    return WorkerGroup(workers, index, "n1:1", source=source)


def test_a_resolver_that_agrees_with_jax_needs_no_note(of_three):
    assert compare_with_jax(group(3, 1), is_chosen=True) is None


@pytest.mark.parametrize("is_chosen", [True, False])
def test_another_number_of_workers_is_an_error(of_three, is_chosen):
    with pytest.raises(lockstep.ClusterError) as raised:
        compare_with_jax(group(2, 1), is_chosen)
    assert str(raised.value) == (
        "Slurm says that this process is worker 1 of 2, but JAX is initialized already, with this process as 1 of 3. Fix: give "
        "jax.distributed.initialize() the same numbers, or leave that call to Lockstep, or leave out what says it "
        "(Slurm): then the processes of JAX train."
    )


@pytest.mark.parametrize(("workers", "index"), [(3, 2), (1, 0)])
def test_inherited_variables_with_another_index_or_of_one_process_are_noted(of_three, workers, index):
    assert compare_with_jax(group(workers, index), is_chosen=False) == (
        f"Slurm says that this process is worker {index} of {workers}. That is not used, as JAX is initialized already, with this "
        "process as 1 of 3."
    )
    with pytest.raises(lockstep.ClusterError, match=f"TF_CONFIG says that this process is worker {index} of {workers}"):
        compare_with_jax(group(workers, index, "TF_CONFIG"), is_chosen=True)


def opened(machines, environ, address="127.0.0.1"):
    offer, listener = _open_channel(machines, {"address": address}, environ, print)
    if listener is not None:
        listener.close()
    return offer


def test_the_chief_draws_a_secret_for_each_job_unless_there_is_one():
    first, second = (opened(["a", "a"], {}) for _ in range(2))
    assert len(first["secret"]) == 64
    assert first["secret"] != second["secret"]
    assert opened(["a", "a"], {"LOCKSTEP_SECRET": "s" * 32})["secret"] is None


def test_the_chief_listens_where_the_other_machines_reach_it():
    assert opened(["a", "a"], {}, "10.0.0.1")["coordinator"].startswith("127.0.0.1:")
    assert opened(["a", "a"], {"LOCKSTEP_BIND": "127.7.0.1"})["coordinator"].startswith("127.7.0.1:")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert opened(["a", "a"], {"LOCKSTEP_PORT": str(port)})["coordinator"] == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("environ", "address", "message"),
    [
        ({}, None, "this machine has no address that the others can reach. Fix: set LOCKSTEP_COORDINATOR=host:port"),
        ({"LOCKSTEP_COORDINATOR": "nowhere"}, "10.0.0.1", "LOCKSTEP_COORDINATOR: expected an address"),
        (
            {"LOCKSTEP_COORDINATOR": "localhost:1"},
            "10.0.0.1",
            "jax.distributed: worker 0 of 2 (localhost:1) cannot be ",
        ),
    ],
)
def test_why_the_chief_cannot_listen_is_offered_to_all(environ, address, message):
    assert opened(["a", "b"], environ, address)["error"].startswith(message)


def test_processes_with_and_without_a_secret_are_refused():
    _check_secrets([{"has_secret": True}] * 2)
    _check_secrets([{"has_secret": False}] * 2)
    with pytest.raises(lockstep.ClusterError, match=r"no secret is set for process 0 and 2 of 3 of JAX, .* Fix: set "):
        _check_secrets([{"has_secret": False}, {"has_secret": True}, {"has_secret": False}])


@pytest.mark.slow
def test_a_process_that_does_not_come_is_waited_for_within_the_limit(of_three, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(attach_to_jax, "_all_gather", lambda own: never.wait(60))
    lines = []
    with pytest.raises(lockstep.ClusterError) as raised:
        _gather_over_jax({}, "an introduction", 2.5, lines.append)
    never.set()
    assert raised.value.exit_code == 75
    assert "process 1 of 3 of JAX: process 0 and 2 of 3 of JAX did not all make their " in str(raised.value)
    (line,) = lines
    assert re.fullmatch(r"waiting for process 0 and 2 of 3 of JAX, for an introduction, \d+ s", line)


def test_what_jax_says_of_a_lost_process_is_shown(of_three, monkeypatch):
    def fail(own):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(attach_to_jax, "_all_gather", fail)
    with pytest.raises(
        lockstep.ClusterError, match="was not exchanged with process 0 and 2 of 3 of JAX: Connection closed"
    ):
        _gather_over_jax({}, "an introduction", 60, print)


def test_a_pod_whose_devices_span_processes_is_attached_to_though_nobody_initialized_jax(monkeypatch):
    """libtpu connects the hosts of a TPU pod by itself."""

    class AttachedError(Exception):
        pass

    def attach(check, timeout_seconds, log, environ):
        raise AttachedError

    monkeypatch.setattr("lockstep.strategies.multi_worker.attach_job", attach)
    monkeypatch.setattr("jax.process_count", lambda: 4)
    with pytest.raises(AttachedError):
        lockstep.MultiWorkerMirroredStrategy(devices=["cpu:0"])
