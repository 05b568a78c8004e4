"""State machine of the rendezvous, without sockets and with a simulated clock."""

import json
import socket
import threading
import time
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest

from lockstep.distributed.control.failure_detector import SuspendDetector
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.transport import FramedSocket, encode
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import LocalWorkers
from lockstep.launch.rank_assignment import RankAssignment
from lockstep.launch.rendezvous import RendezvousClient, RendezvousServer
from lockstep.launch.rendezvous_state import GenerationOutcome, NodeInfo, RendezvousState, identity_of
from lockstep.launch.restart_policy import RestartBudget

DONE, FAILED = GenerationOutcome(0, ""), GenerationOutcome(9, "worker 0 ended with exit code 9")
LOST = GenerationOutcome(75, "worker 1 ended with exit code 75", is_consequence=True)


class Rendezvous:
    """A rendezvous state, its time, and the last message to each node."""

    def __init__(self, nnodes=(1, 3), **options):
        least, most = nnodes
        limits = {"join_seconds": 10.0, "start_seconds": 100.0, "grace": 5.0, "max_restarts": 2}
        job = LaunchConfig(("a.py",), nodes=most, min_nodes=least, coordinator="h:500", **{**limits, **options})
        self.job, self.time = job, 0.0
        self.state, self.sent = RendezvousState(self.job, lambda: self.time), {}

    def join(self, key, rank=None, workers=1, host=None, port=500):
        node = NodeInfo(f"process {key}", rank, workers, host or f"host{key}", port, is_server=key == 0)
        self._deliver(self.state.add(key, node))

    def leave(self, key):
        self._deliver(self.state.remove(key, "its connection closed"))

    def ended(self, **outcomes):
        for key, outcome in outcomes.items():
            self._deliver(self.state.record(int(key[1:]), outcome))

    def wait(self, seconds):
        self.time += seconds
        self._deliver(self.state.advance())

    def assignments(self):
        """Generation, rank and number of nodes by key, of all whose last message is an assignment; the messages are cleared."""
        found = {key: message["assignment"] for key, message in self.sent.items() if message["kind"] == "start"}
        self.sent.clear()
        return {key: (place["generation"], place["node"], place["nodes"]) for key, place in found.items()}

    def ends(self):
        return {key: message["code"] for key, message in self.sent.items() if message["kind"] == "end"}

    def _deliver(self, messages):
        for to, message in messages:
            json.dumps(message)
            self.sent[to] = message


def test_all_start_as_soon_as_the_most_are_there():
    rendezvous = Rendezvous()
    rendezvous.join(0), rendezvous.join(1)
    assert rendezvous.assignments() == {}
    rendezvous.join(2)
    assert rendezvous.assignments() == {0: (0, 0, 3), 1: (0, 1, 3), 2: (0, 2, 3)}


def test_enough_start_after_the_time_to_join_which_begins_when_enough_are_there():
    rendezvous = Rendezvous((2, 3))
    rendezvous.join(0)
    rendezvous.wait(50)
    rendezvous.join(1)
    rendezvous.wait(9.9)
    assert rendezvous.assignments() == {}
    rendezvous.leave(1)
    rendezvous.wait(5)
    rendezvous.join(2)
    rendezvous.wait(9.9)
    assert rendezvous.assignments() == {}
    rendezvous.wait(0.1)
    assert rendezvous.assignments() == {0: (0, 0, 2), 2: (0, 1, 2)}


def test_ranks_are_those_that_are_said_then_the_order_of_coming_and_the_meeting_is_at_0():
    rendezvous = Rendezvous((4, 4))
    for key, rank in ((0, None), (1, None), (2, 3), (3, 1)):
        rendezvous.join(key, rank)
    assert rendezvous.assignments() == {0: (0, 0, 4), 3: (0, 1, 4), 2: (0, 2, 4), 1: (0, 3, 4)}


def test_who_is_too_many_waits_and_takes_the_place_of_one_that_is_lost():
    rendezvous = Rendezvous((1, 2))
    for key in range(3):
        rendezvous.join(key)
    assert rendezvous.assignments() == {0: (0, 0, 2), 1: (0, 1, 2)}
    assert rendezvous.state.describe_wait() == "node 0 (process 0) and node 1 (process 1) to end"
    rendezvous.leave(1)
    rendezvous.wait(1)
    assert rendezvous.sent == {
        0: {"kind": "stop_generation", "sentence": "node 1 (process 1): lost, its connection closed"}
    }
    rendezvous.ended(_0=LOST)
    rendezvous.wait(0.9)
    assert rendezvous.assignments() == {}
    rendezvous.wait(0.1)  # A pause, as before each restart.
    assert rendezvous.assignments() == {0: (1, 0, 2), 2: (1, 1, 2)}


