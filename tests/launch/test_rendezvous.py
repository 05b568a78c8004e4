"""What the meeting of the nodes decides, without sockets and with a clock of its own."""

import json
from dataclasses import replace

import pytest

from lockstep.distributed.control.peer import Peer
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rendezvous.node_messages import GenerationOutcome, JobSpec, NodeInfo
from lockstep.launch.rendezvous.rendezvous_state import RendezvousState

DONE, FAILED = GenerationOutcome(0, ""), GenerationOutcome(9, "worker 0 ended with exit code 9")
LOST = GenerationOutcome(75, "worker 1 ended with exit code 75", is_consequence=True)


class Meeting:
    """An assembly, its time, and what each node was told last."""

    def __init__(self, nnodes=(1, 3), **options):
        least, most = nnodes
        limits = {"join_seconds": 10.0, "start_seconds": 100.0, "grace": 5.0, "max_restarts": 2}
        job = LaunchConfig(("a.py",), nodes=most, least_nodes=least, coordinator="h:500", **{**limits, **options})
        self.terms, self.time = JobSpec.of(job), 0.0
        self.assembly, self.told = RendezvousState(self.terms, lambda: self.time), {}

    def come(self, key, rank=None, workers=1, host=None):
        node = NodeInfo(f"process {key}", rank, workers, host or f"host{key}", 500, is_host=key == 0)
        self._take(self.assembly.come(key, node))

    def go(self, key):
        self._take(self.assembly.go(key, "its connection closed"))

    def ended(self, **outcomes):
        for key, outcome in outcomes.items():
            self._take(self.assembly.note(int(key[1:]), outcome))

    def wait(self, seconds):
        self.time += seconds
        self._take(self.assembly.step())

    def places(self):
        """Key to number of generation, rank and number of nodes, of all whose last word was a place; it is forgotten then."""
        found = {key: said["place"] for key, said in self.told.items() if said["kind"] == "start"}
        self.told.clear()
        return {key: (place["generation"], place["node"], place["nodes"]) for key, place in found.items()}

    def ends(self):
        return {key: said["code"] for key, said in self.told.items() if said["kind"] == "end"}

    def _take(self, said):
        for one in said:
            json.dumps(one.message)
            self.told[one.to] = one.message


def test_all_start_as_soon_as_the_most_are_there():
    meeting = Meeting()
    meeting.come(0), meeting.come(1)
    assert meeting.places() == {}
    meeting.come(2)
    assert meeting.places() == {0: (0, 0, 3), 1: (0, 1, 3), 2: (0, 2, 3)}


def test_enough_start_after_the_time_to_join_which_begins_when_enough_are_there():
    meeting = Meeting((2, 3))
    meeting.come(0)
    meeting.wait(50)
    meeting.come(1)
    meeting.wait(9.9)
    assert meeting.places() == {}
    meeting.go(1)
    meeting.wait(5)
    meeting.come(2)
    meeting.wait(9.9)
    assert meeting.places() == {}
    meeting.wait(0.1)
    assert meeting.places() == {0: (0, 0, 2), 2: (0, 1, 2)}


def test_ranks_are_those_that_are_said_then_the_order_of_coming_and_the_meeting_is_at_0():
    meeting = Meeting((4, 4))
    for key, rank in ((0, None), (1, None), (2, 3), (3, 1)):
        meeting.come(key, rank)
    assert meeting.places() == {0: (0, 0, 4), 3: (0, 1, 4), 2: (0, 2, 4), 1: (0, 3, 4)}


def test_who_is_too_many_waits_and_takes_the_place_of_one_that_is_lost():
    meeting = Meeting((1, 2))
    for key in range(3):
        meeting.come(key)
    assert meeting.places() == {0: (0, 0, 2), 1: (0, 1, 2)}
    assert meeting.assembly.waits_for() == "node 0 (process 0) and node 1 (process 1) to end"
    meeting.go(1)
    meeting.wait(1)
    assert meeting.told == {0: {"kind": "call off", "sentence": "node 1 (process 1): lost, its connection closed"}}
    meeting.ended(_0=LOST)
    meeting.wait(0.9)
    assert meeting.places() == {}
    meeting.wait(0.1)  # A pause, as before each restart.
    assert meeting.places() == {0: (1, 0, 2), 2: (1, 1, 2)}


