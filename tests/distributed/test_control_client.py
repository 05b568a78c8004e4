"""What workers that have met do with each other; they are threads of this process."""

import contextlib
import re
import socket
import threading
import time

import numpy as np
import pytest

from lockstep import ClusterError, OptionError
from lockstep._logging import CancelledError, is_cancelled
from lockstep.distributed.control.connect import open_control_channel
from lockstep.distributed.control.control_client import _HeartbeatState
from lockstep.distributed.control.failure_detector import FailureKind
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.heartbeat import QUIET
from lockstep.distributed.worker_process_group import coordinate_saving
from tests.distributed.threaded_job import ThreadedJob
from tests.support.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.waits


def messages(results):
    """Of the ClusterErrors that all workers have raised, one for each different one."""
    assert all(isinstance(result, ClusterError) for result in results), results
    return {str(result) for result in results}


def test_values_come_back_to_all_in_the_order_of_the_workers():
    value = {"text": "Größe", "numbers": [1, 2.5, None, True], "shape": (2, 3)}
    with ThreadedJob(3) as job:
        expected = [{**value, "shape": [2, 3], "index": index} for index in range(3)]
        results = job.everyone(lambda session: session.gather("value", {**value, "index": session.group.index}))
        assert results == [expected] * 3
        assert job.everyone(lambda session: session.broadcast("port", 7 + session.group.index)) == [7] * 3
        assert job.everyone(lambda session: session.barrier("end")) == [None] * 3
        assert job.everyone(lambda session: session.agree("options", value)) == [None] * 3


def test_many_calls_keep_their_order():
    with ThreadedJob(3) as job:
        results = job.everyone(lambda session: [session.gather(f"call {n}", n) for n in range(200)])
        assert results == [[[n, n, n] for n in range(200)]] * 3


def test_who_does_not_agree_is_named_to_all_with_both_values():
    with ThreadedJob(3) as job:
        results = job.everyone(
            lambda session: session.agree("options", {"rows": 32 if session.group.index == 1 else 64, "seed": 1})
        )
        (sentence,) = messages(results)
        assert "do not agree on 'options': worker 1 of 3 (" in sentence
        assert "differs in 'rows': it has 32, the others have 64. Fix: run the same program" in sentence
        assert job.failures == [[], [], []]


def test_a_worker_that_asks_something_else_is_named_to_all():
    with ThreadedJob(2) as job:
        results = job.everyone(lambda session: session.gather("rows" if session.group.index else "logs", 1))
        (sentence,) = messages(results)
        assert "gather 'rows'" in sentence
        assert "gather 'logs'" in sentence
        assert "worker 0" in sentence
        assert "worker 1" in sentence


def test_channels_are_independent():
    with ThreadedJob(2) as job:

        def work(session):
            found = []
            feed = threading.Thread(
                target=lambda: found.extend(session.gather("rows", n, channel="feed") for n in range(100))
            )
            feed.start()
            mine = [session.gather("logs", -n) for n in range(100)]
            feed.join(DEADLINE)
            return found, mine

        expected = ([[n, n] for n in range(100)], [[-n, -n] for n in range(100)])
        assert job.everyone(work) == [expected] * 2


def test_channel_serves_one_thread_at_a_time():
    with ThreadedJob(2) as job:
        waiting = threading.Thread(target=job.sessions[0].gather, args=("rows",), daemon=True)
        waiting.start()
        wait_until(lambda: job.sessions[0]._heartbeat.progress[1].startswith("waiting"), "the wait of worker 0")
        with pytest.raises(ClusterError, match="gather 'logs': another thread waits on channel 'main'"):
            job.sessions[0].gather("logs")
        job.sessions[1].gather("rows")
        waiting.join(DEADLINE)


def test_what_cannot_be_sent_is_refused_and_costs_no_turn():
    with ThreadedJob(2) as job:
        with pytest.raises(OptionError, match="Only values of JSON"):
            job.sessions[0].gather("rows", np.zeros(3))
        with pytest.raises(OptionError, match="too many"):
            job.sessions[0].gather("rows", "x" * 2**25)
        assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2