def test_workers_have_addresses_of_their_own_where_nodes_share_a_machine():
    rendezvous = Rendezvous((3, 3))
    for key, workers, host in ((0, 2, "a"), (1, 1, "b"), (2, 2, "a")):
        rendezvous.join(key, workers=workers, host=host)
    place = rendezvous.sent[2]["assignment"]
    assert place["addresses"] == ("a:501", "a:502", "b:501", "a:503", "a:504")
    assert (place["first"], place["workers"], place["all_workers"], place["coordinator"]) == (3, 2, 5, "a:501")


def test_nodes_that_share_a_machine_without_ports_for_all_end_at_once():
    for port, ends in ((65531, {}), (65532, {0: 2, 1: 2})):
        rendezvous = Rendezvous((2, 2))
        for key in range(2):
            rendezvous.join(key, workers=2, host="a", port=port)
        assert rendezvous.ends() == ends
    assert {message["sentence"] for message in rendezvous.sent.values()} == {
        "process 1: expected 2 free ports from 65533 to 65535 for its workers, got 1: other nodes on a have the rest. "
        "Fix: give --coordinator or --hosts a lower port"
    }


def test_the_first_failure_counts_that_is_no_consequence():
    rendezvous = Rendezvous((3, 3), max_restarts=0)
    for key in range(3):
        rendezvous.join(key)
    rendezvous.ended(_0=LOST, _2=FAILED, _1=replace(FAILED, code=13))
    assert rendezvous.ends() == {0: 9, 1: 9, 2: 9}
    assert [rendezvous.sent[key]["sentence"] for key in (0, 2)] == [f"node 2 (process 2): {FAILED.sentence}", ""]


def test_the_pause_grows_and_restarts_are_counted_for_the_whole_job():
    rendezvous = Rendezvous((2, 2))
    rendezvous.join(0), rendezvous.join(1)
    for generation, pause in ((1, 1), (2, 2)):
        rendezvous.ended(_0=FAILED, _1=LOST)
        rendezvous.wait(pause - 0.1)
        assert rendezvous.sent[0]["kind"] == "generation_failed"
        rendezvous.wait(0.1)
        assert rendezvous.assignments() == {0: (generation, 0, 2), 1: (generation, 1, 2)}
    rendezvous.ended(_0=LOST, _1=FAILED)
    assert rendezvous.ends() == {0: 9, 1: 9}


def test_a_job_is_done_when_all_have_done_their_work():
    rendezvous = Rendezvous((2, 2))
    rendezvous.join(0), rendezvous.join(1)
    rendezvous.ended(_0=DONE)
    rendezvous.wait(10_000)
    assert rendezvous.ends() == {}
    rendezvous.ended(_1=DONE)
    assert rendezvous.ends() == {0: 0, 1: 0}


def test_who_does_not_end_in_time_is_left_out():
    rendezvous = Rendezvous((1, 2), start_seconds=3.0)
    rendezvous.join(0), rendezvous.join(1)
    rendezvous.ended(_0=FAILED)
    rendezvous.wait(1 + 5 + 14)
    assert rendezvous.sent[1]["kind"] == "stop_generation"
    rendezvous.wait(1)
    assert rendezvous.ends() == {1: 75}
    rendezvous.wait(1)
    rendezvous.wait(10)
    assert rendezvous.assignments() == {0: (1, 0, 1)}


def test_a_node_that_sends_nothing_is_given_up_by_name_and_the_others_are_not():
    rendezvous = Rendezvous((1, 3))
    for key in range(3):
        rendezvous.join(key)
    rendezvous.sent.clear()
    for _ in range(60):
        rendezvous.wait(1)
        rendezvous.state.hear(1)
    rendezvous.ended(_0=DONE, _1=DONE)
    assert not rendezvous.ends()
    rendezvous.wait(1)
    assert rendezvous.sent[2] == {
        "kind": "end",
        "code": 75,
        "sentence": "this node sent nothing for 60 s, and the job continues without it",
    }
    why = "restart 1 of 2 in 1 s or later: node 2 (process 2): lost, it sent nothing for 60 s (stopped, or cut off)"
    assert rendezvous.sent[0] == rendezvous.sent[1] == {"kind": "generation_failed", "sentence": why}
    assert sorted(rendezvous.state.nodes) == [0, 1]