def test_workers_have_addresses_of_their_own_where_nodes_share_a_machine():
    meeting = Meeting((3, 3))
    for key, workers, host in ((0, 2, "a"), (1, 1, "b"), (2, 2, "a")):
        meeting.come(key, workers=workers, host=host)
    place = meeting.told[2]["place"]
    assert place["addresses"] == ("a:501", "a:502", "b:501", "a:503", "a:504")
    assert (place["first"], place["workers"], place["all_workers"], place["meeting"]) == (3, 2, 5, "a:501")


def test_the_first_failure_counts_that_is_no_consequence():
    meeting = Meeting((3, 3), max_restarts=0)
    for key in range(3):
        meeting.come(key)
    meeting.ended(_0=LOST, _2=FAILED, _1=replace(FAILED, code=13))
    assert meeting.ends() == {0: 9, 1: 9, 2: 9}
    assert [meeting.told[key]["sentence"] for key in (0, 2)] == [f"node 2 (process 2): {FAILED.sentence}", ""]


def test_the_pause_grows_and_restarts_are_counted_for_the_whole_job():
    meeting = Meeting((2, 2))
    meeting.come(0), meeting.come(1)
    for generation, pause in ((1, 1), (2, 2)):
        meeting.ended(_0=FAILED, _1=LOST)
        meeting.wait(pause - 0.1)
        assert meeting.told[0]["kind"] == "again"
        meeting.wait(0.1)
        assert meeting.places() == {0: (generation, 0, 2), 1: (generation, 1, 2)}
    meeting.ended(_0=LOST, _1=FAILED)
    assert meeting.ends() == {0: 9, 1: 9}
    meeting.come(2)
    assert meeting.ends() == {0: 9, 1: 9, 2: 9}


def test_a_job_is_done_when_all_have_done_their_work():
    meeting = Meeting((2, 2))
    meeting.come(0), meeting.come(1)
    meeting.ended(_0=DONE)
    meeting.wait(10_000)
    assert meeting.ends() == {}
    meeting.ended(_1=DONE)
    assert meeting.ends() == {0: 0, 1: 0}


def test_who_does_not_end_in_time_is_left_out():
    meeting = Meeting((1, 2), start_seconds=3.0)
    meeting.come(0), meeting.come(1)
    meeting.ended(_0=FAILED)
    meeting.wait(1 + 5 + 14)
    assert meeting.told[1]["kind"] == "call off"
    meeting.wait(1)
    assert meeting.ends() == {1: 75}
    meeting.wait(1)
    meeting.wait(10)
    assert meeting.places() == {0: (1, 0, 1)}


def test_too_few_end_in_time():
    meeting = Meeting((2, 3))
    meeting.come(0), meeting.come(1)
    meeting.wait(10)
    assert len(meeting.places()) == 2
    meeting.go(1)
    meeting.ended(_0=LOST)
    meeting.come(2), meeting.go(2)
    meeting.wait(99.9)
    assert meeting.ends() == {}
    assert meeting.assembly.waits_for() == "1 more node (1 of 2:3 here)"
    meeting.wait(0.1)
    assert meeting.ends() == {0: 75}
    assert "1 of at least 2 nodes came within 100 s (process 0)" in meeting.told[0]["sentence"]
    for name in ("node 1 (process 1)", "process 2"):
        assert f" {name}: lost, its connection closed." in meeting.told[0]["sentence"]


def test_who_leaves_with_all_work_done_is_no_failure():
    meeting = Meeting((2, 2))
    meeting.come(0), meeting.come(1)
    meeting.ended(_1=replace(DONE, leaves=True), _0=DONE)
    assert meeting.ends() == {0: 0}


@pytest.mark.parametrize(
    ("information", "identity", "why"),
    [
        (
            {},
            {},
            "process 7 is no supervisor: this is where those of lockstep run --nnodes MIN:MAX meet. Start its script with",
        ),
        ({"rank": None, "host": "", "port": 1}, {"--grace": 9.0}, "process 7 was started with --grace 9.0"),
    ],
)
def test_who_does_not_belong_here_is_refused(information, identity, why):
    meeting = Meeting()
    peer = Peer(-1, 1, "b", 7, identity={**meeting.terms.as_identity(), **identity}, information=information)
    assert why in meeting.assembly.judge(peer).sentence
