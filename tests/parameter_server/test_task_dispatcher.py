"""Task dispatcher over real sockets and without: all tasks are done despite lost workers, and every wait ends."""

import contextlib
import socket
import threading

import keras
import numpy as np
import pytest

from lockstep import ClusterError
from lockstep._array_encoding import ArraySpec
from lockstep._errors import INTERRUPTED, MAX_SECONDS, NO_PROGRESS, PEER_LOST, USER_ERROR, exit_code_of
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server import task_dispatcher
from lockstep.parameter_server.array_transport import MAX_HEAD_BYTES
from lockstep.parameter_server.rpc import ArrayServer, ClientSession, connect_rpc
from lockstep.parameter_server.task_client import CallEnded, TaskClient, run_tasks
from lockstep.parameter_server.task_dispatcher import TaskDispatcher
from tests.parameter_server.threaded_servers import DEADLINE, Servers, peer, values_of
from tests.support.waiting import wait_until


class ServedDispatcher(contextlib.ExitStack):
    """A dispatcher behind sockets in its first call, and workers that are threads."""

    def __init__(self, attached=dict, **options):
        super().__init__()
        self.logged, self.errors, self.results, self._threads = [], [], [], []
        self.dispatcher = TaskDispatcher(log=self.logged.append, **options)
        self.dispatcher.open(1, attached)
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = ArrayServer(peer(0), self.dispatcher, listener, log=self.logged.append)
        self.server.start()
        self.callback(self.server.stop)

    def client(self, index, job=None, timeout_seconds=DEADLINE, **options):
        rpc_client = connect_rpc(
            "chief", self._address, peer(index, job=job), None, timeout_seconds, self.logged.append
        )
        client = TaskClient(rpc_client, **options)
        self.callback(client.close)
        return client

    def in_thread(self, function):
        """Runs it in a thread; what it gives or raises is kept."""

        def run():
            try:
                self.results.append(function())
            except (ClusterError, CallEnded, ZeroDivisionError) as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def start(self, index, do, **options):
        client = self.client(index)
        client.enter(1)

        def run():
            with contextlib.closing(client):  # As the end of its process does.
                result = run_tasks(client, 1, do, **options)
                client.leave(1)
                return result.what

        self.in_thread(run)

    def end(self):
        self.dispatcher.close({"epochs": 3})
        self.wait()

    def wait(self):
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def doubled(task):
    return {"by": task.what["name"]}, {"twice": 2 * task.arrays["once"]}


def nothing(task):
    return {}, {}


def test_results_return_to_the_chief_and_all_workers_get_the_end():
    with ServedDispatcher() as served:
        results = [served.dispatcher.schedule({"name": str(n)}, {"once": np.arange(n)}) for n in range(20)]
        for index in (1, 2, 3):
            served.start(index, doubled)
        assert served.dispatcher.worker_count == 3
        served.dispatcher.join()
        for n, result in enumerate(results):
            message, arrays = result.result(0)
            assert message == {"by": str(n)}
            assert (arrays["twice"] == 2 * np.arange(n)).all()
        served.end()
        assert served.results == [{"epochs": 3}] * 3
        assert served.dispatcher.worker_count == 0


@pytest.mark.parametrize("seconds", [3601, MAX_SECONDS])
def test_every_limit_that_a_strategy_takes_is_one_for_requests(seconds):
    with ServedDispatcher() as served, Servers() as servers:
        assert served.client(1, timeout_seconds=seconds).enter(1) is None
        chief = servers.client(0, timeout_seconds=seconds)
        chief.fill(values_of())
        assert chief.pull().keys() == values_of().keys()


def test_an_answer_that_is_too_large_is_refused_with_the_reason():
    with ServedDispatcher() as served:
        served.dispatcher.publish("much", {"text": "x" * MAX_HEAD_BYTES})
        with pytest.raises(ClusterError, match=r"has refused a 'ask': .* bytes are too many for one message") as caught:
            served.client(1).wait_for(1, "much")
        assert caught.value.exit_code == USER_ERROR


