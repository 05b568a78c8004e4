"""Who is missing or stuck, from what was last heard: times are arguments."""

from dataclasses import replace

import pytest

from lockstep import OptionError
from lockstep.distributed.control.failure_detector import (
    FailureKind,
    SuspendDetector,
    find_cause,
    find_failure,
    find_overdue,
    make_failure,
)
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.heartbeat import AT_END_OF_FIT, WAITING, Limits, WorkerStatus

LIMITS = Limits(timeout=60, long=1800)
NOW = 10_000.0


def a_status(index, step, activity, seconds, silent=0.2, left=False):
    peer = Peer(index, 3, f"node{index}", 70 + index)
    return WorkerStatus(peer, NOW - silent, step, activity, NOW - seconds, left)


def seen(*statuses):
    found = find_failure(NOW, statuses, LIMITS)
    return None if found is None else (found.kind, found.worker)


@pytest.mark.parametrize(
    "statuses",
    [
        [a_status(0, 8, "step", 1), a_status(1, 8, "step", 1), a_status(2, 7, "data", 2)],
        [a_status(0, 8, "step", 59), a_status(1, 7, "data", 1700)],
        [a_status(0, 8, "step", 61), a_status(1, 7, "data", 30), a_status(2, 6, "data", 100)],  # One of them goes on.
        [a_status(0, 8, "step", 61), a_status(1, 8, "data", 59)],
        [a_status(0, 8, "data", 1000), a_status(1, 7, "save", 1000)],  # Nobody waits.
        [a_status(0, 8, "step", 100), a_status(1, 7, "compiling", 100), a_status(2, 7, "step", 100)],
        [a_status(0, 1, "step", 1700), a_status(1, 0, "start", 1700)],
        [a_status(0, 7, "saving", 1700), a_status(1, 8, "step", 1690)],
        [a_status(0, 8, "step", 1700), a_status(1, 8, "step", 1700)],  # One long step.
        [a_status(0, 8, "step", 9000)],  # Alone, nobody waits for anybody.
        [a_status(0, 8, "step", 61), a_status(1, 8, "program", 62)],  # It has ended step 8.
        [a_status(0, 8, "step", 61), a_status(1, 8, "program", 62, left=True)],
        [a_status(0, 8, "idle", 9000), a_status(1, 8, "idle", 9000)],
        [a_status(0, 8, "data", 1), a_status(1, 8, "left", 900, silent=900, left=True)],
    ],
)
def test_nobody_is_named_while_all_may_be_well(statuses):
    assert seen(*statuses) is None


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        ([a_status(0, 8, "step", 1), a_status(1, 8, "step", 1, silent=61)], (FailureKind.SILENT, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 7, "data", 62)], (FailureKind.STUCK, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 8, "data", 62)], (FailureKind.STUCK, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 7, "program", 62)], (FailureKind.STUCK, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 8, "callback", 62, left=True)], (FailureKind.LEFT, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 8, "step", 61), a_status(2, 7, "step", 62)], (FailureKind.STUCK, 2)),
        (
            [a_status(0, 8, "step", 61), a_status(1, 7, WAITING + "x", 99), a_status(2, 7, "data", 62)],
            (FailureKind.STUCK, 2),
        ),
        ([a_status(0, 8, "step", 61), a_status(1, 7, WAITING + "x", 99)], (FailureKind.STUCK, 1)),
        ([a_status(0, 7, "callback", 99), a_status(1, 8, "step", 61)], (FailureKind.STUCK, 0)),
        ([a_status(0, 8, "step", 1801), a_status(1, 7, "compiling", 1801)], (FailureKind.STUCK, 1)),
        ([a_status(0, 1, "step", 1801), a_status(1, 0, "start", 1801)], (FailureKind.STUCK, 1)),
        ([a_status(0, 7, "saving", 1801), a_status(1, 8, "step", 1801)], (FailureKind.STUCK, 0)),
        ([a_status(0, 8, "step", 1801), a_status(1, 8, "step", 1802)], (FailureKind.STUCK, 1)),
        ([a_status(0, 8, "step", 61), a_status(1, 7, "step", 70, silent=70, left=True)], (FailureKind.LEFT, 1)),
    ],
)
def test_who_keeps_the_others_waiting_is_named(statuses, found):
    assert seen(*statuses) == found
    assert seen(*reversed(statuses)) == found


