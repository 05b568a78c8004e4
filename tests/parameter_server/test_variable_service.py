"""Workers and servers over real sockets: the numbers are right, every wait ends with a name, and what is wrong harms one connection."""

import socket
import threading
import time
from unittest.mock import Mock

import keras
import numpy as np
import pytest

from lockstep import ClusterError
from lockstep._array_encoding import ArraySpec
from lockstep._errors import NO_PROGRESS, PEER_LOST, USER_ERROR
from lockstep.parameter_server import rpc
from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
from lockstep.parameter_server.sparse_rows import SparseGradient
from lockstep.parameter_server.variable_client import BatchPart
from lockstep.parameter_server.variable_server import VariableService, serve
from lockstep.parameter_server.variable_store import OPTIMIZER, Push, VariableStore
from tests.parameter_server.threaded_servers import DEADLINE, SPECS, Servers, framed, values_of
from tests.support.waiting import wait_until


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all((np.asarray(found[name]) == value).all() for name, value in expected.items())


def in_thread(function):
    """Runs it beside; gives what waits for its result, or raises what it raised."""
    found = []

    def run():
        try:
            found.append((function(), None))
        except ClusterError as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE)
        assert found, "it did not end"
        if found[0][1] is not None:
            raise found[0][1]
        return found[0][0]

    return result


@pytest.mark.parametrize(("count", "partitioner"), [(1, None), (2, None), (3, FixedShardsPartitioner(2))])
def test_what_is_pushed_is_applied_and_pulled(count, partitioner):
    with Servers(count, partitioner=partitioner, secret=b"known") as servers:
        chief, worker = servers.client(0), servers.client(1)
        chief.fill(values_of())
        assert_equal(worker.pull(), values_of())
        gradient = values_of(seed=1)
        assert [reply["version"] for reply in worker.push(gradient)] == [1] * count
        expected = {name: value - np.float32(0.5) * gradient[name] for name, value in values_of().items()}
        assert_equal(chief.pull(), expected)
        assert chief.versions == [1] * count
        assert chief.traffic[0] > sum(value.nbytes for value in expected.values())


def test_a_server_without_variables_serves():
    with Servers(2, specs=SPECS[:1]) as servers:
        chief = servers.client(0)
        chief.fill(values_of(SPECS[:1]))
        chief.push(values_of(SPECS[:1], seed=1))
        assert list(chief.pull()) == ["dense/kernel"]
        assert chief.versions == [1, 1]


def test_only_the_rows_that_are_asked_for_or_touched_travel():
    specs = (ArraySpec("table", (100_000, 8), "float32"),)
    with Servers(2, specs=specs, partitioner=FixedShardsPartitioner(2)) as servers:
        chief = servers.client(0)
        table = values_of(specs)["table"]
        chief.fill({"table": table})
        worker = servers.client(1)
        rows = np.array([99_999, 3, 50_000, 3], np.int32)
        assert (worker.pull({"table": rows})["table"] == table[rows]).all()
        worker.push({"table": SparseGradient(rows, np.ones((4, 8), np.float32))})
        changed = table.copy()
        np.subtract.at(changed, rows, np.float32(0.5))
        again = worker.pull({"table": rows})["table"]
        np.testing.assert_allclose(again, changed[rows], atol=1e-6)  # Row 3 gets 1.0 at once, not 0.5 twice.
        assert sum(worker.traffic) < 10_000
        np.testing.assert_allclose(chief.pull()["table"], changed, atol=1e-6)


def test_every_push_of_many_workers_is_applied_once():
    with Servers(2) as servers:
        servers.client(0).fill({name: np.zeros_like(value) for name, value in values_of().items()})
        one = {name: np.ones_like(value) for name, value in values_of().items()}

        def work(index):
            client = servers.client(index)
            for step in range(10):
                client.pull()
                client.push(one, task=10 * (index - 1) + step)
            client.pull()

        for result in [in_thread(lambda index=index: work(index)) for index in (1, 2, 3)]:
            result()
        chief = servers.client(0)
        assert_equal(chief.pull(), {name: -15 * value for name, value in one.items()})
        for each in chief.statistics():
            assert each["updates"] == sum(count for _, count in each["staleness"]) == 30
            assert max(staleness for staleness, _ in each["staleness"]) <= 29