def test_a_late_worker_gets_tasks():
    with ServedDispatcher() as served:
        served.start(1, doubled)
        served.dispatcher.schedule({"name": "a"}, {"once": np.ones(1)}).result(DEADLINE)
        served.start(2, doubled)
        for n in range(5):
            served.dispatcher.schedule({"name": str(n)}, {"once": np.ones(1)})
        served.dispatcher.join()
        assert served.dispatcher.is_idle
        served.end()


def test_tasks_of_a_lost_worker_are_reassigned_and_logged():
    with ServedDispatcher() as served:
        result = served.dispatcher.schedule({"name": "a"}, {"once": np.ones(3)})
        dying = served.client(1)
        assert dying.take(1).number == 0
        served.start(2, doubled)
        dying.close()
        assert result.result(DEADLINE)[1]["twice"].sum() == 6
        served.end()
        assert any(
            "worker 1 of 4 (here, process 1001) has disconnected: task 0 will be reassigned to other workers" in x
            for x in served.logged
        )


def test_the_task_of_a_worker_that_lost_a_server_is_reassigned():
    def lost(task):
        raise ClusterError("ps 0 was lost", PEER_LOST)

    with ServedDispatcher() as served:
        served.start(1, lost)
        result = served.dispatcher.schedule({"name": "a"}, {"once": np.ones(3)})
        served.wait()
        assert served.errors[0].exit_code == PEER_LOST
        served.start(2, doubled)
        assert result.result(DEADLINE)[0] == {"by": "a"}
        served.end()


def lose_server(task):
    raise ClusterError("ps 0 at a:1 was lost while this process waited.", PEER_LOST)


@pytest.mark.slow
def test_a_server_that_the_last_worker_has_lost_is_named_at_the_chief():
    with ServedDispatcher(timeout_seconds=0.5) as served:
        served.start(1, lose_server)
        served.dispatcher.schedule({})
        said = r"worker 1 of 4 .* ended in task 0: ps 0 at a:1 was lost while this process waited\. Since then no task was finished for 0\.5 s"
        with pytest.raises(ClusterError, match=said) as caught:
            served.dispatcher.join()
        assert caught.value.exit_code == PEER_LOST


@pytest.mark.slow
def test_a_lost_server_is_forgotten_when_another_worker_finishes_a_task():
    with ServedDispatcher(timeout_seconds=0.5) as served:
        served.start(1, lose_server)
        result = served.dispatcher.schedule({"name": "a"}, {"once": np.ones(3)})
        served.wait()
        with contextlib.closing(served.client(2)) as client:
            client.enter(1)
            client.finish(1, client.take(1), ({"by": "a"}, {})).result(DEADLINE)
        assert result.result(DEADLINE)[0] == {"by": "a"}
        served.dispatcher.schedule({})
        with pytest.raises(ClusterError, match=r"No task was finished for 0\.5 s"):
            served.dispatcher.join()


def test_a_failed_task_is_raised_at_the_chief_and_ends_all_calls():
    with ServedDispatcher() as served:
        served.start(1, lambda task: 1 / 0)
        result = served.dispatcher.schedule({})
        with pytest.raises(ClusterError, match=r"worker 1 of 4 .* failed in task 0: ZeroDivisionError") as caught:
            served.dispatcher.join()
        assert caught.value.exit_code == USER_ERROR
        with pytest.raises(ClusterError, match="ZeroDivisionError"):
            result.result(DEADLINE)
        for ask in (lambda: served.dispatcher.schedule({}), lambda: served.dispatcher.open(2)):
            with pytest.raises(ClusterError, match="ZeroDivisionError"):
                ask()
        served.wait()
        assert isinstance(served.errors[0], ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ClusterError("the port is in use"), USER_ERROR),
        (ZeroDivisionError("the port is in use"), USER_ERROR),
        (ClusterError("the port is in use", NO_PROGRESS), NO_PROGRESS),
        (ClusterError("the port is in use", INTERRUPTED), None),
        (KeyboardInterrupt("the port is in use"), None),
    ],
    ids=repr,
)
def test_an_error_of_a_process_ends_all_calls_with_its_exit_code(error, code):
    with ServedDispatcher() as served:
        served.client(1, job="ps").report_failure(error)
        assert served.dispatcher.has_failed == (code is not None)
        if code is not None:
            with pytest.raises(ClusterError, match=r"ps 1 of 4 .* failed: .*the port is in use") as caught:
                served.dispatcher.raise_failure()
            assert caught.value.exit_code == code


