"""How workers meet, and why they may not; workers are threads of this process."""

import errno
import os
import socket
import threading
import time

import pytest

from lockstep import ClusterError, OptionError
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control import handshake
from lockstep.distributed.control.connect import open_control_channel
from lockstep.distributed.control.handshake import PROTOCOL, Peer, hello, join_request, open_listener
from lockstep.distributed.control.transport import FramedSocket, encode
from tests.distributed.threaded_job import ThreadedJob, listening
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.waits

ME = f"{socket.gethostname()}, process {os.getpid()}"


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    deadline = time.monotonic() + DEADLINE
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-c"):
            thread.join(deadline - time.monotonic())
            assert not thread.is_alive()


def sentences(job):
    """Of the errors of all workers, one for each different one."""
    assert all(isinstance(error, ClusterError) for error in job.errors.values()), job.errors
    return {str(error) for error in job.errors.values()}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_meet_and_know_each_other(workers):
    with ThreadedJob(workers, generation=3) as job:
        assert job.errors == {}
        for session in job.sessions.values():
            assert [peer.index for peer in session.peers] == list(range(workers))
            assert {(peer.host, peer.pid) for peer in session.peers} == {(socket.gethostname(), os.getpid())}
            assert session.peers[0].generation == 3
        assert job.lines == [[]] * workers


def test_a_job_of_one_worker_uses_no_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = WorkerGroup(workers=1, index=0, coordinator=f"127.0.0.1:{taken.getsockname()[1]}")
        session = open_control_channel(group, {})
        assert session.gather("rows", 7) == [7]
        session.leave()


def test_a_worker_with_another_identity_is_named_to_all():
    def each(index):
        return {"identity": {"jax": "0.10.2", "script": {"digest": "abc" if index == 2 else "abd"}}}

    with ThreadedJob(3, each) as job:
        assert len(job.errors) == 3
        assert sentences(job) == {
            f"""worker 2 of 3 ({ME}) differs from the chief ({ME}) in 'script.digest': it has "abc", the chief "abd". """
            "Fix: give all workers the same."
        }


@pytest.mark.slow
def test_two_workers_with_one_index_are_named_to_all():
    job = ThreadedJob(3)
    job.each = lambda index: {"group": WorkerGroup(workers=3, index=min(index, 1), coordinator=job.coordinator)}
    with job:
        assert len(job.errors) == 3
        assert sentences(job) == {
            f"Two processes say that they are worker 1 of 3: {ME} and {ME}. Fix: start each worker once, with its own index."
        }


def test_a_worker_with_another_count_is_named_to_all():
    job = ThreadedJob(3)
    job.each = lambda index: {
        "group": WorkerGroup(workers=2 if index == 0 else 3, index=index, coordinator=job.coordinator)
    }
    with job:
        assert len(job.errors) == 3
        (sentence,) = sentences(job)
        assert f"of 3 ({ME}) was started with 3 workers, the chief ({ME}) with 2 workers. Fix: start all" in sentence


@pytest.mark.slow
def test_a_worker_with_an_absurd_count_costs_neither_memory_nor_time():
    job = ThreadedJob(2, missing=(1,))
    host, port = job.coordinator.split(":")
    connection = FramedSocket(socket.create_connection((host, int(port)), timeout=DEADLINE))
    connection.send(hello("x") + join_request(Peer(1, 10**18, "b", 7)))
    with job:
        assert "was started with 1000000000000000000 workers" in str(job.errors[0])
    connection.close()


def test_what_is_sent_of_a_worker_must_be_json():
    with pytest.raises(OptionError, match="Only values of JSON"):
        open_control_channel(WorkerGroup(workers=1, index=0, coordinator="localhost:12421"), {"model": object()})
    with pytest.raises(OptionError, match="too many"):
        open_control_channel(WorkerGroup(workers=1, index=0, coordinator="localhost:12421"), {"model": "x" * 100_000})


@pytest.mark.slow
def test_the_missing_are_named_by_all_with_their_addresses_in_time():
    job = ThreadedJob(4, missing=(1, 3), timeout_seconds=4)
    addresses = (job.coordinator, "127.0.0.2:12421", "127.0.0.3:12421", "127.0.0.4:12421")
    job.each = lambda index: {
        "group": WorkerGroup(workers=4, index=index, coordinator=job.coordinator, addresses=addresses)
    }
    began = time.monotonic()
    with job:
        assert sentences(job) == {
            f"worker 1 of 4 (127.0.0.2:12421) and worker 3 of 4 (127.0.0.4:12421) did not join within 4 s. Fix: check that they are "
            f"started, and can reach {job.coordinator}."
        }
        assert {error.exit_code for error in job.errors.values()} == {75}
    assert time.monotonic() - began > 4