def test_a_node_is_also_given_up_while_all_wait():
    rendezvous = Rendezvous((2, 3), join_seconds=1000.0, start_seconds=1000.0)
    for key in range(2):
        rendezvous.join(key)
    for _ in range(61):
        rendezvous.wait(1)
    assert sorted(rendezvous.state.nodes) == [0]


def test_no_node_is_given_up_for_a_pause_of_the_rendezvous_itself():
    rendezvous = Rendezvous((2, 2))
    for key in range(2):
        rendezvous.join(key)
    rendezvous.wait(1000)
    rendezvous.wait(1)
    assert sorted(rendezvous.state.nodes) == [0, 1]


def test_a_client_sends_a_heartbeat_each_second_and_none_into_a_full_connection():
    one, other = socket.socketpair()
    with one, other:
        time = iter([0.0, 0.4, 1.0, 2.0])
        client = RendezvousClient(FramedSocket(one), None, "node 0", None, None, print, clock=lambda: next(time))
        beats, received = FramedSocket(other), []
        for _ in range(3):
            client.send_heartbeat_if_due()
            received += beats.receive()
        assert received == [{"kind": "heartbeat"}] * 2
        client.connection.send(b"x" * 2**24)
        before = len(client.connection._unsent)
        client.send_heartbeat_if_due()
        assert len(client.connection._unsent) == before > 0


def run_workers(assignment, remote_stop, log):
    """Run workers that end when they are asked to, for a second at most; nothing else becomes ready meanwhile."""
    worker = Mock(code=None, failure=None, ended_at=0.0)
    worker.send = lambda number: setattr(worker, "code", -number)
    signals, stop_at = Mock(wait=lambda seconds, files: ([], set())), time.monotonic() + 1
    start = Mock(return_value=worker)
    workers = LocalWorkers(assignment.processes, start, RestartBudget(0), signals, 30, stop_at, set(), log, remote_stop)
    workers.run()
    return workers


def test_a_request_to_stop_that_comes_with_the_start_stops_the_workers():
    one, other = socket.socketpair()
    with one, other:
        client, server = RendezvousClient(FramedSocket(one), None, "node 0", None, None, str), FramedSocket(other)
        start = {"kind": "start", "assignment": asdict(RankAssignment(0, 1, 2, 1, 1, 2, "h:1", ("h:1", "i:1")))}
        for message in (start, {"kind": "stop_generation", "sentence": "node 0 failed"}):
            server.send(encode(message))
        generations = client.assignments()
        lines = []
        workers = run_workers(next(generations), client, lines.append)
        assert workers.code == 75
        assert not workers.timed_out
        assert lines == ["node 0 failed; the workers here have 30 s to exit."]
        server.send(encode(start))
        next(generations)
        assert client.read() is None


def test_the_server_of_this_node_cannot_be_silent_and_none_is_while_this_node_is_suspended():
    seconds = iter([0.0, 63.0])
    suspends = SuspendDetector(lambda: next(seconds))
    suspends.tick()
    client = RendezvousClient(Mock(), None, "node 0", None, None, print)
    suspends._clock = lambda: 63.0
    assert client._seconds_until_silent(suspends) == 60
    assert replace(client, server=Mock())._seconds_until_silent(suspends) == float("inf")


@pytest.mark.parametrize(
    ("server", "last", "code"), [(None, 0, 0), (Mock(), 0, 75), (Mock(), 9, 9), (Mock(), None, None)]
)
def test_node_0_does_not_end_well_before_the_others(server, last, code):
    client = RendezvousClient(Mock(), server, "node 0", None, None, print)
    client._last_code = last
    assert client._code_of_idle_node == code
    workers = Mock(code=0, was_asked_to_stop=True)
    client.record(workers)
    assert client.code == (75 if server else 0)


def test_too_few_end_in_time():
    rendezvous = Rendezvous((2, 3))
    rendezvous.join(0), rendezvous.join(1)
    rendezvous.wait(10)
    assert len(rendezvous.assignments()) == 2
    rendezvous.leave(1)
    rendezvous.ended(_0=LOST)
    rendezvous.join(2), rendezvous.leave(2)
    rendezvous.wait(99.9)
    assert rendezvous.ends() == {}
    assert rendezvous.state.describe_wait() == "1 more node (1 of 2:3 here)"
    rendezvous.wait(0.1)
    assert rendezvous.ends() == {0: 75}
    assert "expected at least 2 nodes within 100 s, got 1 (process 0)" in rendezvous.sent[0]["sentence"]
    for name in ("node 1 (process 1)", "process 2"):
        assert f" {name}: lost, its connection closed." in rendezvous.sent[0]["sentence"]


