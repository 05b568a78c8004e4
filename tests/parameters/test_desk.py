"""The chief hands out work over real sockets: all is done, whoever dies, and every wait ends."""

import contextlib
import socket
import threading
import time

import keras
import numpy as np
import pytest

from lockstep import ClusterError
from lockstep.cluster import exit_codes
from lockstep.parameters.courier import connect
from lockstep.parameters.desk import Desk
from lockstep.parameters.server import ArrayServer
from lockstep.parameters.shards import Spec
from lockstep.parameters.working import work
from tests.parameters.jobs import DEADLINE, Servers, peer


class Office(contextlib.ExitStack):
    """A desk behind sockets, and workers that are threads."""

    def __init__(self, **options):
        super().__init__()
        self.said, self.errors, self._threads = [], [], []
        self.desk = Desk(announce=self.said.append, **options)
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = ArrayServer(peer(0), self.desk, listener, announce=self.said.append)
        self.server.start()
        self.callback(self.server.stop)

    def courier(self, index):
        courier = connect("chief", self._address, peer(index), None, DEADLINE, self.said.append)
        self.callback(courier.close)
        return courier

    def start(self, index, do):
        def run():
            try:
                work(self.courier(index), do)
            except (ClusterError, ZeroDivisionError) as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self):
        self.desk.close()
        self.wait()

    def wait(self):
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def doubled(number, what, arrays):
    return {"by": what["name"]}, {"twice": 2 * arrays["once"]}


def test_results_come_back_to_those_who_asked():
    with Office() as office:
        results = [office.desk.schedule({"name": str(n)}, {"once": np.arange(n)}) for n in range(20)]
        for index in (1, 2, 3):
            office.start(index, doubled)
        office.desk.join(DEADLINE)
        for n, result in enumerate(results):
            message, arrays = result.result(0)
            assert message == {"by": str(n)}
            assert (arrays["twice"] == 2 * np.arange(n)).all()
        office.end()


def test_a_worker_that_comes_late_finds_work():
    with Office() as office:
        office.start(1, doubled)
        office.desk.schedule({"name": "a"}, {"once": np.ones(1)}).result(DEADLINE)
        office.start(2, doubled)
        for n in range(5):
            office.desk.schedule({"name": str(n)}, {"once": np.ones(1)})
        office.desk.join(DEADLINE)
        assert office.desk.is_idle
        office.end()


def test_what_a_dead_worker_had_is_done_by_others_and_said_so():
    with Office() as office:
        result = office.desk.schedule({"name": "a"}, {"once": np.ones(3)})
        dying = office.courier(1)
        assert dying.ask({"kind": "take", "seconds": 1}, {}, lambda message, given: None).result()[0]["task"] == 0
        office.start(2, doubled)
        dying.close()
        assert result.result(DEADLINE)[1]["twice"].sum() == 6
        office.end()
        assert any(
            "worker 1 of 4 (here, process 1001) has gone: others do piece 0 of the work again" in x for x in office.said
        )


def test_work_that_fails_is_raised_at_the_chief_and_ends_all():
    with Office() as office:
        office.start(1, lambda number, what, arrays: 1 / 0)
        result = office.desk.schedule({})
        with pytest.raises(
            ClusterError, match=r"worker 1 of 4 .* failed in piece 0 of the work: ZeroDivisionError"
        ) as caught:
            office.desk.join(DEADLINE)
        assert caught.value.exit_code == exit_codes.USER_ERROR
        with pytest.raises(ClusterError, match="ZeroDivisionError"):
            result.result(DEADLINE)
        with pytest.raises(ClusterError, match="ZeroDivisionError"):
            office.desk.schedule({})
        office.end()
        assert isinstance(office.errors[0], ZeroDivisionError)


def test_work_that_nobody_takes_or_finishes_has_a_limit_and_a_name():
    with Office() as office:
        office.desk.schedule({})
        with pytest.raises(ClusterError, match=r"finished for 0\.05 s, of 1: no worker has asked for any"):
            office.desk.join(0.05)
        office.courier(3).ask({"kind": "take", "seconds": 1}, {}, lambda message, given: None).result()
        with pytest.raises(ClusterError, match=r"worker 3 of 4 \(here, process 1003\) has piece 0") as caught:
            office.desk.join(0.05)
        assert caught.value.exit_code == exit_codes.NO_PROGRESS


def test_a_result_that_is_too_large_is_refused():
    with Office(result_bytes=100) as office:
        office.desk.schedule({})
        office.start(1, lambda number, what, arrays: ({}, {"large": np.zeros(101, np.int8)}))
        office.wait()
        assert "101 bytes follow a 'finish': at most 100 may" in str(office.errors[0])


# --- all of it together ------------------------------------------------------------------------------------------------

TRUTH = np.float32([[1.0], [-2.0], [0.5]])
ROWS = np.random.default_rng(0).normal(size=(60, 16, 3)).astype("float32")


def step(client, number, batch):
    """One worker fits a line to one batch; whoever else does the same piece, it counts once."""
    w = client.pull()["w"]
    client.push({"w": 2 * batch.T @ (batch @ w - batch @ TRUTH) / len(batch)}, task=number).wait()


def trained(slow=None, dies=None):
    """Three workers, one batch a piece of work; gives the error of the weights, and how many batches each worker has done."""
    counts = [0, 0, 0]
    specs = (Spec("w", (3, 1), "float32"),)
    with Servers(1, specs=specs, optimizer=lambda: keras.optimizers.SGD(0.1)) as servers, Office() as office:
        chief = servers.client(0)
        chief.fill({"w": np.zeros((3, 1), "float32")})
        for batch in range(60):
            office.desk.schedule({"batch": batch})
        for index in range(3):
            client = servers.client(index)
            if index == dies:  # It has pushed its gradient, and has not said so.
                courier = office.courier(index)
                piece, _ = courier.ask({"kind": "take", "seconds": 1}, {}, lambda message, given: None).result()
                step(client, piece["task"], ROWS[piece["what"]["batch"]])
                courier.close()
                continue

            def do(number, what, arrays, index=index, client=client):
                step(client, number, ROWS[what["batch"]])
                time.sleep(0.05 if index == slow else 0.005)  # The time that a batch takes.
                counts[index] += 1
                return {}, {}

            office.start(index, do)
        office.desk.join(DEADLINE)
        office.end()
        assert chief.statistics()[0]["updates"] == 60
        return np.abs(chief.pull()["w"] - TRUTH).max(), counts


def test_workers_that_do_not_wait_for_each_other_train_together():
    error, counts = trained()
    assert error < 1e-3  # 60 steps of gradient descent shrink it by about 0.8 each.
    assert sum(counts) == 60


def test_a_slow_worker_does_few_batches_and_holds_up_nobody():
    error, counts = trained(slow=1)
    assert error < 1e-3
    assert counts[1] < min(counts[0], counts[2])


def test_a_batch_of_a_worker_that_dies_is_done_again_and_counts_once():
    error, counts = trained(dies=2)
    assert error < 1e-3
    assert (sum(counts), counts[2]) == (60, 0)
