"""How far workers run ahead of each other, in every order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import OptionError
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.staleness import StalenessBound
from lockstep.parameter_server.variable_server import SyncAggregator
from lockstep.parameter_server.variable_store import CompletedIds, Push

EVENTS = st.lists(st.tuples(st.sampled_from(["step", "pause", "leave"]), st.integers(0, 3)), max_size=120)


@given(EVENTS, st.integers(0, 3))
def test_the_slowest_worker_can_always_continue(events, bound):
    clocks, here = StalenessBound(bound), set()
    for event, worker in events:
        if event == "step":
            here.add(worker)
            if not clocks.blocking_workers(worker):
                clocks.tick(worker)
        else:
            here.discard(worker)
            {"pause": clocks.pause, "leave": clocks.leave}[event](worker)
        assert not here or any(not clocks.blocking_workers(worker) for worker in here)


@given(st.lists(st.integers(0, 2), max_size=100), st.integers(0, 3))
def test_workers_that_start_together_differ_by_at_most_the_bound_and_one_step(order, bound):
    clocks, steps = StalenessBound(bound), [0, 0, 0]
    for worker in range(3):
        clocks.join(worker)
    for worker in order:
        waits = clocks.blocking_workers(worker)
        assert bool(waits) == (steps[worker] - min(steps) > bound)
        if not waits:
            clocks.tick(worker)
            steps[worker] += 1
        assert max(steps) - min(steps) <= bound + 1


def test_without_a_bound_no_worker_waits():
    clocks = StalenessBound(None)
    clocks.join(0)
    for _ in range(1000):
        clocks.tick(1)
    assert clocks.blocking_workers(1) == []


def test_lost_and_paused_workers_block_no_worker():
    for goes in (StalenessBound.leave, StalenessBound.pause):
        clocks = StalenessBound(0)
        for worker in (0, 1):
            clocks.join(worker)
        clocks.tick(0)
        assert clocks.blocking_workers(0) == ["1"]
        goes(clocks, 1)
        assert clocks.blocking_workers(0) == []


def test_a_late_or_resumed_worker_has_the_clock_of_the_slowest():
    clocks = StalenessBound(0)
    clocks.join("early")
    clocks.pause("early")
    for _ in range(5):
        clocks.join("busy")
        clocks.tick("busy")
    clocks.join("late")
    clocks.join("early")
    assert clocks.blocking_workers("busy") == []
    clocks.tick("busy")
    assert sorted(clocks.blocking_workers("busy")) == ["early", "late"]


@pytest.mark.parametrize("bound", [-1, 1.5, "2", True])
def test_a_bound_is_a_whole_number(bound):
    with pytest.raises(OptionError, match="max_staleness: expected a whole number of at least 0"):
        StalenessBound(bound)


@given(st.lists(st.integers(0, 20)))
def test_completed_ids_are_a_set(numbers):
    done, naive = CompletedIds(), set()
    for number in numbers:
        assert done.add(number) == (number not in naive)
        naive.add(number)
        assert len(done) == len(naive)
        assert done.below == next(n for n in range(30) if n not in naive)
        assert all((n in done) == (n in naive) for n in range(30))


@given(st.integers(1, 5).flatmap(lambda parts: st.lists(st.integers(0, parts - 1)).map(lambda order: (parts, order))))
def test_a_synchronous_update_has_its_parts_in_their_order_once(case):
    parts, order = case
    aggregator, pushes, here = SyncAggregator(), [Push({}, weight=n + 1) for n in range(parts)], set()
    for part in order:
        complete = aggregator.add(0, part, parts, pushes[part])
        is_last = len(here | {part}) == parts > len(here)
        here.add(part)
        assert complete == (pushes if is_last else None)
    assert aggregator.number == (len(here) == parts)


@pytest.mark.parametrize(("number", "part", "parts"), [(1, 0, 2), (0, 2, 2), (0, 1, 3)])
def test_an_invalid_part_is_refused(number, part, parts):
    aggregator = SyncAggregator()
    aggregator.add(0, 0, 2, Push({}))
    with pytest.raises(
        ProtocolError, match=f"part {part} of {parts} of update {number}: update 0 is due, which has 2 parts"
    ):
        aggregator.add(number, part, parts, Push({}))