def test_a_reassigned_batch_counts_once_on_each_server():
    with Servers(2) as servers:
        chief, worker = servers.client(0), servers.client(1)
        chief.fill(values_of())
        gradient = values_of(seed=1)
        assert [reply["was_applied"] for reply in worker.push(gradient, task=0)] == [True, True]
        assert [reply["was_applied"] for reply in chief.push(gradient, task=0)] == [False, False]
        assert [each["updates"] for each in chief.statistics()] == [1, 1]


def test_a_repeated_push_is_answered_when_the_first_one_is_applied(monkeypatch):
    with Servers(1) as servers:
        chief, first, second = servers.client(0), servers.client(1), servers.client(2)
        chief.fill(values_of())
        gradient, began, goes_on, apply = values_of(seed=1), threading.Event(), threading.Event(), VariableStore.apply
        came, received = threading.Semaphore(0), VariableService._pushes_to_apply

        def slow_apply(store, pushes):
            began.set()
            assert goes_on.wait(DEADLINE)
            return apply(store, pushes)

        def receive(*arguments):
            came.release()
            return received(*arguments)

        monkeypatch.setattr(VariableStore, "apply", slow_apply)
        monkeypatch.setattr(VariableService, "_pushes_to_apply", receive)
        pushed = in_thread(lambda: first.push(gradient, task=0))
        assert began.wait(DEADLINE)
        repeated = in_thread(lambda: [*second.push(gradient, task=0), *second.pull().items()])
        assert all(came.acquire(timeout=DEADLINE) for _ in range(2))
        time.sleep(0.2)  # An answer that does not wait is on its way.
        goes_on.set()
        reply, *values = repeated()
        assert (reply["version"], reply["was_applied"]) == (1, False)
        assert_equal(dict(values), chief.pull())
        assert pushed()[0]["was_applied"]