def test_who_leaves_with_all_work_done_is_no_failure():
    rendezvous = Rendezvous((2, 2))
    rendezvous.join(0), rendezvous.join(1)
    rendezvous.ended(_1=replace(DONE, leaves=True), _0=DONE)
    assert rendezvous.ends() == {0: 0}


@pytest.mark.parametrize(
    ("information", "identity", "why"),
    [
        (
            {},
            {},
            "process 7 is not a supervisor: this address is the rendezvous of lockstep run --nnodes MIN:MAX. Fix: start its script with",
        ),
        ({"rank": None, "host": "", "port": 1}, {"--grace": 9.0}, "process 7 was started with --grace 9.0"),
    ],
)
def test_who_does_not_belong_here_is_refused(information, identity, why):
    rendezvous = Rendezvous()
    peer = Peer(-1, 1, "b", 7, identity={**identity_of(rendezvous.job), **identity}, information=information)
    assert why in rendezvous.state.validate(peer).sentence


def test_who_comes_when_the_job_has_ended_is_of_the_next_one_and_tries_again():
    rendezvous = Rendezvous((2, 2))
    rendezvous.join(0), rendezvous.join(1)
    next_job = replace(rendezvous.job, grace=9.0)
    peer = Peer(-1, 1, "b", 7, identity=identity_of(next_job), information={"rank": 1, "host": "", "port": 1})
    assert not rendezvous.state.validate(peer).again
    rendezvous.ended(_0=DONE, _1=DONE)
    rejection = rendezvous.state.validate(peer)
    assert (rejection.sentence, rejection.again) == ("the job of node 0 is ending", True)


def test_nodes_that_are_heard_for_a_day_stay():
    rendezvous = Rendezvous((2, 2))
    rendezvous.join(0), rendezvous.join(1)
    assert len(rendezvous.assignments()) == 2
    for _ in range(24 * 2400):
        rendezvous.state.hear(1)
        rendezvous.wait(1.5)
    assert rendezvous.sent == {}
    assert list(rendezvous.state.nodes) == [0, 1]
    for _ in range(60):
        rendezvous.wait(1.5)
    assert rendezvous.ends()[1] == 75


def test_a_node_that_sends_nonsense_is_lost_and_the_server_goes_on():
    rendezvous = Rendezvous((2, 2))
    own = Peer(0, 1, "here", 1, information={"rank": 0, "host": "here", "port": 500})
    server = RendezvousServer(rendezvous.job, own, socket.create_server(("127.0.0.1", 0)), None, print)
    server_end, client_end = socket.socketpair()
    other = FramedSocket(client_end)
    server._loop.call(lambda: server._add(FramedSocket(server_end), NodeInfo("there", 1, 1, "there", 500)))
    other.send(
        encode(
            {"kind": "ended", "code": float("inf"), **dict.fromkeys(("is_consequence", "is_final", "leaves"), False)}
        )
    )
    while other.wait(10) is not None:
        pass
    other.close()
    answered = threading.Event()
    server._loop.call(answered.set)
    assert answered.wait(10)
    server.stop(75, "")
    server.connection.close()


def test_other_nodes_learn_why_node_0_ended_though_it_ends_before_its_message_is_read():
    job = Rendezvous((2, 2)).job
    own = Peer(0, 1, "here", 1, information={"rank": 0, "host": "here", "port": 500})
    server = RendezvousServer(job, own, socket.create_server(("127.0.0.1", 0)), None, print)
    server_end, client_end = socket.socketpair()
    other = FramedSocket(client_end)
    ended = encode({"kind": "ended", **asdict(GenerationOutcome(143, "it was asked to stop", False, True, True))})

    def end():  # In the loop, which reads nothing meanwhile.
        server._add(FramedSocket(server_end), NodeInfo("there", 1, 1, "there", 500))
        server.connection.send(ended)
        server._finish(75, "it has ended")

    server._loop.call(end)
    received = iter(lambda: other.wait(10), None)
    end_message = next(message for message in received if message["kind"] == "end")
    other.close()
    server.stop(75, "")
    server.connection.close()
    assert end_message == {"kind": "end", "code": 143, "sentence": "node 0 (here, process 1): it was asked to stop"}