def test_large_values_arrive_and_too_large_ones_are_an_error_on_all():
    with ThreadedJob(2) as job:
        large = "x" * 7_000_000
        assert job.everyone(lambda session: session.gather("large", large) == [large, large]) == [True, True]
        (sentence,) = messages(job.everyone(lambda session: session.gather("larger", "x" * 10_000_000)))
        assert "The values of all workers do not fit." in sentence
        assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2


@pytest.mark.slow
def test_a_wait_names_whom_it_waits_for_and_what_they_do():
    with ThreadedJob(2) as job:
        job.sessions[1].report(np.int64(7), "save")
        waiting = threading.Thread(target=job.sessions[0].gather, args=("rows",), daemon=True)
        waiting.start()
        wait_until(lambda: job.lines[0], "a line of worker 0")
        job.sessions[1].gather("rows")
        waiting.join(DEADLINE)
        (line,) = job.lines[0]
        said = r"waiting for worker 1 of 2 \(.*\), in 'save' at step 7, at gather 'rows', \d+ s"
        assert re.fullmatch(said, line)


@pytest.mark.slow
def test_a_wait_for_many_workers_names_some_of_them():
    with ThreadedJob(12) as job:
        waiting = threading.Thread(target=job.sessions[0].gather, args=("rows",), daemon=True)
        waiting.start()
        wait_until(lambda: job.sessions[0]._missing, "a heartbeat that says for whom worker 0 waits")
        names = job.sessions[0]._missing["main"]["names"]
        assert [name.split(" (")[0] for name in names] == [
            *(f"worker {index} of 12" for index in range(1, 9)),
            "3 more",
        ]
        job.everyone(lambda session: session.group.index and session.gather("rows"))
        waiting.join(DEADLINE)


@pytest.mark.slow
def test_a_call_that_comes_to_its_limit_ends_the_job_and_names_who_did_not_come():
    with ThreadedJob(3, timeout_seconds=DEADLINE) as job:
        for session in job.sessions.values():
            session.report(7, "data")
        began = time.monotonic()
        with pytest.raises(
            ClusterError,
            match=r"in 'data' at step 7: did not reach gather 'rows' within 1.5 s. Fix: see their output, or raise",
        ) as caught:
            job.sessions[0].gather("rows", timeout_seconds=1.5)
        assert 1.5 < time.monotonic() - began < DEADLINE / 2
        assert caught.value.exit_code == 124
        wait_until(lambda: all(job.failures), "a failure on each worker")
        for failures in job.failures:
            (failure,) = failures
            assert failure.kind is FailureKind.STUCK
            assert failure.worker in (1, 2)
            assert "worker 0 waits for it at gather 'rows' for 2 s." in failure.sentence


def test_a_limit_that_is_no_number_ends_at_once():
    with ThreadedJob(2) as job, pytest.raises(ClusterError, match="did not reach gather 'rows' within nan s"):
        job.sessions[0].gather("rows", timeout_seconds=float("nan"))


@pytest.mark.slow
def test_a_worker_that_compiles_is_waited_for():
    with ThreadedJob(2, timeout_seconds=1.5, long_seconds=3) as job:
        job.sessions[0].report(1, "step")
        job.sessions[1].report(1, "compiling")
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"in 'compiling' at step 1: did not reach gather 'rows' within 3 s"):
            job.sessions[0].gather("rows")
        assert time.monotonic() - began > 3


@pytest.mark.slow
def test_a_chief_that_saves_says_so_and_the_others_wait_for_it():
    class Model:
        variables = ()

        def save(self, path):
            wait_until(lambda: chief.heartbeats()[0].activity == "saving", "a heartbeat that says so")
            return path

        save_weights = save

        def export(self, path):
            return self.save_weights(path)

    with ThreadedJob(2) as job:
        chief, model = job.sessions[0], Model()
        chief.report(3, "step")
        coordinate_saving(model, chief)
        for save in (model.save, model.save_weights, model.export):
            assert save("a.keras") == "a.keras"
        wait_until(lambda: chief.heartbeats()[0].activity == "step", "the end of the saving")
        assert chief.heartbeats()[0].step == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_who_fails_is_named_to_the_others_once_and_their_calls_end(failing):
    with ThreadedJob(3) as job:
        waiting = 1 - failing
        ended = []

        def wait():
            try:
                job.sessions[waiting].gather("rows")
            except ClusterError as error:
                ended.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        job.sessions[failing].fail("ValueError: no labels")
        thread.join(DEADLINE)
        assert str(ended[0]) == job.failures[waiting][0].sentence
        assert ended[0].exit_code == 13
        wait_until(lambda: job.failures[2], "a failure on worker 2")
        job.sessions[failing].fail("KeyError: and again")
        assert job.failures[failing] == []  # It knows.
        for index in (waiting, 2):
            (failure,) = job.failures[index]
            assert failure.kind is FailureKind.FAILED
            assert failure.worker == failing
            assert failure.sentence.endswith("failed: ValueError: no labels")
            with pytest.raises(ClusterError, match="no labels"):
                job.sessions[index].check()


