"""The self-test of a cluster names the pair that fails; the network is made up here, a real one is in test_launch."""

import io
import threading
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.tools.cluster_check import SIZES, report, run_cluster_check


@dataclass
class Echo:
    """A session in which all workers say what this one says, or the first one another error."""

    group: WorkerGroup
    first_error: str | None = None

    def gather(self, topic, value, timeout_seconds=None):
        others = [value] * (self.group.workers - 1)
        return [[(), self.first_error] if self.first_error and topic != "the clocks" else value, *others]

    def barrier(self, topic):
        """Everybody is here."""


def outcome(reduce, seconds):
    session = Echo(WorkerGroup(3, 1, "127.0.0.1:12421"))
    measured, clocks = run_cluster_check(session, jax.devices()[:3], reduce, seconds)
    return [one for one in measured if 1 in one.workers], clocks  # This one knows nothing of the others.


def workers_of(placement):
    return [jax.devices().index(device) for device in placement.devices]


def right(placement, own):
    return np.full_like(own, sum(worker + 1 for worker in workers_of(placement)))


def written(measured, clocks):
    stream = io.StringIO()
    return report(measured, clocks, stream), stream.getvalue()


def test_where_all_is_right_every_size_has_its_time():
    measured, clocks = outcome(right, 60)
    assert [one.workers for one in measured] == [(0, 1), (1, 2), (0, 1, 2)]
    assert all(len(one.seconds) == len(SIZES) for one in measured)
    assert clocks == [0, 0, 0]
    is_right, text = written(measured, clocks)
    assert is_right
    assert "Every pair of workers computed correct sums." in text


def test_run_cluster_check_ends_at_a_hanging_worker_whose_peer_raised():
    never = threading.Event()
    session = Echo(WorkerGroup(3, 1, "127.0.0.1:12421"), "ValueError: connection refused")
    measured, _ = run_cluster_check(session, jax.devices()[:3], lambda placement, own: never.wait(60), 0.2)
    never.set()
    assert [one.workers for one in measured] == [(0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wrong", "raises", "hangs"])
def test_the_pair_that_fails_is_named(kind):
    never = threading.Event()

    def reduce(placement, own):
        if workers_of(placement) != [1, 2]:
            return right(placement, own)
        if kind == "raises":
            raise ValueError("connection refused")
        if kind == "hangs":
            never.wait(60)
        found = right(placement, own)
        found[-1] += 1
        return found

    is_right, text = written(*outcome(reduce, 2 if kind == "hangs" else 60))
    never.set()
    expected = {
        "wrong": "1 of 250 sums are wrong: expected 5, got 6",
        "raises": "connection refused",
        "hangs": "no result",
    }
    assert not is_right
    assert expected[kind] in text
    assert "Workers 1 and 2 cannot connect, or computed wrong sums." in text
    assert "Workers 0 and 1 do not" not in text