def test_a_result_that_is_too_large_is_refused():
    with ServedDispatcher(result_bytes=100) as served:
        served.dispatcher.schedule({})
        served.start(1, lambda task: ({}, {"large": np.zeros(101, np.int8)}))
        served.wait()
        assert "101 bytes follow a 'finish': at most 100 may" in str(served.errors[0])


def test_on_idle_is_called_if_there_is_no_task():
    with ServedDispatcher() as served:
        was_idle = threading.Event()
        served.start(1, nothing, on_idle=was_idle.set)
        assert was_idle.wait(DEADLINE)
        served.dispatcher.schedule({}).result(DEADLINE)
        served.end()


def test_run_tasks_returns_the_result_if_a_server_has_ended_before():
    """A worker with nothing to do may talk to a server that has ended with the call, before it hears of that itself."""
    was_idle = threading.Event()

    def idle():
        was_idle.set()
        raise ClusterError("ps 0 was lost: its connection closed")

    with ServedDispatcher() as served:
        served.start(1, doubled, on_idle=idle)
        assert was_idle.wait(DEADLINE)
        served.end()
    assert served.errors == []
    assert served.results == [{"epochs": 3}]


def test_attached_arrays_are_read_when_a_task_is_taken():
    number = 0
    with ServedDispatcher(attached=lambda: {"newest": np.int64(number)}) as served:
        for _ in range(2):
            served.dispatcher.schedule({}, {"own": np.ones(1)})
        client = served.client(1)
        for number in (7, 9):  # The dispatcher asks for it.
            task = client.take(1)
            assert (int(task.arrays["newest"]), int(task.arrays["own"][0])) == (number, 1)


@pytest.mark.slow
def test_an_abort_reaches_every_waiting_request():
    with ServedDispatcher() as served:
        taking, asking, ending, ahead = (served.client(index) for index in (1, 2, 3, 4))
        for client in (taking, asking, ending):
            client.enter(1)
        waits = [lambda: taking.take(1), lambda: asking.wait_for(1, "epoch 0"), lambda: ending.wait_for_end(1)]
        for wait in (*waits, lambda: ahead.enter(2)):
            served.in_thread(wait)
        served.dispatcher.abort("the chief has ended: Ctrl-C", INTERRUPTED)
        served.wait()
        assert [(str(error), error.exit_code) for error in served.errors] == [
            ("the chief has ended: Ctrl-C", INTERRUPTED)
        ] * 4
        with pytest.raises(ClusterError, match="Ctrl-C"):  # Who comes later hears it, too.
            served.client(1).enter(1)


@pytest.mark.parametrize("before", [["enter"], ["enter", "leave"]], ids=["in a call", "between two calls"])
def test_an_abort_waits_until_all_sessions_have_left(before, monkeypatch):
    """The chief's process ends after it: what they are told must be on the way by then."""
    monkeypatch.setattr(task_dispatcher, "_ABORT_SECONDS", 2 * DEADLINE)
    dispatcher, one = opened(), session(1)
    for kind in before:
        request(dispatcher, one, kind)
    aborting = threading.Thread(target=dispatcher.abort, args=("the chief has ended",), daemon=True)
    aborting.start()
    wait_until(lambda: dispatcher.has_failed, "the abort")
    assert request(dispatcher, one, "take")[0]["kind"] == "failed"
    aborting.join(0.2)
    assert aborting.is_alive()
    dispatcher.leave(one)
    aborting.join(DEADLINE)
    assert not aborting.is_alive()