def test_the_sentences_say_who_where_for_how_long_and_who_waits():
    stuck = find_failure(NOW, [a_status(0, 8, "step", 61), a_status(1, 7, "data", 62)], LIMITS)
    assert stuck.sentence == (
        "worker 1 of 3 (node1, process 71) is stuck: in 'data' at step 7 for 62 s; worker 0 waits for it in step 8."
    )
    assert stuck.exit_code == 124
    silent = find_failure(NOW, [a_status(0, 8, "step", 1), a_status(1, 7, "step", 62, silent=61)], LIMITS)
    assert silent.sentence == (
        "worker 1 of 3 (node1, process 71) does not answer: no heartbeat for 61 s, last in 'step' at step 7 (stopped, or "
        "cut off from the network)."
    )
    assert silent.exit_code == 75
    assert "one call held Python's lock (GIL) so long" in silent.fix
    left = find_failure(NOW, [a_status(0, 8, "step", 61), a_status(1, 7, "step", 62, left=True)], LIMITS)
    assert left.sentence.endswith("finished after step 7; worker 0 waits for it in step 8.")
    assert left.exit_code == 13


def test_a_wait_that_comes_to_its_limit_names_the_one_that_is_behind():
    waits = a_status(0, 8, WAITING, 60).peer
    missing = [a_status(1, 8, "compiling", 62), a_status(2, 7, "save", 62)]
    found = find_overdue(NOW, missing, waits, "gather 'rows' for 60 s")
    assert found.sentence == (
        "worker 2 of 3 (node2, process 72) is stuck: in 'save' at step 7 for 62 s; worker 0 waits for it at gather 'rows' "
        "for 60 s."
    )
    silent = replace(missing[1], heard=NOW - 40)
    assert find_overdue(NOW, [silent], waits, "gather 'rows' for 60 s").kind is FailureKind.SILENT


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.FAILED])
def test_a_silence_that_came_before_is_the_cause(kind):
    found = make_failure(kind, a_status(0, 8, "step", 1).peer, "has failed.")
    named = find_cause(NOW, found, [a_status(0, 8, "step", 1, silent=90), a_status(1, 7, "step", 10, silent=9)])
    assert (named.kind, named.worker) == (FailureKind.SILENT, 1)
    assert "no heartbeat for 9 s" in named.sentence
    assert named.sentence.endswith("Then worker 0 of 3 (node0, process 70) has failed.")
    for others in ([a_status(1, 7, "step", 10, silent=1)], [a_status(1, 8, "step", 10, silent=9, left=True)]):
        assert find_cause(NOW, found, [a_status(0, 8, "step", 1, silent=90), *others]) is found


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.FAILED])
def test_an_end_that_came_too_early_is_the_cause(kind):
    found = make_failure(kind, a_status(0, 8, "step", 1).peer, "has failed.")
    named = find_cause(NOW, found, [a_status(0, 8, "step", 1), a_status(1, 7, "step", 10, left=True)])
    assert (named.kind, named.worker) == (FailureKind.LEFT, 1)
    assert named.sentence.endswith("in step 8. Then worker 0 of 3 (node0, process 70) has failed.")
    assert find_cause(NOW, found, [a_status(0, 8, "step", 1), a_status(1, 8, "step", 10, left=True)]) is found


def test_nobody_waits_long_for_a_worker_that_has_come_to_its_end():
    assert seen(a_status(0, 8, "step", 4), a_status(1, 7, "step", 9, left=True)) == (FailureKind.LEFT, 1)
    assert seen(a_status(0, 8, "step", 1), a_status(1, 7, "step", 9, left=True)) is None
    assert seen(a_status(0, 8, "data", 4), a_status(1, 7, "step", 9, left=True)) is None
    assert seen(a_status(0, 8, "step", 4), a_status(1, 8, "step", 9, left=True)) is None