@pytest.mark.slow
def test_a_worker_that_may_be_on_another_machine_is_told_how_to_reach_the_chief():
    with ThreadedJob(2, missing=(1,), timeout_seconds=1.5) as job:
        assert "did not join within 1.5 s" in str(job.errors[0])
        # Its workers may be on other machines, as their addresses are not known.
        assert str(job.errors[0]).endswith(
            f"Fix: check that it is started, and can reach {job.coordinator}. Other machines cannot reach it: give lockstep run --coordinator host:port, or else set "
            "LOCKSTEP_COORDINATOR=host:port on each worker."
        )


@pytest.mark.slow
def test_a_worker_that_comes_late_is_waited_for_visibly():
    job = ThreadedJob(3, timeout_seconds=DEADLINE)
    *present, late = job._threads
    for thread in present:
        thread.start()
    wait_until(lambda: all(_waits_for_worker_2(lines) for lines in job.lines[:2]), "lines of both that name the third")
    late.start()
    for thread in (*present, late):
        thread.join(DEADLINE)
    assert job.errors == {}
    for lines in job.lines[:2]:
        assert lines[-1].startswith("all 3 workers are here after ")
    job.__exit__()


def _waits_for_worker_2(lines):
    return any(line.startswith("waiting for worker 2 of 3, ") for line in list(lines))


# Less deep than Python's limit, and deeper than what compares identities can follow.
NESTED = '{"index":1,"workers":2,"host":"b","pid":7,"generation":0,"information":{},"identity":' + '{"a":' * 984 + "1"
NESTED += "}" * 985


@pytest.mark.parametrize(
    ("speaks", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "it sent what is no message"),
        (b"\x00" * 100, "it sent what is no message"),
        (encode({"kind": "heartbeat", "step": 1, "activity": "step", "seconds": 0}), "it began with 'heartbeat'"),
        (join_request(Peer(1, 2, "b", 7)), "it began with 'join'"),
        (hello("") + hello(""), "it sent no nonce"),
        (encode({"kind": "hello", "protocol": 0, "nonce": "x"}), f"it speaks protocol 0, this process {PROTOCOL}"),
        (hello("x") + encode({"kind": "join", "peer": {"index": 1}}), "it sent an invalid peer description"),
        (hello("x") + encode({"kind": "join", "peer": None}), "it sent an invalid peer description"),
        (hello("\ud800") + encode({"kind": "join", "peer": 1}), "it sent an invalid peer description"),
        pytest.param(
            hello("x") + encode({"kind": "join", "proof": None, "peer": NESTED}),
            "it sent an invalid peer description",
            id="nested",
        ),
        (b"", "its connection closed"),
    ],
)
def test_who_is_no_worker_is_turned_away_and_harms_nothing(speaks, reason):
    job = ThreadedJob(2)
    host, port = job.coordinator.split(":")
    chief, worker = job._threads
    chief.start()
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as stranger:
        stranger.sendall(speaks)
        if not speaks:
            stranger.shutdown(socket.SHUT_WR)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:  # It did not read all that was sent.
            pass
    worker.start()
    for thread in (chief, worker):
        thread.join(DEADLINE)
    assert job.errors == {}
    assert [reason in line for line in job.lines[0]] == [True], job.lines[0]
    assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2
    job.__exit__()


@pytest.mark.slow
def test_many_strangers_do_not_fill_the_log():
    job = ThreadedJob(2, missing=(1,), timeout_seconds=1.5)
    host, port = job.coordinator.split(":")
    for number in range(20):
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as stranger:
            stranger.sendall(f"GET /{number} HTTP/1.1".encode())
    with job:
        assert len(job.lines[0]) == 3


@pytest.mark.slow
def test_who_says_nothing_is_turned_away_and_delays_nobody():
    job = ThreadedJob(2)
    host, port = job.coordinator.split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as silent:
        with job:
            assert job.lines[0] == []  # All have joined, and it is still heard out.
            assert job.errors == {}
            connection = FramedSocket(silent)
            assert connection.wait(DEADLINE)["sentence"].endswith("sent nothing for 5 s")
            assert (connection.wait(DEADLINE), connection.ended) == (None, "its connection closed")
        assert "it sent nothing for 5 s" in job.lines[0][0]