@pytest.mark.parametrize("wait", ["ask", "enter"])
def test_a_wait_for_the_chief_ends_when_it_publishes_or_opens_the_call(wait):
    with ServedDispatcher() as served:
        client = served.client(1)
        if wait == "ask":
            served.in_thread(lambda: client.wait_for(1, "pass 1"))
            served.dispatcher.publish("pass 1", {"seed": 3}, {"state": np.ones(2)})
        else:
            served.in_thread(lambda: client.enter(2))
            served.dispatcher.close({})
            served.dispatcher.open(2)
        served.wait()
        assert not served.errors
        if wait == "ask":
            what, arrays = served.results[0]
            assert (what, arrays["state"].tolist()) == ({"seed": 3}, [1, 1])


@pytest.mark.parametrize(
    ("wait", "words"),
    [("ask", "a message for all workers"), ("enter", "the beginning of a call"), ("take", "a task")],
)
def test_a_chief_that_answers_and_does_nothing_is_named_after_the_limit(wait, words):
    with ServedDispatcher() as served:
        client = served.client(1, timeout_seconds=0.1, long_seconds=0.4)
        ask = {"ask": lambda: client.wait_for(1, "a"), "enter": lambda: client.enter(2), "take": lambda: client.take(1)}
        with pytest.raises(
            ClusterError, match=r"chief at \S+ answers, and has done nothing for \d+ s, .* waits for " + words
        ) as caught:
            ask[wait]()
        assert caught.value.exit_code == NO_PROGRESS


@pytest.mark.slow
def test_a_chief_that_makes_steps_is_waited_for():
    clock, answers = Clock(), []
    with ServedDispatcher(clock=clock) as served:
        handle = served.dispatcher.handle
        served.dispatcher.handle = lambda *request: answers.append(handle(*request)) or answers[-1]
        client = served.client(1, long_seconds=1.5 * DEADLINE)
        served.in_thread(lambda: client.wait_for(1, "a"))

        def make_a_step():
            clock.now += DEADLINE
            served.dispatcher.note_progress()
            return len(answers) == 4

        wait_until(make_a_step, "four requests")
        served.dispatcher.publish("a", {"seed": 3})
        served.wait()
        assert not served.errors
        assert served.results[0][0] == {"seed": 3}


# --- the dispatcher without sockets ------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def session(index, job=None):
    return ClientSession(peer(index, job=job))


def request(dispatcher, who, kind, call=1, **more):
    """What the dispatcher answers at once."""
    return dispatcher.handle(who, {"kind": kind, "call": call, "seconds": 0, **more}, {})


def kind_of(dispatcher, who, kind, call=1, **more):
    return request(dispatcher, who, kind, call, **more)[0]["kind"]


def opened(**options):
    dispatcher = TaskDispatcher(**options)
    dispatcher.open(1)
    return dispatcher


def test_a_late_process_gets_the_call_or_its_result_and_an_early_one_waits():
    dispatcher, early, late = opened(), session(1), session(2)
    assert kind_of(dispatcher, early, "enter") == "entered"
    assert kind_of(dispatcher, early, "enter", call=2) == "nothing"
    assert kind_of(dispatcher, late, "enter") == "entered"
    for each in (early, late):
        assert kind_of(dispatcher, each, "leave") == "noted"
    dispatcher.close({"loss": 0.5})
    assert request(dispatcher, session(3), "enter")[0] == {"kind": "over", "result": {"loss": 0.5}}
    assert kind_of(dispatcher, early, "enter", call=2) == "nothing"
    dispatcher.open(2)
    assert kind_of(dispatcher, early, "enter", call=2) == "entered"
    for kind in ("enter", "take", "ask"):
        assert request(dispatcher, late, kind)[0] == {"kind": "over", "result": {"loss": 0.5}}


def test_arrays_of_a_result_are_there_until_the_next_call_with_arrays_ends_and_some_longer():
    dispatcher = opened()
    dispatcher.close({"call": 1}, {"w": np.ones(3)}, {"hooks": np.ones(2)})
    dispatcher.open(2)
    dispatcher.close({"call": 2})
    dispatcher.open(3)
    assert list(request(dispatcher, session(1), "enter", call=1)[1]) == ["w", "hooks"]
    dispatcher.close({"call": 3}, {"w": np.zeros(3)})
    message, arrays = request(dispatcher, session(1), "enter", call=1)
    assert (message["result"], list(arrays)) == ({"call": 1}, ["hooks"])
    assert request(dispatcher, session(1), "enter", call=3)[1]["w"].sum() == 0


