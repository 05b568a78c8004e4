"""Who may join, and who differs in what: sentences that name the worker, the entry and both values."""

import pytest

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.admission import Admission, digest, find_disagreement, first_difference
from lockstep.distributed.control.handshake import Peer

NAMES = ["worker 0", "worker 1", "worker 2", "worker 3"]
NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ([1, NAN], [1, NAN], None),
        (1, 2, ("", "1", "2")),
        ({"a": 1}, {"a": 1, "b": 2}, ("b", "nothing", "2")),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ("a.b.c", "1", "2")),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a", "[1, 2]", "[2, 1]")),
        ({"a": 1}, {"a": True}, ("a", "1", "true")),
        ({"a": None}, {}, ("a", "null", "nothing")),
    ],
)
def test_the_first_difference_is_found(left, right, found):
    assert first_difference(left, right) == found


def test_a_long_value_is_cut_in_the_sentence():
    _, here, _ = first_difference("x" * 1000, "y")
    assert len(here) < 250


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1, 1, 1, 1], None),
        (
            [{"lr": 1}, {"lr": 2}],
            "The workers do not agree on 'options': worker 1 differs in 'lr': it has 2, worker 0 has 1.",
        ),
        ([2, 1, 1, 1], "The workers do not agree on 'options': worker 0 differs: it has 2, the others have 1."),
        (
            [1, 2, 1, 3],
            "The workers do not agree on 'options': worker 1 and worker 3 differ: worker 1 has 2, worker 0 has 1.",
        ),
        (
            [2, 1, 1, 1, 3],
            "The workers do not agree on 'options': worker 0 and worker 4 differ: worker 0 has 2, the others have 1.",
        ),
    ],
)
def test_who_differs_from_the_most_or_from_the_chief_is_named(values, sentence):
    found = find_disagreement(values)
    assert (found and found.sentence("options", values, [*NAMES, "worker 4"])) == sentence


def test_equal_values_have_equal_digests():
    assert digest({"a": 1, "b": [NAN]}) == digest({"b": [NAN], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.0})


def a_peer(index, workers=3, **more):
    return Peer(**{"index": index, "workers": workers, "host": f"node{index}", "pid": 70 + index, **more})


def a_roster(chief=None):
    group = WorkerGroup(
        workers=3, index=0, coordinator="node0:12421", addresses=("node0:12421", "node1:12421", "node2:12421")
    )
    return Admission(group, chief or a_peer(0, identity={"jax": "0.10.2", "options": {"rows": 64}}, generation=2))


SAME = {"identity": {"jax": "0.10.2", "options": {"rows": 64}}, "generation": 2}


def test_who_is_like_the_chief_may_join():
    assert a_roster().validate(a_peer(1, **SAME)) is None


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [
        (
            a_peer(1, workers=2, **SAME),
            "worker 1 of 2 (node1, process 71) was started with 2 workers, the chief (node0, process 70) with 3 workers",
        ),
        (a_peer(3, **SAME), "worker 3 of 3 (node3, process 73) has no place: the indices of 3 workers are 0 to 2"),
        (a_peer(-1, **SAME), "the indices of 3 workers are 0 to 2"),
        (
            a_peer(0, pid=99, **SAME),
            "Two processes say that they are worker 0 of 3: node0, process 70 and node0, process 99",
        ),
        (
            a_peer(2, generation=2, identity={"jax": "0.10.1", "options": {"rows": 64}}),
            """worker 2 of 3 (node2, process 72) differs from the chief (node0, process 70) in 'jax': it has "0.10.1", """
            """the chief "0.10.2".""",
        ),
        (
            a_peer(2, generation=2, identity={"jax": "0.10.2", "options": {"rows": 32}}),
            "in 'options.rows': it has 32, the chief 64.",
        ),
    ],
)
def test_a_job_that_was_started_wrongly_does_not_start(peer, sentence):
    refusal = a_roster().validate(peer)
    assert sentence in refusal.sentence
    assert refusal.everyone


def test_nobody_who_comes_late_harms_a_job_that_is_complete():
    roster = a_roster()
    roster.peers |= {1: a_peer(1), 2: a_peer(2)}
    for late in (a_peer(1, pid=99, **SAME), a_peer(1, workers=2, **SAME), a_peer(7, **SAME)):
        refusal = roster.validate(late)
        assert refusal.sentence
        assert not refusal.everyone


def test_another_start_of_the_job_is_told_apart():
    older = a_roster().validate(a_peer(1, generation=1, identity={}))
    assert (
        "is left over from start 1 of the job, the chief (node0, process 70) is of start 2: end it." in older.sentence
    )
    assert not older.everyone
    assert not older.again
    newer = a_roster().validate(a_peer(1, generation=3))
    assert "an earlier chief still runs" in newer.sentence
    assert newer.again
    assert not newer.everyone


def test_the_missing_are_named_with_their_addresses():
    assert a_roster().missing() == ["worker 1 of 3 (node1:12421)", "worker 2 of 3 (node2:12421)"]