@contextlib.contextmanager
def held(loop):
    """A loop that neither sends nor receives, as if one call of its process held Python's lock."""
    is_over = threading.Event()
    loop.call(lambda: is_over.wait(DEADLINE))
    try:
        yield
    finally:
        is_over.set()


@pytest.mark.slow
@pytest.mark.parametrize(("may_follow", "cause"), [(True, (FailureKind.SILENT, 1)), (False, (FailureKind.FAILED, 2))])
def test_a_busy_worker_is_the_cause_only_of_what_may_follow_from_its_loss(may_follow, cause):
    with ThreadedJob(3) as job, held(job.sessions[1]._loop):
        chief, client = job.sessions[0], job.sessions[2]
        wait_until(lambda: time.monotonic() - chief.heartbeats()[1].heard > QUIET, "a silence")
        client.fail("ValueError: no labels", may_follow=may_follow)
        wait_until(lambda: job.failures[0], "a failure on the chief")
        assert (job.failures[0][0].kind, job.failures[0][0].worker) == cause


@pytest.mark.slow
@pytest.mark.parametrize("may_follow", [True, False])
def test_a_busy_chief_is_the_cause_only_of_what_may_follow_from_its_loss(may_follow):
    with ThreadedJob(2) as job, held(job.sessions[0]._server._loop):
        client = job.sessions[1]
        wait_until(lambda: client._heartbeat.silence > QUIET, "a silence")
        client.fail("ValueError: no labels", may_follow=may_follow)
        assert (client.failure and client.failure.kind) == (FailureKind.SILENT if may_follow else None)


def test_who_has_left_is_an_error_only_for_those_that_need_it():
    with ThreadedJob(3) as job:
        job.sessions[1].leave()
        job.sessions[1].leave()
        wait_until(lambda: job.sessions[0].heartbeats()[1].left, "the departure of worker 1")
        assert job.failures == [[], [], []]
        with pytest.raises(ClusterError, match="This control client is closed"):
            job.sessions[1].gather("rows")
        with pytest.raises(ClusterError, match=r"worker 1 of 3 \(.*\) finished before gather 'rows'"):
            job.sessions[0].gather("rows")


@pytest.mark.slow
def test_the_chief_waits_for_the_others_ends():
    with ThreadedJob(2, timeout_seconds=DEADLINE) as job:
        leaving = threading.Thread(target=job.sessions[0].leave, daemon=True)
        leaving.start()
        wait_until(lambda: job.lines[0], "a line of worker 0")
        assert job.lines[0][0].startswith("waiting for the end of worker 1 of 2 (")
        assert leaving.is_alive()
        job.sessions[1].leave()
        leaving.join(DEADLINE)
        assert not leaving.is_alive()


@pytest.mark.slow
def test_a_chief_that_has_waited_long_leaves_and_the_others_go_on():
    with ThreadedJob(2, timeout_seconds=1.5) as job:
        job.sessions[0].leave()
        assert job.lines[0][-1].startswith("exits before worker 1 of 2 (")
        wait_until(lambda: job.sessions[1]._is_disconnected, "the departure of worker 0")
        assert job.failures == [[], []]
        job.sessions[1].check()
        with pytest.raises(ClusterError, match="the chief, has left before"):
            job.sessions[1].gather("rows")


def leaving_and_staying(job, index):
    """A thread in which a worker leaves, but stays until all have left; the chief knows already that it leaves."""
    thread = threading.Thread(target=lambda: job.sessions[index].leave(DEADLINE, stays=True), daemon=True)
    thread.start()
    wait_until(lambda: job.sessions[0].heartbeats()[index].left, f"the departure of worker {index}")
    return thread