def test_a_worker_that_goes_away_before_the_start_is_named_to_the_others():
    job = ThreadedJob(3, missing=(2,))
    host, port = job.coordinator.split(":")

    def come_and_go():
        connection = FramedSocket(socket.create_connection((host, int(port)), timeout=DEADLINE))
        connection.send(hello("x"))
        assert connection.wait(DEADLINE)["kind"] == "challenge"
        connection.send(join_request(Peer(2, 3, "node2", 77, identity={"jax": "1"})))
        while connection.wait(DEADLINE)["missing"]["start"]["names"] != ["worker 1 of 3"]:
            pass
        connection.close()

    chief, worker = job._threads
    chief.start()
    come_and_go()
    worker.start()
    for thread in (chief, worker):
        thread.join(DEADLINE)
    assert sentences(job) == {
        "worker 2 of 3 (node2, process 77) went away before all workers had joined: its connection closed. Fix: see the end of its output."
    }
    job.__exit__()


@pytest.mark.slow
def test_a_late_duplicate_waits_for_the_end_of_the_first_and_harms_nothing():
    """The first may be of a machine that was reset, whose connection is not closed yet."""
    with ThreadedJob(2) as job:
        said = "was not met within 1.5 s: Two processes say that they are worker 1 of 2"
        with pytest.raises(ClusterError, match=said) as raised:
            open_control_channel(**{**job.arguments(1), "timeout_seconds": 1.5})
        assert raised.value.exit_code == 75
        assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2
        assert job.failures == [[], []]


def test_a_leftover_of_an_earlier_start_is_refused_and_harms_nothing():
    job = ThreadedJob(2, lambda index: {"generation": 1})
    with job:
        with pytest.raises(ClusterError, match="is left over from start 0 of the job"):
            open_control_channel(**{**job.arguments(1), "generation": 0})
        assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2


@pytest.mark.slow
def test_a_worker_of_a_later_start_waits_for_its_own_chief():
    with (
        ThreadedJob(2) as job,
        pytest.raises(ClusterError, match=r"was not met within 1.5 s: .* an earlier chief still runs"),
    ):
        open_control_channel(**{**job.arguments(1), "generation": 1, "timeout_seconds": 1.5})


@pytest.mark.slow
def test_a_worker_waits_for_the_next_chief_while_that_of_a_failed_job_ends():
    with ThreadedJob(2) as job:
        job.sessions[1]._send({"kind": "heartbeat", "step": "none"})  # It counts as dead.
        wait_until(lambda: job.failures[0], "a failure on worker 0")
        with pytest.raises(ClusterError, match=r"was not met within 1.5 s: .* has failed and ends"):
            open_control_channel(**{**job.arguments(1), "timeout_seconds": 1.5})


def until_told(job, reason):
    """The job, for which the time to start is over as soon as its chief has logged the reason."""
    job.options["clock"] = lambda: time.monotonic() + 2 * DEADLINE * any(reason in line for line in job.lines[0])
    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chief", "worker", "said"),
    [
        (b"one", b"two", "it and this process were given different secrets"),
        (b"one", None, "it asks for a secret that this process was not given"),
        (None, b"two", "it was given no secret, this process was"),
    ],
)
def test_who_does_not_know_the_secret_stays_outside(chief, worker, said):
    job = ThreadedJob(
        2, lambda index: {"network": NetworkOptions(worker if index else chief)}, timeout_seconds=DEADLINE
    )
    with until_told(job, "it was given another secret"):
        assert said in str(job.errors[1])
        assert str(job.errors[0]).startswith("worker 1 of 2 did not join within 60 s")
        assert "was turned away: it was given another secret than this process, or one of them none." in str(
            job.errors[0]
        )


@pytest.mark.parametrize("given", ["0" * 64, "\ud800", None, 7])
def test_who_only_says_that_he_knows_the_secret_stays_outside(given):
    job = ThreadedJob(2, network=NetworkOptions(b"one"), missing=(1,), timeout_seconds=DEADLINE)
    host, port = job.coordinator.split(":")
    connection = FramedSocket(socket.create_connection((host, int(port)), timeout=DEADLINE))
    connection.send(hello("x") + join_request(Peer(1, 2, "b", 7, identity={"jax": "1"}), given))
    with until_told(job, "it does not know the secret"):
        assert "was turned away: it does not know the secret of this job." in str(job.errors[0])
    connection.close()