def test_an_error_of_the_optimizer_is_told_and_is_no_lost_server():
    class Failing(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            raise ValueError("a fault of the optimizer")

    with Servers(1, optimizer=Failing) as servers:
        chief, worker = servers.client(0), servers.client(1)
        chief.fill(values_of())
        with pytest.raises(ClusterError, match="has refused a 'push': ValueError: a fault of the optimizer") as raised:
            worker.push(values_of(seed=1))
        assert raised.value.exit_code == USER_ERROR
        assert_equal(chief.pull(), values_of())


def test_parts_of_a_batch_make_one_update_whoever_pushes_them_in_whatever_order():
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    parts = [values_of(seed=seed) for seed in (1, 2, 3)]
    pushes = [Push(part, weight) for part, weight in zip(parts, (2, 2, 1), strict=True)]
    alone = VariableStore(SPECS, adam())
    alone.load(*alone.prepare(values_of()))
    for _ in range(2):
        alone.apply(pushes)
    with Servers(1, optimizer=adam, max_staleness=0) as servers:
        workers = [servers.client(index) for index in range(2)]
        workers[0].fill(values_of())
        for number, order in enumerate(([2, 0, 1], [1, 1, 2, 0, 0])):
            for turn, part in enumerate(order):
                workers[turn % 2].push(parts[part], weight=pushes[part].weight, part=BatchPart(number, part, 3))
        found = workers[1].pull()
        assert all(found[name].tobytes() == np.array(value).tobytes() for name, value in alone.snapshot.values.items())


def test_a_part_that_is_reassigned_gets_the_values_before_its_update_which_was_applied():
    with Servers(2, max_staleness=0) as servers:
        lost, other = servers.client(0), servers.client(1)
        lost.fill(values_of(), version=4)
        part, following = BatchPart(4, 0, 1), BatchPart(5, 0, 1)
        assert_equal(lost.pull(part=part), values_of())
        lost.push(values_of(seed=1), part=part)
        assert_equal(other.pull(part=part), values_of())
        assert other.versions == [4, 4]
        newest = other.pull()
        assert other.versions == [5, 5]
        assert_equal(other.pull(part=following), newest)
        assert_equal(lost.pull(part=part), newest)  # It stood still meanwhile, and its part counts no more.


def test_with_a_bound_a_fast_worker_waits_until_the_slowest_has_pushed():
    with Servers(2, max_staleness=1) as servers:
        fast, slow = servers.client(0), servers.client(1)
        fast.fill(values_of())
        slow.pull()
        for _ in range(2):
            fast.pull()
            fast.push(values_of(seed=1))
        waiting = in_thread(fast.pull)
        slow.push(values_of(seed=2))
        waiting()
        assert fast.versions == [3, 3]


def test_a_lost_or_paused_worker_blocks_no_worker():
    with Servers(1, max_staleness=0) as servers:
        fast, slow, idle = (servers.client(index) for index in range(3))
        fast.fill(values_of())
        slow.pull()
        idle.pull()
        fast.pull()
        fast.push(values_of(seed=1))
        waiting = in_thread(fast.pull)
        idle.pause()
        slow.close()
        waiting()


def test_a_pull_that_waits_too_long_names_the_slow_workers():
    with Servers(1, max_staleness=0) as servers:
        fast, slow = servers.client(0, timeout_seconds=0.1), servers.client(2)
        fast.fill(values_of())
        slow.pull()
        fast.pull()
        fast.push(values_of(seed=1))
        with pytest.raises(
            ClusterError, match=r"ps 0 at 127.*'pull' within 0.1 s: it waits for worker 2 of 4 \(here"
        ) as caught:
            fast.pull()
        assert caught.value.exit_code == NO_PROGRESS
        slow.push(values_of(seed=1))
        fast.pull()  # The connection is as good as before.


def test_values_that_nobody_sets_are_waited_for_with_a_limit():
    with Servers(1) as servers:
        worker = servers.client(1, timeout_seconds=0.1)
        with pytest.raises(ClusterError, match="it waits for the chief, which sets the first values"):
            worker.pull()


def test_values_that_the_chief_sets_take_the_place_of_others():
    with Servers(2) as servers:
        chief, worker = servers.client(0), servers.client(1)
        chief.fill(values_of())
        worker.push(values_of(seed=1), task=0)
        chief.fill(values_of(seed=2), version=7, task=3)
        assert_equal(worker.pull(), values_of(seed=2))
        assert worker.versions == [7, 7]
        for task, counts in ((2, False), (3, True), (3, False)):
            replies = worker.push(values_of(seed=1), task=task)
            assert [reply["was_applied"] for reply in replies] == [counts] * 2
        assert [each["updates"] for each in chief.statistics()] == [8, 8]


def test_synchronous_updates_continue_from_the_number_that_the_chief_sets():
    with Servers(1, max_staleness=0) as servers:
        chief, worker = servers.client(0), servers.client(1)
        chief.fill(values_of(), version=3)
        assert worker.push(values_of(seed=1), part=BatchPart(2, 0, 1))[0]["was_applied"] is False
        assert worker.push(values_of(seed=1), part=BatchPart(3, 0, 1))[0]["version"] == 4


def test_a_job_continues_from_the_state_of_another():
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    with Servers(2, optimizer=adam) as first, Servers(2, optimizer=adam) as second:
        one, other = first.client(0), second.client(0)
        one.fill(values_of())
        one.push(values_of(seed=1))
        known = [
            {name: array for name, array in arrays.items() if name.startswith(OPTIMIZER)} for arrays in one.state()
        ]
        other.fill(one.pull(), known, version=1)
        for client in (one, other):
            client.push(values_of(seed=2))
        assert_equal(one.pull(), other.pull())
        assert other.versions == [2, 2]


def test_a_server_that_dies_is_named():
    with Servers(2) as servers:
        worker = servers.client(0)
        worker.fill(values_of())
        servers.servers[1].stop()
        with pytest.raises(ClusterError, match=f"ps 1 at {servers.addresses[1]} was lost.*connection closed") as caught:
            worker.pull()
        assert caught.value.exit_code == PEER_LOST
        with pytest.raises(ClusterError, match=r"ps 1 at .* was lost"):
            worker.push(values_of())


def test_a_server_that_dies_during_a_pull_is_named():
    with Servers(1) as servers:
        waiting = in_thread(servers.client(1).pull)
        servers.servers[0].stop()
        with pytest.raises(ClusterError, match=r"ps 0 at .* was lost"):
            waiting()


def test_a_server_that_is_silent_is_named():
    listener = socket.create_server(("127.0.0.1", 0))
    with Servers(1) as servers, listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=f"ps 0 at {address} could not be reached within 0.1 s: .* Fix: check that it is started"
        ):
            servers.client(0, addresses=[address], timeout_seconds=0.1)