def test_a_published_message_replaces_the_earlier_one_of_its_call():
    dispatcher, worker = opened(), session(1)
    assert kind_of(dispatcher, worker, "ask", key="state") == "nothing"
    for number in (1, 2):
        dispatcher.publish("state", {"number": number}, {"w": np.int64(number)})
        message, arrays = request(dispatcher, worker, "ask", key="state")
        assert (message, int(arrays["w"])) == ({"kind": "published", "what": {"number": number}}, number)
    dispatcher.close({})
    dispatcher.open(2)
    assert kind_of(dispatcher, worker, "ask", call=2, key="state") == "nothing"


def test_an_overdue_task_goes_to_a_second_worker_and_counts_once():
    clock = Clock()
    dispatcher, stuck, quick = opened(timeout_seconds=60, clock=clock), session(1), session(2)
    result = dispatcher.schedule({"batch": 0})
    assert request(dispatcher, stuck, "take")[0]["task"] == 0
    clock.now += 59
    assert kind_of(dispatcher, quick, "take") == "nothing"
    clock.now += 1
    assert request(dispatcher, quick, "take")[0] == {"kind": "task", "task": 0, "what": {"batch": 0}}
    assert kind_of(dispatcher, session(3), "take") == "nothing"
    assert request(dispatcher, quick, "finish", task=0, result={"by": "quick"})[0]["counts"]
    assert not request(dispatcher, stuck, "finish", task=0, result={"by": "stuck"})[0]["counts"]
    assert result.result(0)[0] == {"by": "quick"}
    assert dispatcher.is_idle


def test_a_result_of_an_earlier_call_does_not_count_in_this_one():
    dispatcher, worker = opened(), session(1)
    dispatcher.schedule({})
    assert kind_of(dispatcher, worker, "take") == "task"
    dispatcher.close({})
    dispatcher.open(2)
    result = dispatcher.schedule({})
    assert kind_of(dispatcher, worker, "take", call=2) == "task"
    assert not request(dispatcher, worker, "finish", call=1, task=0, result={})[0]["counts"]
    assert not result.done()
    assert request(dispatcher, worker, "finish", call=2, task=0, result={})[0]["counts"]
    assert result.done()


def test_a_server_that_leaves_an_open_call_fails_it_and_is_named():
    dispatcher, server = opened(), session(1, "ps")
    assert kind_of(dispatcher, server, "enter") == "entered"
    result = dispatcher.schedule({})
    dispatcher.leave(server)
    with pytest.raises(
        ClusterError, match=r"^ps 1 of 4 \(here, process 1001\) was lost, and with it the vari"
    ) as caught:
        dispatcher.join()
    assert caught.value.exit_code == PEER_LOST == 75
    assert isinstance(result.exception(0), ClusterError)
    assert request(dispatcher, session(2), "take")[0] == {"kind": "failed", "sentence": str(caught.value), "code": 75}


@pytest.mark.parametrize("job", ["worker", "evaluator", "ps"])
def test_only_a_server_that_leaves_an_open_call_fails_it(job):
    dispatcher, one = opened(timeout_seconds=0), session(1, job)
    request(dispatcher, one, "enter")
    if job == "ps":
        dispatcher.close({})
    dispatcher.leave(one)
    assert not dispatcher.has_failed
    dispatcher.open(2)


def test_only_workers_are_counted_as_such():
    dispatcher = opened()
    for number, job in enumerate(("worker", "worker", "ps", "evaluator"), 1):
        request(dispatcher, session(number, job), "enter")
    assert dispatcher.worker_count == 2


def test_closing_a_call_waits_for_present_processes():
    with ServedDispatcher() as served:
        client = served.client(1)
        client.enter(1)
        closing = threading.Thread(target=lambda: served.dispatcher.close({"epochs": 1}), daemon=True)
        closing.start()
        assert client.wait_for_end(1).what == {"epochs": 1}
        assert closing.is_alive()  # It waits for that client to leave.
        client.leave(1)
        closing.join(DEADLINE)
        assert not closing.is_alive()
        assert served.logged == []


