"""What a machine's own name must lead to where there are several machines; what they say is made up here."""

import socket

import pytest

from lockstep import ClusterError
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.jax_init import check_hostnames


class Said:
    """A session in which all other workers say what is given; None: what this one says."""

    group = WorkerGroup(3, 0, "192.0.2.1:12421")
    peers = tuple(Peer(index, 3, f"node{index}", 70 + index) for index in range(3))

    def __init__(self, others):
        self.others = others

    def gather(self, topic, value):
        self.own = value
        return [value if one is None else one for one in self.others]


FINE = ["elsewhere", "node1", "192.0.2.2", "192.0.2.2"]


@pytest.mark.parametrize(
    ("address", "reachable", "says", "line"),
    [
        ("127.0.1.1", "192.0.2.3", "leads to 127.0.1.1 there, which ", "192.0.2.3 node2"),
        ("::1", "192.0.2.3", "leads to ::1 there, which ", "192.0.2.3 node2"),
        (None, None, "has no address of that machine; ", "its address in the network node2"),
    ],
)
def test_the_first_machine_that_others_cannot_reach_is_named_with_the_cure(address, reachable, says, line):
    with pytest.raises(ClusterError) as raised:
        check_hostnames(Said([FINE, FINE, ["third", "node2", address, reachable]]))
    sentence = str(raised.value)
    assert sentence.startswith(f"worker 2 of 3 (node2, process 72): the name of its machine, 'node2', {says}")
    assert f"Fix: write the line {line!r} into /etc/hosts there" in sentence


def test_a_name_without_an_address_is_named_on_one_machine_too():
    machine = ["elsewhere", "node0", None, None]
    with pytest.raises(
        ClusterError, match=r"worker 0 of 3 .* 'node0', has no address of that machine; .*'127\.0\.0\.1 node0'"
    ):
        check_hostnames(Said([machine, machine, machine]))


def test_on_one_machine_the_name_may_lead_to_a_loopback_address(monkeypatch):
    monkeypatch.setattr("lockstep.distributed.jax_init.hostname_address", lambda: "127.0.1.1")
    session = Said([None, None, None])
    check_hostnames(session)
    machine, name, _, _ = session.own
    assert machine
    assert name == socket.gethostname()
