"""Which workers may join; messages name the worker, the entry and both values."""

import pytest

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.admission import Admission
from lockstep.distributed.control.handshake import Peer


def a_peer(index, workers=3, **more):
    return Peer(**{"index": index, "workers": workers, "host": f"node{index}", "pid": 70 + index, **more})


def an_admission(chief=None):
    group = WorkerGroup(
        workers=3, index=0, coordinator="node0:12421", addresses=("node0:12421", "node1:12421", "node2:12421")
    )
    return Admission(group, chief or a_peer(0, identity={"jax": "0.10.2", "options": {"rows": 64}}, generation=2))


SAME = {"identity": {"jax": "0.10.2", "options": {"rows": 64}}, "generation": 2}


def test_who_is_like_the_chief_may_join():
    assert an_admission().validate(a_peer(1, **SAME)) is None


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
    refusal = an_admission().validate(peer)
    assert sentence in refusal.sentence
    assert refusal.everyone


def test_nobody_who_comes_late_harms_a_job_that_is_complete():
    admission = an_admission()
    admission.peers |= {1: a_peer(1), 2: a_peer(2)}
    for late in (a_peer(1, pid=99, **SAME), a_peer(1, workers=2, **SAME), a_peer(7, **SAME)):
        refusal = admission.validate(late)
        assert refusal.sentence
        assert not refusal.everyone


def test_another_start_of_the_job_is_told_apart():
    older = an_admission().validate(a_peer(1, generation=1, identity={}))
    assert (
        "is left over from start 1 of the job, the chief (node0, process 70) is of start 2. Fix: end it."
        in older.sentence
    )
    assert not older.everyone
    assert not older.again
    newer = an_admission().validate(a_peer(1, generation=3))
    assert "an earlier chief still runs" in newer.sentence
    assert newer.again
    assert not newer.everyone


def test_the_missing_are_named_with_their_addresses():
    assert an_admission().missing() == ["worker 1 of 3 (node1:12421)", "worker 2 of 3 (node2:12421)"]


def test_only_some_of_many_missing_workers_are_named():
    missing = Admission(
        WorkerGroup(workers=1024, index=0, coordinator="node0:12421"), a_peer(0, workers=1024)
    ).missing()
    assert missing == [*(f"worker {index} of 1024" for index in range(1, 9)), "1015 more"]
