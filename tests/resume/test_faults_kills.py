"""Law 3 by real processes: killed anywhere, again and again, a training ends with the bits of one that nothing happened to.

Each test is a chain: every attempt goes on where the one before was killed, and the last one comes to the end.
"""

import pytest

pytestmark = pytest.mark.xdist_group("resume")

ONE, OTHER, BOTH = (0,), (1,), (0, 1)  # workers

# Where, for the how manieth time in its process, and which of two workers; the chief alone writes.
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
QUICK = [kill for kill in KILLS if kill[0] in ("a step runs", "the arrays are written", "an epoch ends")][1:4]


def go_through(run, kills):
    for at, nth, workers in kills:
        run.killed(at, nth, workers if run.workers > 1 else ONE)


@pytest.mark.parametrize(
    ("net", "workers", "kills"),
    [
        pytest.param("cnn", 1, QUICK, id="quick"),
        *(
            pytest.param(net, workers, KILLS, id=f"{net} {workers}", marks=pytest.mark.full)
            for net in ("mlp", "cnn")
            for workers in (1, 2)
        ),
    ],
)
def test_killed_at_each_place_in_turn(net, workers, kills, training, whole):
    run = training(workers, net=net)
    go_through(run, kills)
    assert run.finished_as_a_whole() == whole(net=net, workers=workers)