def test_a_client_that_was_closed_refuses_requests_even_while_its_thread_waits(monkeypatch):
    monkeypatch.setattr(rpc, "_MARGIN_SECONDS", 0.0)
    answers = threading.Event()
    link = Mock()
    link.send.side_effect = lambda *_: answers.wait(DEADLINE)
    client = rpc.RpcClient("ps 0", link, timeout_seconds=0.01)
    client.call({"kind": "pull"}, {}, rpc.check_no_arrays)
    client.close()
    with pytest.raises(ClusterError, match="ps 0: this worker has closed its connection there"):
        client.call({"kind": "pull"}, {}, rpc.check_no_arrays)
    answers.set()


# --- what is wrong ---------------------------------------------------------------------------------------------------


STRANGE = {
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "noise": b"\xff" * 64,
    "another beginning": framed({"kind": "push", "arrays": []}),
    "arrays before a name": framed({"kind": "hello", "nonce": "n", "protocol": 1, "arrays": [["a", "int8", [9], 9]]}),
    "nothing": b"",
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
def test_an_unauthenticated_connection_is_refused_and_harms_no_other(sent):
    with Servers(1, secret=b"known") as servers:
        client = servers.client(0)
        client.fill(values_of())
        with socket.create_connection(
            ("127.0.0.1", int(servers.addresses[0].rpartition(":")[2])), DEADLINE
        ) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        assert_equal(client.pull(), values_of())
        wait_until(lambda: servers.servers[0].rejections.reasons, "the refusal")


@pytest.mark.slow
def test_a_server_that_starts_late_is_waited_for():
    late = socket.socket()
    late.bind(("127.0.0.1", 0))  # The port is ours, and nobody listens.
    with Servers(1) as servers, late:
        waiting = in_thread(lambda: servers.client(1, addresses=[f"127.0.0.1:{late.getsockname()[1]}"]))
        wait_until(lambda: servers.said, "a line of the client")
        assert "waiting for ps 0 at 127" in servers.said[0]
        late.listen()
        with late.accept()[0] as connected:
            connected.sendall(framed({"kind": "sing"}))
            with pytest.raises(ClusterError, match=r"is not a server of this job: .*it said 'sing'"):
                waiting()


@pytest.mark.parametrize("secret", [None, b"another"])
def test_a_worker_without_the_secret_is_refused(secret):
    with Servers(1, secret=b"known") as servers:
        with pytest.raises(ClusterError, match=r"not a server of this job: .*secret"):
            servers.client(1, secret=secret)
        servers.client(0).fill(values_of())


def test_a_server_that_does_not_know_the_secret_is_not_trusted():
    with Servers(1) as servers, pytest.raises(ClusterError, match="it was given no secret, this process was"):
        servers.client(1, secret=b"known")


def test_a_worker_with_another_plan_is_refused():
    with Servers(2) as servers:
        other = plan_shards((*SPECS[1:], ArraySpec("more", (2,), "float32")), 2)
        differs = r'its digest of names and shapes of variables is "\w+", that of the server .* the same models in the same order'
        with pytest.raises(ClusterError, match=differs):
            servers.client(1, plan=other)
        with pytest.raises(ClusterError, match="its number is 0, that of the server is another one"):
            servers.client(1, addresses=servers.addresses[::-1])


WRONG = {
    "another shape": ({"kind": "push"}, {"gradient/table": np.zeros((7, 3), "float32")}, "expected float32 of shape"),
    "too large": ({"kind": "push"}, {"gradient/table": np.zeros((500_000, 2), "float32")}, "expected float32 of shape"),
    "another dtype": ({"kind": "push"}, {"gradient/table": np.zeros((7, 2), "float64")}, "got float64"),
    "one too many": ({"kind": "push"}, {"gradient/bias": np.zeros(2, "float32")}, "'gradient/bias' is not wanted"),
    "no row of it": (
        {"kind": "push"},
        {"gradient/table": None, "indices/table": np.int32([7]), "rows/table": np.zeros((1, 2), "float32")},
        "'table' has 7 rows, and one of 7 to 7 was named",
    ),
    "more rows than there are": (
        {"kind": "push"},
        {"gradient/table": None, "indices/table": np.zeros(8, "int32"), "rows/table": np.zeros((8, 2), "float32")},
        "at most 7 rows can be named",
    ),
    "rows of a number": ({"kind": "push"}, {"gradient/scale": None, "indices/scale": np.int32([0])}, "at most 0 rows"),
    "a weight of nothing": ({"kind": "push", "weight": 0}, {}, "weight: expected a number above 0, got '0'"),
    "a task of text": ({"kind": "push", "task": "one"}, {}, "task: expected a whole number"),
    "an update to come": ({"kind": "push", "update": 5, "part": 0, "parts": 1}, {}, "update 0 is due"),
    "a part without a number": ({"kind": "push", "update": 0, "parts": 1}, {}, "part: expected a whole number"),
    "no gradient": ({"kind": "push"}, {"gradient/table": None}, "lacks the gradient of 'table'"),
    "an unknown word": ({"kind": "sing"}, {}, "there is no 'sing'"),
}


@pytest.mark.parametrize(("message", "change", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_closes_that_connection_and_harms_nothing_else(message, change, reason):
    with Servers(1) as servers:
        client, wrong = servers.client(0), servers.client(1)
        client.fill(values_of())
        arrays = {f"gradient/{name}": value for name, value in values_of().items()} | change
        arrays = {name: array for name, array in arrays.items() if array is not None}
        message = {"pulled": 0} | message
        answer = wrong._rpc_clients[0].call(message, arrays, lambda reply, given: None)
        with pytest.raises(ClusterError, match=f"ps 0 at .* has refused a '{message['kind']}': .*{reason}"):
            answer.result(DEADLINE)
        with pytest.raises(ClusterError, match="has refused"):
            wrong.pull()
        assert_equal(client.pull(), values_of())
        assert reason in next(iter(servers.servers[0].rejections.reasons))
        servers.client(1).pull()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_gradient_that_is_not_finite_is_refused_and_its_worker_named(bad, is_sparse):
    with Servers(1) as servers:
        servers.client(0).fill(values_of())
        gradients = dict(values_of(seed=1))
        rows = np.full((1, 2), bad, "float32")
        gradients["table"] = SparseGradient(np.int32([3]), rows) if is_sparse else np.vstack([np.zeros((6, 2)), rows])
        gradients["table"] = gradients["table"] if is_sparse else gradients["table"].astype("float32")
        with pytest.raises(
            ClusterError, match=r"worker 1 of 4 \(here, process 1001\) has pushed a gradient of 'table'"
        ):
            servers.client(1).push(gradients)
        assert_equal(servers.client(2).pull(), values_of())


def test_a_gradient_that_is_not_finite_is_applied_if_it_is_wanted():
    with Servers(1, refuse_nonfinite=False) as servers:
        client = servers.client(0)
        client.fill(values_of())
        client.push({**values_of(seed=1), "scale": np.float32(np.nan)})
        assert np.isnan(client.pull()["scale"])


@pytest.mark.parametrize("job", ["worker", "ps", "evaluator"])
def test_only_the_chief_sets_values(job):
    with Servers(1) as servers, pytest.raises(ClusterError, match="only the chief may set the values"):
        servers.client(0, job=job).fill(values_of())


def test_a_second_chief_is_refused_and_both_are_named():
    with Servers() as servers:
        chief = servers.client(0)
        chief.fill(values_of())
        second = servers.client(5, job="chief")
        with pytest.raises(
            ClusterError, match=r"two processes .*process 1000\) .*process 1005\)\. Fix: start one"
        ) as caught:
            second.fill(values_of(seed=1))
        assert caught.value.exit_code == USER_ERROR
        assert_equal(chief.pull(), values_of())
        chief.fill(values_of(seed=2))  # The first one goes on.
        assert_equal(chief.pull(), values_of(seed=2))


def test_half_a_gradient_is_none():
    with Servers(1, max_staleness=0) as servers:
        client, dying = servers.client(0), servers.client(1)
        client.fill(values_of())
        dying.pull()
        described = [
            [f"gradient/{spec.name}", spec.dtype, list(spec.shape), 4 * int(np.prod(spec.shape))] for spec in SPECS
        ]
        dying._rpc_clients[0]._link._socket.sendall(framed({"kind": "push", "arrays": described}) + b"\1" * 20)
        dying._rpc_clients[0]._link.close()
        client.pull()
        client.push(values_of(seed=1))
        client.pull()
        assert client.versions == [1]


def test_one_who_says_nothing_keeps_nobody_out():
    with Servers(1) as servers:
        address = ("127.0.0.1", int(servers.addresses[0].rpartition(":")[2]))
        silent = [socket.create_connection(address, DEADLINE) for _ in range(5)]
        client = servers.client(0)
        client.fill(values_of())
        assert_equal(client.pull(), values_of())
        for each in silent:
            each.close()


def test_a_process_for_whom_there_is_no_thread_tries_again_and_others_are_served(monkeypatch):
    refused = []

    class Scarce(threading.Thread):
        def start(self):
            if (
                self.name.endswith("(_run)") and len(refused) < 2
            ):  # Of the server; those of clients have names of their own.
                refused.append(self)
                raise RuntimeError("can't start new thread")
            super().start()

    with Servers(1) as servers:
        chief = servers.client(0)
        chief.fill(values_of())
        monkeypatch.setattr(rpc.threading, "Thread", Scarce)
        assert_equal(servers.client(1).pull(), values_of())
        assert len(refused) == 2
        assert any("can't start new thread" in reason for reason in servers.servers[0].rejections.reasons)
        assert_equal(chief.pull(), values_of())


def test_a_server_that_still_serves_the_last_call_is_waited_for():
    with Servers(identity={"call": 1}) as servers:
        ready = threading.Event()

        def serve_next_call():
            wait_until(lambda: any("its call is 2" in line for line in servers.said), "a refusal")
            servers.servers[0].stop()
            listener = socket.create_server(("127.0.0.1", int(servers.addresses[0].rpartition(":")[2])))
            me = servers.server_peer(0, {"call": 2})
            server = serve(me, servers.plan, keras.optimizers.SGD(), listener, log=servers.said.append)
            servers.callback(server.stop)
            ready.set()

        serving = threading.Thread(target=serve_next_call, daemon=True)
        serving.start()
        servers.callback(serving.join, DEADLINE)
        servers.client(0, identity={"call": 2}).fill(values_of())
        assert ready.wait(DEADLINE)
