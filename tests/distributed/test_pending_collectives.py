"""Calls in which all workers meet, as the chief keeps them."""

from lockstep.distributed.control.control_server import BARRIER, BROADCAST, GATHER, CollectiveReply, PendingCollectives


def test_each_operation_has_its_answer_when_the_last_has_come():
    for operation, values in ((GATHER, ["a", "b", "c"]), (BROADCAST, ["a"]), (BARRIER, [])):
        calls = PendingCollectives(3)
        assert calls.put(2, "main", 0, operation, "t", "c") == []
        assert calls.put(0, "main", 0, operation, "t", "a") == []
        assert calls.put(1, "main", 0, operation, "t", "b") == [CollectiveReply((0, 1, 2), "main", values)]
        assert calls.missing(0) == {}


def test_channels_do_not_wait_for_each_other():
    calls = PendingCollectives(2)
    calls.put(0, "main", 0, GATHER, "step", 1)
    calls.put(1, "feed", 0, GATHER, "rows", 2)
    assert calls.missing(0) == {"main": [1]}
    assert calls.missing(1) == {"feed": [0]}
    assert calls.put(0, "feed", 0, GATHER, "rows", 3) == [CollectiveReply((0, 1), "feed", [3, 2])]
    assert calls.missing(0) == {"main": [1]}


def test_a_worker_that_is_ahead_waits_for_its_own_call():
    calls = PendingCollectives(3)
    for worker in (0, 1):
        calls.put(worker, "main", 0, GATHER, "first", worker)
    assert calls.missing(0) == {"main": [2]}
    (reply,) = calls.put(2, "main", 0, GATHER, "first", 2)
    assert reply.values == [0, 1, 2]
    assert calls.put(0, "main", 1, GATHER, "second", 0) == []
    assert calls.missing(0) == {"main": [1, 2]}


def test_who_asks_something_else_is_named_and_everybody_hears_it():
    calls = PendingCollectives(3)
    calls.put(1, "main", 4, GATHER, "rows", 1)
    (reply,) = calls.put(0, "main", 4, BARRIER, "the epoch's end", None)
    sentence = (
        "worker 1 is at gather 'rows' where worker 0 is at barrier \"the epoch's end\" (call 5 on channel 'main'). Fix: make "
        "the same calls, such as fit and evaluate, in the same order on all workers."
    )
    assert reply == CollectiveReply((0, 1), "main", [], sentence)
    assert calls.put(2, "main", 4, GATHER, "rows", 1) == [CollectiveReply((2,), "main", [], sentence)]


def test_who_has_left_is_named_to_those_that_wait_and_that_come_later():
    calls = PendingCollectives(3)
    calls.put(0, "main", 0, GATHER, "rows", 1)
    sentence = (
        "worker 2 of 3 finished before gather 'rows', where others wait. Fix: make the same calls, such as fit and "
        "evaluate, in the same order on all workers."
    )
    assert calls.leave(2, "worker 2 of 3") == [CollectiveReply((0,), "main", [], sentence)]
    assert calls.put(1, "main", 0, GATHER, "rows", 1) == [CollectiveReply((1,), "main", [], sentence)]


def test_who_leaves_after_its_last_call_is_no_error():
    calls = PendingCollectives(2)
    calls.put(1, "main", 0, GATHER, "rows", 1)
    assert calls.leave(1, "worker 1") == []
    assert calls.put(0, "main", 0, GATHER, "rows", 0) == [CollectiveReply((0, 1), "main", [0, 1])]


def test_abandoned_channel_has_no_waiting_workers():
    calls = PendingCollectives(2)
    calls.put(0, "input 1", 7, GATHER, "batch 8", 1)
    calls.put(0, "main", 0, GATHER, "rows", 1)
    calls.abandon(0, "input 1")
    assert calls.missing(0) == {"main": [1]}
    assert calls.put(1, "input 1", 7, GATHER, "batch 8", 1) == []  # It gives up, too, when it comes there.
    calls.abandon(1, "input 1")
    assert calls.missing(1) == {}