def test_nobody_waits_long_for_a_worker_that_has_come_to_the_end_of_fit():
    ended = a_status(1, 7, AT_END_OF_FIT, 9)
    for activity in ("step", "data"):  # A step is begun before those before it have ended.
        assert seen(a_status(0, 8, activity, 4), ended) == (FailureKind.LEFT, 1)
    assert seen(a_status(0, 8, "step", 1), ended) is None
    assert seen(a_status(0, 8, "step", 4), replace(ended, heard=NOW - 4)) is None  # It may have gone on meanwhile.
    assert seen(a_status(0, 7, "step", 4), ended) is None
    assert seen(a_status(0, 8, "step", 4), a_status(1, 7, WAITING + "x", 9)) is None
    reads = [a_status(0, 7, "data", 4), ended]
    assert find_failure(NOW, reads, LIMITS, [({0}, [1])]).sentence.endswith(
        "ended fit after step 7; worker 0 waits for it with its next batch."
    )
    assert find_failure(NOW, reads, LIMITS, [({1}, [0])]) is None  # The barrier alone: it may find the end of its data.


def test_a_worker_that_is_stuck_is_not_excused_by_a_silence():
    found = make_failure(FailureKind.STUCK, a_status(0, 8, "step", 1).peer, "is stuck.")
    assert find_cause(NOW, found, [a_status(1, 7, "step", 10, silent=9)]) is found


def test_a_process_that_was_stopped_itself_begins_to_count_anew():
    times = iter([0.0, 0.5, 1.0, 1.6, 100.0, 100.5])
    awake = SuspendDetector(clock=lambda: next(times))
    assert [(awake.tick(), awake.since) for _ in range(5)] == [
        (0.5, 0.0),
        (1.0, 0.0),
        (1.6, 0.0),
        (100.0, 100.0),
        (100.5, 100.0),
    ]


def test_a_process_whose_threads_hold_the_lock_of_python_in_turn_was_not_stopped():
    times, cpu_times = (
        iter([0.0, 3.0, 6.0, 9.0, 70.0]),
        iter([0.0, 1.8, 4.8, 7.8, 16.0]),
    )  # At the end 16 cores, for 0.5 s.
    suspends = SuspendDetector(lambda: next(times), lambda: next(cpu_times))
    assert [(suspends.tick(), suspends.since) for _ in range(4)] == [(3.0, 0.0), (6.0, 0.0), (9.0, 0.0), (70.0, 70.0)]


@pytest.mark.parametrize(("cores", "seconds"), [(1, 3), (8, 14), (64, 70), (64, 3)])
@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_pause_is_told_from_a_held_lock_on_any_number_of_busy_cores(cores, seconds, is_suspended):
    """The pause begins just before a tick, and each tick is followed by another one, as in the client's heartbeats."""
    used = 0 if is_suspended else seconds
    times = iter([0.0, 0.5, 0.5, 1.0 + seconds, 1.0 + seconds, 1.5 + seconds])
    cpu_times = iter([0.0, 0.5 * cores, 0.5 * cores, cores + used, cores + used, 1.5 * cores + used])
    suspends = SuspendDetector(lambda: next(times), lambda: next(cpu_times))
    for _ in range(5):
        suspends.tick()
    assert suspends.since == (1.0 + seconds if is_suspended else 0.0)


@pytest.mark.parametrize(("timeout", "long"), [(1, 1800), (0, 0), (60, 30), (float("nan"), 60), (60, float("nan"))])
def test_limits_that_cannot_be_kept_are_refused(timeout, long):
    with pytest.raises(OptionError, match=r"timeout_seconds, long_seconds: expected 1\.5 or more"):
        Limits(timeout, long)