def test_closing_a_call_does_not_wait_for_lost_processes():
    with ServedDispatcher() as served:
        client = served.client(1)
        client.enter(1)
        closing = threading.Thread(target=lambda: served.dispatcher.close({}), daemon=True)
        closing.start()
        client.close()
        closing.join(DEADLINE)
        assert not closing.is_alive()


def test_closing_a_call_has_a_time_limit_and_names_late_processes():
    logged = []
    dispatcher = opened(timeout_seconds=0.05, log=logged.append)
    for each in (session(2, "ps"), session(1)):
        request(dispatcher, each, "enter")
    dispatcher.close({})
    assert logged == [
        "ps 2 of 4 (here, process 1002) and worker 1 of 4 (here, process 1001) did not fetch the result of the call within 0.05 s; "
        "the chief continues"
    ]
    dispatcher.open(2)
    assert dispatcher.worker_count == 0


def test_a_chief_that_ends_before_it_answers_is_no_loss_for_a_process_that_leaves():
    with ServedDispatcher() as served:
        client = served.client(1)
        client.enter(1)
        served.server.stop()
        client.leave(1)
        with pytest.raises(ClusterError, match="was lost"):  # But it is one for the next call.
            client.enter(2)


OTHERS = [("worker", 1), ("ps", 2)]


def waits_for_stragglers(dispatcher):
    waiting = threading.Thread(target=lambda: dispatcher.wait_for_stragglers(OTHERS), daemon=True)
    waiting.start()
    return waiting


def test_the_chief_ends_after_each_connected_process_has_left_the_last_call():
    """A process may be between two calls, or may just have connected, while the chief makes the last ones."""
    dispatcher, worker, server = opened(), session(1), session(2, "ps")
    for each in (worker, server):
        request(dispatcher, each, "leave")
    dispatcher.close({})
    dispatcher.wait_for_stragglers(OTHERS)
    dispatcher.open(2)
    dispatcher.close({})
    waiting = waits_for_stragglers(dispatcher)
    assert kind_of(dispatcher, worker, "enter", call=2) == "over"
    dispatcher.leave(server)  # Its connection has ended.
    assert waiting.is_alive()
    request(dispatcher, worker, "leave", call=2)
    waiting.join(DEADLINE)
    assert not waiting.is_alive()


def test_the_chief_ends_after_each_process_has_come():
    dispatcher, worker = opened(), session(1)
    request(dispatcher, worker, "leave")
    dispatcher.close({})
    waiting, server = waits_for_stragglers(dispatcher), session(2, "ps")
    request(dispatcher, server, "enter")
    assert waiting.is_alive()
    request(dispatcher, server, "leave")
    waiting.join(DEADLINE)
    assert not waiting.is_alive()


def test_the_wait_for_processes_that_have_not_come_ends_with_the_limit_of_the_start():
    clock = Clock()
    dispatcher = TaskDispatcher(timeout_seconds=60, clock=clock)
    dispatcher.wait_for_stragglers(OTHERS)  # Without a call nobody has missed anything.
    dispatcher.open(1)
    waiting = waits_for_stragglers(dispatcher)
    assert waiting.is_alive()
    clock.now += 60
    waiting.join(DEADLINE)
    assert not waiting.is_alive()


def test_the_chief_that_has_failed_does_not_wait_for_stragglers():
    dispatcher = opened()
    dispatcher.abort("no memory")
    dispatcher.wait_for_stragglers(OTHERS)
    assert dispatcher.has_failed


def test_a_failure_never_has_the_exit_code_of_success():
    """A handler of signals may end the chief with ``sys.exit(0)`` while it waits."""
    dispatcher = opened()
    dispatcher.fail_calls("the chief has ended", exit_code_of(SystemExit(0)))
    with pytest.raises(ClusterError) as raised:
        dispatcher.raise_failure()
    assert raised.value.exit_code == USER_ERROR


