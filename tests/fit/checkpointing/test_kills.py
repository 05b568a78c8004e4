"""Law 3 by real processes: killed anywhere, again and again, a training ends with the bits of one that nothing happened to.

Each test is a chain: every attempt goes on where the one before was killed, and the last one comes to the end.
"""

import pytest

pytestmark = pytest.mark.xdist_group(__name__)

ONE, OTHER, BOTH = (0,), (1,), (0, 1)  # workers

# Where, at which time that the process comes by, and which of two workers; the chief alone writes.
KILLS = [
    ("training begins", 1, BOTH),
    ("a step begins", 1, OTHER),
    ("a step runs", 2, ONE),
    ("the arrays are written", 2, ONE),
    ("a step runs", 1, OTHER),
    ("before it has its name", 1, ONE),
    ("between rename and cleanup", 1, ONE),
    ("validation", 1, OTHER),
    ("an epoch ends", 1, ONE),
    ("before an old one goes", 1, ONE),
    ("an old one is deleted", 1, ONE),
    ("a step has ended", 1, BOTH),
    ("an epoch ends", 1, OTHER),
    ("validation", 1, BOTH),
    ("training ends", 1, ONE),
    ("fit has returned", 1, BOTH),
]
# Every day each place once: with one process where only the chief comes by.
OF_THE_CHIEF = [
    ("the arrays are written", 2, ONE),
    ("a step runs", 1, ONE),
    ("before it has its name", 1, ONE),
    ("between rename and cleanup", 1, ONE),
    ("an epoch ends", 1, ONE),
    ("before an old one goes", 1, ONE),
    ("an old one is deleted", 1, ONE),
]
OF_BOTH = [
    ("training begins", 1, BOTH),
    ("a step begins", 1, OTHER),
    ("a step runs", 2, ONE),
    ("validation", 1, OTHER),
    ("a step has ended", 1, BOTH),
    ("training ends", 1, ONE),
    ("fit has returned", 1, BOTH),
]
NOT_ONLY_ONE = [kill for kill in KILLS if kill[2] != ONE]


def go_through(run, kills):
    for at, nth, workers in kills:
        run.killed(at, nth, workers if run.workers > 1 else ONE)


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param({"net": "cnn"}, OF_THE_CHIEF, id="quick"),
        *(
            pytest.param(kind, kills, id=name, marks=[mark, pytest.mark.timeout(900)])
            for name, kind, kills, mark in (
                ("mlp 2, thinned", {"net": "mlp", "workers": 2}, OF_BOTH, pytest.mark.slow),
                ("mlp 2", {"net": "mlp", "workers": 2}, KILLS, pytest.mark.nightly),
                ("mlp 1", {"net": "mlp", "uneven": True}, KILLS, pytest.mark.nightly),
                ("cnn 1", {"net": "cnn", "uneven": True}, KILLS, pytest.mark.nightly),
                ("mlp 2, uneven", {"net": "mlp", "workers": 2, "uneven": True}, NOT_ONLY_ONE, pytest.mark.nightly),
                ("cnn 2, uneven", {"net": "cnn", "workers": 2, "uneven": True}, KILLS, pytest.mark.nightly),
            )
        ),
    ],
)
def test_killed_at_each_place_in_turn(kind, kills, training, whole):
    run, expected = training(**kind), whole(**kind)
    go_through(run, kills)
    assert run.finished_as_a_whole() == expected
    assert run.done_again <= 3 * len(kills)  # One step runs, one checkpoint is being written, and one waits.


@pytest.mark.slow
def test_with_determinism_the_number_of_workers_may_change(training, whole):
    run = training(net="cnn", deterministic=True)
    run.killed("a step has ended", 4, workers=2)
    run.killed("an epoch ends", 1, workers=1)
    run.killed("a step runs", 2, OTHER, workers=2)
    assert run.finished_as_a_whole() == whole(net="cnn", deterministic=True)
