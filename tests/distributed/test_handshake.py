"""Every listener of a job runs the same handshake: the chief, the rendezvous of the launcher, and a parameter server."""

import contextlib
import socket
from dataclasses import replace

import pytest

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.control_server import Coordinator
from lockstep.distributed.control.failure_detector import Limits
from lockstep.distributed.control.handshake import (
    PROTOCOL,
    HandshakeError,
    Peer,
    connect,
    hello,
    introduce,
    join_request,
    make_proof,
    verify_proof,
    wait_until_admitted,
)
from lockstep.distributed.control.transport import encode
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rendezvous import RendezvousServer
from lockstep.launch.rendezvous_state import JobSpec
from lockstep.parameter_server.variables.variable_server import ArrayServer
from tests.support.waiting import DEADLINE, wait_until

SECRET = b"known"


class Listener(contextlib.ExitStack):
    """A listener with its address, the lines that it logs, a peer that it admits, and an entry of its identity."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.listener = self.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def connect(self):
        connection = connect(self.address, DEADLINE)
        self.callback(connection.close)
        return connection

    def admit(self, peer=None, secret=SECRET):
        """Run the client's side of the handshake."""
        connection = self.connect()
        introduce(connection, peer or self.peer, secret, DEADLINE)
        wait_until_admitted(connection, DEADLINE)


class Chief(Listener):
    def __init__(self):
        super().__init__()
        self.peer = Peer(1, 2, "there", 77, identity={"jax": "1"})
        me = replace(self.peer, index=0, host="here")
        group = WorkerGroup(workers=2, index=0, coordinator=self.address)
        server = Coordinator(group, me, self.listener, SECRET, Limits(DEADLINE, 1000), self.lines.append)
        self.callback(server.connection.close)
        self.callback(server.stop)
        self.entry = "jax"


class Rendezvous(Listener):
    def __init__(self):
        super().__init__()
        spec = JobSpec.of(LaunchConfig(("a.py",), nodes=3, min_nodes=2, coordinator=self.address))
        port = self.listener.getsockname()[1]
        me = Peer(-1, 1, "here", 7, identity=spec.as_identity(), information={"rank": 0, "host": "", "port": port})
        self.peer = replace(me, host="there", information={"rank": None, "host": "", "port": port})
        server = RendezvousServer(spec, me, self.listener, SECRET, self.lines.append)
        self.callback(server.connection.close)
        self.callback(server.stop, 0, "")
        self.entry = "--nnodes"


class ParameterServer(Listener):
    def __init__(self):
        super().__init__()
        me = Peer(0, 1, "here", 7, identity={"variables": "a"}, information={"job": "ps"})
        self.peer = Peer(1, 2, "there", 77, identity={"variables": "a"})
        server = ArrayServer(me, Service(), self.listener, secret=SECRET, log=self.lines.append)
        server.start()
        self.callback(server.stop)
        self.entry = "variables"


class Service:
    def leave(self, session):
        pass


@pytest.fixture(params=[Chief, Rendezvous, ParameterServer])
def listener(request):
    with request.param() as found:
        yield found


def test_peer_of_this_job_is_admitted(listener):
    listener.admit()
    assert listener.lines == []


WRONG = {
    "another version": (encode({"kind": "hello", "protocol": 0, "nonce": "x"}), f"protocol 0, this process {PROTOCOL}"),
    "no version": (encode({"kind": "hello", "nonce": "x"}), f"protocol None, this process {PROTOCOL}"),
    "a number as nonce": (encode({"kind": "hello", "protocol": PROTOCOL, "nonce": 7}), "it sent no nonce"),
    "a list as nonce": (encode({"kind": "hello", "protocol": PROTOCOL, "nonce": ["x"]}), "it sent no nonce"),
    "an empty nonce": (hello(""), "it sent no nonce"),
    "no nonce": (encode({"kind": "hello", "protocol": PROTOCOL}), "it sent no nonce"),
    "no hello": (join_request(Peer(1, 2, "there", 77)), "it began with 'join'"),
    "two hellos": (hello("x") + hello("x"), "it began with 'hello'"),
    "no proof": (hello("x") + join_request(Peer(1, 2, "there", 77)), "it does not know the secret of this job"),
    "a wrong proof": (hello("x") + join_request(Peer(1, 2, "b", 7), "0"), "it does not know the secret of this job"),
    "a number as proof": (
        hello("x") + encode({"kind": "join", "proof": 0, "peer": {}}),
        "it does not know the secret of this job",
    ),
    "no frame": (b"GET / HTTP/1.1\r\n\r\n", "it sent what is no message"),
}


@pytest.mark.parametrize(("sent", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_handshake_is_refused_and_harms_nothing(listener, sent, reason):
    connection = listener.connect()
    connection.send(sent)
    messages = []
    while connection.ended is None:
        message = connection.wait(DEADLINE)
        messages += [message] if message else []
    assert all(message["kind"] in ("challenge", "refused") for message in messages)
    if messages and messages[-1]["kind"] == "refused":  # A reset connection may lose the reason.
        assert reason in messages[-1]["sentence"]
    wait_until(lambda: listener.lines, "a line about the refusal")
    assert [reason in line for line in listener.lines] == [True], listener.lines
    listener.admit()


@pytest.mark.parametrize(
    ("secret", "reason"),
    [(b"another", "different secrets"), (None, "it asks for a secret that this process was not given")],
)
def test_client_with_another_secret_stops_and_tells_the_listener(listener, secret, reason):
    with pytest.raises(HandshakeError, match=reason):
        listener.admit(secret=secret)
    wait_until(lambda: listener.lines, "a line about the other secret")
    assert "it was given another secret than this process, or one of them none" in listener.lines[0]
    listener.admit()


@pytest.mark.parametrize("field", ["index", "identity", "pid", "information", "host"])
def test_peer_with_a_field_of_a_wrong_type_is_refused(listener, field):
    with pytest.raises(HandshakeError, match="did not say who it is"):
        listener.admit(replace(listener.peer, **{field: None}))
    listener.admit()


def test_peer_of_another_job_is_refused_with_what_differs(listener):
    other = {**listener.peer.identity, listener.entry: "of another job"}
    with pytest.raises(HandshakeError, match=listener.entry):
        listener.admit(replace(listener.peer, identity=other))


def test_client_does_not_trust_a_listener_of_another_version_or_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for challenge, reason in (
            ({"protocol": 0, "nonce": "x"}, "it speaks protocol 0"),
            ({"protocol": PROTOCOL, "nonce": 7}, "it sent no nonce"),
            ({"protocol": PROTOCOL, "nonce": "x", "proof": "0"}, "different secrets"),
            ({"protocol": PROTOCOL, "nonce": "x"}, "it was given no secret, this process was"),
        ):
            with contextlib.closing(connect(address, DEADLINE)) as connection, listener.accept()[0] as server:
                server.sendall(encode({"kind": "challenge", "process": "there", **challenge}))
                with pytest.raises(HandshakeError, match=reason):
                    introduce(connection, Peer(1, 2, "here", 7), SECRET, DEADLINE)


def test_a_proof_needs_secret_role_and_both_nonces():
    given = make_proof(b"secret", "worker", "one", "two")
    assert verify_proof(given, b"secret", "worker", "one", "two")
    assert not verify_proof(given, b"other", "worker", "one", "two")
    assert not verify_proof(given, b"secret", "chief", "one", "two")
    assert not verify_proof(given, b"secret", "worker", "one", "three")
    assert not verify_proof(None, b"secret", "worker", "one", "two")
    assert not verify_proof("größe", b"secret", "worker", "one", "two")