def test_a_failed_call_holds_up_the_end_of_the_chief_only(monkeypatch):
    """The chief first says what has failed, and ends when the others have been told."""
    monkeypatch.setattr(task_dispatcher, "_ABORT_SECONDS", 2 * DEADLINE)
    dispatcher, worker = opened(), session(1)
    request(dispatcher, worker, "enter")
    dispatcher.fail_calls("no memory")
    assert request(dispatcher, worker, "take")[0]["kind"] == "failed"
    waiting = waits_for_stragglers(dispatcher)
    waiting.join(0.2)
    assert waiting.is_alive()
    dispatcher.leave(worker)
    waiting.join(DEADLINE)
    assert not waiting.is_alive()


def test_tasks_without_a_worker_have_a_time_limit():
    dispatcher = opened(timeout_seconds=0.05)
    request(dispatcher, session(1, "ps"), "enter")
    dispatcher.schedule({})
    with pytest.raises(ClusterError, match=r"finished for 0\.05 s, of 1: no worker has requested one") as caught:
        dispatcher.join()
    assert caught.value.exit_code == NO_PROGRESS


def test_an_unfinished_task_has_a_time_limit_and_names_its_worker():
    clock = Clock()
    dispatcher, worker = opened(long_seconds=600, clock=clock), session(3)
    request(dispatcher, worker, "enter")
    dispatcher.schedule({})
    request(dispatcher, worker, "take")
    looks = iter([599, 1])

    def until():
        clock.now += next(looks)
        return False

    with pytest.raises(
        ClusterError, match=r"for 600 s, of 1: worker 3 of 4 \(here, process 1003\) has task 0"
    ) as caught:
        dispatcher.wait_until(until)
    assert caught.value.exit_code == NO_PROGRESS
    assert next(looks, None) is None  # At the first look there was time left.


def with_a_task_after_a_long_time_of_the_script(clock):
    """The scripts of the chief and of worker 1 do something else for longer than the limit, after a function was scheduled."""
    dispatcher, worker = opened(long_seconds=600, clock=clock), session(1)
    request(dispatcher, worker, "enter")
    dispatcher.schedule({})
    clock.now += 700
    return dispatcher, worker


@pytest.mark.slow
@pytest.mark.parametrize("is_poll", [False, True])
def test_the_time_limit_of_a_wait_begins_with_the_wait(is_poll):
    clock = Clock()
    dispatcher, worker = with_a_task_after_a_long_time_of_the_script(clock)

    def done_at_last():
        if request(dispatcher, worker, "take")[0]["kind"] == "nothing":  # It has taken it at the look before.
            request(dispatcher, worker, "finish", task=0, result={})
        clock.now += 500
        return dispatcher.is_idle

    dispatcher.wait_until(done_at_last, is_poll=is_poll)
    dispatcher.schedule({})
    with pytest.raises(ClusterError, match="No task was finished for 600 s, of 2"):
        dispatcher.wait_until(lambda: setattr(clock, "now", clock.now + 500))


@pytest.mark.slow
def test_the_time_limit_holds_for_a_loop_over_done():
    clock = Clock()
    dispatcher, _ = with_a_task_after_a_long_time_of_the_script(clock)
    poll = lambda: dispatcher.wait_until(iter([False, True]).__next__, is_poll=True)  # noqa: E731
    for _ in range(3):
        poll()
        clock.now += 200
    with pytest.raises(ClusterError, match="No task was finished for 600 s, of 1"):
        poll()


@pytest.mark.slow
def test_each_finished_task_restarts_the_time_limit():
    clock = Clock()
    dispatcher, worker = opened(long_seconds=600, clock=clock), session(1)
    request(dispatcher, worker, "enter")
    results = [dispatcher.schedule({}) for _ in range(3)]

    def one_more():
        clock.now += 500
        number = request(dispatcher, worker, "take")[0]["task"]
        request(dispatcher, worker, "finish", task=number, result={})
        return dispatcher.is_idle

    dispatcher.wait_until(one_more)
    assert all(result.done() for result in results)