@pytest.mark.parametrize("first", [0, 1])
def test_workers_that_stay_leave_when_the_last_one_does(first):
    with ThreadedJob(2) as job:
        staying = leaving_and_staying(job, first)
        assert staying.is_alive()
        job.sessions[1 - first].leave(DEADLINE, stays=True)
        staying.join(DEADLINE)
        assert not staying.is_alive()
        assert job.failures == [[], []]


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_stays_learns_of_a_failure(first):
    with ThreadedJob(3) as job:
        staying = leaving_and_staying(job, first)
        job.sessions[2].fail("ValueError: no labels")
        wait_until(lambda: job.failures[first], "a failure on the worker that stays")
        assert "failed: ValueError: no labels" in job.failures[first][0].sentence
        staying.join(DEADLINE)
        assert not staying.is_alive()


@pytest.mark.parametrize(
    "nonsense",
    [*({"step": step} for step in ("seven", None, float("inf"), [])), {"step": 1, "metadata": [1]}],
    ids=str,
)
def test_a_worker_that_sends_nonsense_has_died_and_ends_no_other_thread(nonsense):
    with ThreadedJob(2) as job:
        job.sessions[1]._send({"kind": "heartbeat", "activity": "a step", "seconds": 0.0} | nonsense)
        wait_until(lambda: all(job.failures), "a failure on each worker")
        (failure,) = job.failures[0]
        assert (failure.kind, failure.worker) == (FailureKind.DIED, 1)
        assert "it sent a 'heartbeat' that cannot be read" in failure.sentence


def test_unknown_messages_are_for_a_later_version_and_harm_nothing():
    with ThreadedJob(2) as job:
        job.sessions[1]._send({"kind": "news"})
        assert job.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2


def test_a_pause_of_this_process_at_any_moment_is_no_silence_of_the_chief():
    now = [0.0]
    state = _HeartbeatState(Peer(0, 2, "here", 70), lambda: now[0])
    assert state.message["seconds"] == 0
    now[0] += 60  # Suspended between the heartbeat and the look at the chief.
    assert state.silence == 0
    now[0] += 60
    assert state.message["seconds"] == 0
    now[0] += 1
    assert state.silence == state.message["seconds"] == 1


def test_saying_how_far_one_is_costs_next_to_nothing():
    with ThreadedJob(2) as job:
        report = job.sessions[1].report
        began = time.thread_time()
        for step in range(100_000):
            report(step, "step")
        assert (time.thread_time() - began) / 100_000 < 20e-6  # About 0.2 µs on a machine that does nothing else.


def test_connections_are_prepared_for_small_messages_and_cut_links():
    with ThreadedJob(2) as job:
        connected = job.sessions[1]._connection._socket
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_jobs_follow_each_other_on_one_port():
    with ThreadedJob(2) as first:
        pass
    port = first.coordinator
    with ThreadedJob(2) as second:
        second.listener.close()
        second.everyone(lambda session: session.leave())
        again = {**second.arguments(0), "listener": None}
        again["group"] = type(again["group"])(workers=2, index=0, coordinator=port)
        chief = threading.Thread(target=lambda: second.sessions.update({0: open_control_channel(**again)}), daemon=True)
        chief.start()
        other = {**again, "group": type(again["group"])(workers=2, index=1, coordinator=port)}
        second.sessions[1] = open_control_channel(**other)
        chief.join(DEADLINE)
        assert second.everyone(lambda session: session.gather("rows", 1)) == [[1, 1]] * 2


def test_cancelled_wait_ends_and_other_channels_continue():
    given_up, ended = threading.Event(), []

    def ahead(session):
        is_cancelled.set(given_up.is_set)
        with pytest.raises(CancelledError):
            session.gather("batch 2", channel="input 1, pass 1")
        session.forget("input 1, pass 1")
        ended.append(session)

    with ThreadedJob(2) as job:
        thread = threading.Thread(target=ahead, args=(job.sessions[0],), daemon=True)
        thread.start()
        given_up.set()
        thread.join(DEADLINE)
        assert ended == [job.sessions[0]]
        assert job.everyone(lambda session: session.gather("rows", 1, channel="input 1, pass 2")) == [[1, 1], [1, 1]]