def test_workers_who_know_the_secret_meet():
    with ThreadedJob(3, network=NetworkOptions(b"one")) as job:
        assert job.errors == {}


@pytest.mark.slow
def test_a_port_in_use_is_named_and_by_whom():
    with ThreadedJob(2) as job:
        with pytest.raises(ClusterError) as caught:
            open_control_channel(**{**job.arguments(0), "listener": None})
        port = job.coordinator.split(":")[1]
        assert f"cannot listen on port {port} of 127.0.0.1: another Lockstep job uses it. Fix: end that" in str(
            caught.value
        )
        assert "another port, where this one comes from: TF_CONFIG, --hosts, --coordinator or LOCKSTEP_PORT." in str(
            caught.value
        )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} of 127.0.0.1: something that is no Lockstep job uses it"):
            open_control_channel(WorkerGroup(workers=2, index=0, coordinator=f"127.0.0.1:{port}"), {})


@pytest.mark.slow
def test_what_answers_without_being_a_chief_is_named():
    silent, address = listening()
    with silent, pytest.raises(ClusterError, match="no process of a Lockstep job: it says nothing"):
        open_control_channel(WorkerGroup(workers=2, index=1, coordinator=address), {}, timeout_seconds=1.5, log=str)
    talker, address = listening()

    def answer():
        accepted, _ = talker.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        talker.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    tries = []
    with pytest.raises(ClusterError, match=r"worker 0 of 2, the chief at .*, was not met within 1.5 s"):
        open_control_channel(
            WorkerGroup(workers=2, index=1, coordinator=address),
            {},
            timeout_seconds=1.5,
            log=str,
            sleep=tries.append,
        )
    thread.join(DEADLINE)
    assert tries


@pytest.mark.slow
def test_a_chief_that_says_nothing_more_is_waited_for_until_the_limit():
    chief, address = listening()
    done = threading.Event()

    def challenge():
        accepted, _ = chief.accept()
        connection = FramedSocket(accepted)
        while connection.wait(DEADLINE) is None:
            pass
        connection.send(encode({"kind": "challenge", "protocol": PROTOCOL, "nonce": "n", "proof": None}))
        done.wait(DEADLINE)
        connection.close()

    thread = threading.Thread(target=challenge, daemon=True)
    thread.start()
    with chief, pytest.raises(ClusterError, match=r"went away before all had joined: it sent nothing for 1.5 s"):
        open_control_channel(WorkerGroup(workers=2, index=1, coordinator=address), {}, timeout_seconds=1.5, log=str)
    done.set()
    thread.join(DEADLINE)


def test_a_host_that_is_unknown_is_tried_until_the_limit():
    with pytest.raises(ClusterError, match=r"was not met within 1.5 s: .*\bknown"):
        open_control_channel(
            WorkerGroup(workers=2, index=1, coordinator="no-such-host.invalid:12421"),
            {},
            timeout_seconds=1.5,
            network=NetworkOptions(b"known"),
        )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_the_chief_listens_where_the_others_look_for_it(host):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open_listener(f"{host}:{port}", NetworkOptions(b"known"), str) as listener:
        assert (listener.getsockname()[0] == "127.0.0.1") == (host != socket.gethostname())
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE).close()


def test_an_address_of_another_machine_is_said_and_all_are_listened_on():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = []
    with open_listener(f"192.0.2.1:{port}", NetworkOptions(b"known"), lines.append):
        assert lines == [
            f"192.0.2.1 is no address of this machine: the chief listens on port {port} of all its addresses"
        ]
    with pytest.raises(ClusterError, match=f"cannot listen on port {port} of 192.0.2.1 .LOCKSTEP_BIND."):
        open_listener(f"127.0.0.1:{port}", NetworkOptions(b"known", bind_host="192.0.2.1"), lines.append)


def test_a_missing_loopback_address_does_not_open_the_port_to_other_machines(monkeypatch):
    def fail(host, port):
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(handshake, "_listen", fail)
    with pytest.raises(ClusterError, match=r"cannot listen on port 12421 of ::1: "):
        open_listener("[::1]:12421", NetworkOptions(), str)