def test_the_wait_for_a_first_worker_is_logged():
    clock, logged = Clock(), []
    dispatcher, worker = opened(clock=clock, log=logged.append), session(1)

    def until():
        clock.now += 3
        if logged:
            request(dispatcher, worker, "enter")
        return bool(logged)

    dispatcher.wait_until(until)
    assert logged == ["waiting for a worker, 3 s"]


WRONG = {
    "an unknown word": ({"kind": "sing"}, (), "there is no 'sing'"),
    "arrays with a question": (
        {"kind": "take"},
        (ArraySpec("w", (2,), "float32"),),
        "8 bytes follow a 'take': at most 0",
    ),
    "no array with a question": ({"kind": "ask"}, (ArraySpec("w", (0,), "float32"),), "0 bytes follow a 'ask'"),
}


@pytest.mark.parametrize(("message", "given", "reason"), WRONG.values(), ids=WRONG)
def test_an_invalid_request_is_refused_before_its_arrays_are_read(message, given, reason):
    with pytest.raises(ProtocolError, match=reason):
        opened().check(message, given)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("enter", {"call": "one"}, "call: expected a whole number"),
        ("take", {"seconds": -1}, "seconds: expected a number from 0"),
        ("finish", {"task": 0}, "a 'finish' has no result"),
        ("finish", {"task": None, "result": {}}, "task: expected a whole number"),
        ("fail", {"summary": "x", "task": "1"}, "task: expected a whole number"),
    ],
)
def test_an_incomplete_request_is_refused(kind, more, reason):
    with pytest.raises(ProtocolError, match=reason):
        request(opened(), session(1), kind, **more)


# --- all of it together ------------------------------------------------------------------------------------------------

TRUTH = np.float32([[1.0], [-2.0], [0.5]])
ROWS = np.random.default_rng(0).normal(size=(60, 16, 3)).astype("float32")


def step(client, number, batch):
    """One worker fits a line to one batch; whoever else does the same task, it counts once."""
    w = client.pull()["w"]
    client.push({"w": 2 * batch.T @ (batch @ w - batch @ TRUTH) / len(batch)}, task=number)


def trained(slow=None, dies=None):
    """Three workers, one batch a task of work; gives the error of the weights, and how many batches each worker has done.

    The slow one needs for its first batch as long as the others for all that are left.
    """
    counts, begun, others_ended = [0, 0, 0], threading.Event(), threading.Event()
    specs = (ArraySpec("w", (3, 1), "float32"),)
    with Servers(1, specs=specs, optimizer=lambda: keras.optimizers.SGD(0.1)) as servers, ServedDispatcher() as served:
        chief = servers.client(0)
        chief.fill({"w": np.zeros((3, 1), "float32")})
        for batch in range(60):
            served.dispatcher.schedule({"batch": batch})
        for index in range(3):
            client = servers.client(index + 1)
            if index == dies:  # It has pushed its gradient, and has not logged so.
                dying = served.client(index + 1)
                task = dying.take(1)
                step(client, task.number, ROWS[task.what["batch"]])
                dying.close()
                continue

            def do(task, index=index, client=client):
                step(client, task.number, ROWS[task.what["batch"]])
                if index == slow:
                    begun.set()
                    assert others_ended.wait(DEADLINE)
                elif slow is not None:
                    assert begun.wait(DEADLINE)
                counts[index] += 1
                if sum(counts) == 59:
                    others_ended.set()
                return {}, {}

            served.start(index + 1, do)
        served.dispatcher.join()
        served.end()
        assert chief.statistics()[0]["updates"] == 60
        return np.abs(chief.pull()["w"] - TRUTH).max(), counts


def test_workers_that_do_not_wait_for_each_other_train_together():
    error, counts = trained()
    assert error < 1e-3  # 60 steps of gradient descent shrink it by about 0.8 each.
    assert sum(counts) == 60


def test_a_slow_worker_blocks_no_worker():
    error, counts = trained(slow=1)
    assert error < 1e-3
    assert (counts[1], counts[0] + counts[2]) == (1, 59)


def test_a_batch_of_a_worker_that_dies_is_done_again_and_counts_once():
    error, counts = trained(dies=2)
    assert error < 1e-3
    assert (sum(counts), counts[2]) == (60, 0)
