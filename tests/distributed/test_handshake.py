"""Every listener of a job runs the same handshake: the chief, the rendezvous of the launcher, and a parameter server."""

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.control_server import ControlServer
from lockstep.distributed.control.handshake import (
    PROTOCOL,
    HandshakeError,
    Peer,
    connect,
    hello,
    introduce,
    join_request,
    make_proof,
    make_session,
    refusal,
    verify_proof,
    wait_until_admitted,
)
from lockstep.distributed.control.heartbeat import Limits
from lockstep.distributed.control.transport import HANDSHAKE_BYTES, MAC_BYTES, MacCounter, encode
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rendezvous import RendezvousServer
from lockstep.launch.rendezvous_state import identity_of
from lockstep.parameter_server.rpc import ArrayServer
from tests.support.waiting import DEADLINE, wait_until

SECRET = b"known"
HIDDEN = {"host": "hidden", "pid": 987654}  # Of the process that listens.


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
        """Run the client's side of the handshake, and return the connection."""
        connection = self.connect()
        introduce(connection, peer or self.peer, secret, DEADLINE)
        wait_until_admitted(connection, DEADLINE)
        return connection


class Chief(Listener):
    def __init__(self):
        super().__init__()
        self.peer = Peer(1, 2, "there", 77, identity={"jax": "hidden"})
        me = replace(self.peer, index=0, **HIDDEN)
        group = WorkerGroup(workers=2, index=0, coordinator=self.address)
        server = ControlServer(group, me, self.listener, SECRET, Limits(DEADLINE, 1000), self.lines.append)
        self.callback(server.connection.close)
        self.callback(server.stop)
        self.entry = "jax"


class Rendezvous(Listener):
    def __init__(self):
        super().__init__()
        job = LaunchConfig(("a.py",), nodes=3, min_nodes=2, coordinator=self.address)
        port = self.listener.getsockname()[1]
        information = {"rank": 0, "host": "", "port": port}
        me = Peer(-1, 1, **HIDDEN, identity=identity_of(job), information=information)
        self.peer = replace(me, host="there", information=information | {"rank": None})
        server = RendezvousServer(job, me, self.listener, SECRET, self.lines.append)
        self.callback(server.connection.close)
        self.callback(server.stop, 0, "")
        self.entry = "--nnodes"


class ParameterServer(Listener):
    def __init__(self):
        super().__init__()
        me = Peer(0, 1, **HIDDEN, identity={"variables": "hidden"}, information={"job": "ps"})
        self.peer = Peer(1, 2, "there", 77, identity={"variables": "hidden"})
        server = ArrayServer(me, Service(), self.listener, secret=SECRET, log=self.lines.append)
        server.start()
        self.callback(server.stop)
        self.entry = "variables"


class Service:
    def check(self, message, given):
        raise AssertionError("a message of a stranger was read")

    def handle(self, session, message, arrays):
        raise AssertionError("a message of a stranger was handled")

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
    "a large message": (struct.pack(">I", HANDSHAKE_BYTES + 1) + b"{", "it sent what is no message"),
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
    with pytest.raises(HandshakeError, match="sent an invalid peer description"):
        listener.admit(replace(listener.peer, **{field: None}))
    listener.admit()


def test_peer_of_another_job_is_refused_with_what_differs(listener):
    other = {**listener.peer.identity, listener.entry: "of another job"}
    with pytest.raises(HandshakeError, match=listener.entry):
        listener.admit(replace(listener.peer, identity=other))


WITHOUT_A_PROOF = {name: sent for name, (sent, _) in WRONG.items()} | {"a good hello": hello("x"), "nothing": b""}


@pytest.mark.parametrize("sent", WITHOUT_A_PROOF.values(), ids=WITHOUT_A_PROOF)
def test_a_stranger_learns_nothing_but_the_protocol(listener, sent):
    with socket.create_connection(listener.listener.getsockname(), DEADLINE) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while received := stranger.recv(4096):
                told += received
    for private in (b"hidden", b"987654", listener.entry.encode()):
        assert private not in told


FORGED = {
    "zeros as MAC": lambda frame, session: frame + bytes(MAC_BYTES),
    "a MAC of another key": lambda frame, session: (
        frame + make_session(b"x", "a", "b", is_client=True).sent.of(frame).digest()
    ),
    "its own MAC back": lambda frame, session: frame + MacCounter(session.received._key).of(frame).digest(),
    "one number too far": lambda frame, session: frame + [session.sent.of(frame) for _ in range(2)][1].digest(),
    "another frame": lambda frame, session: frame.replace(b"none", b"nope") + session.sent.of(frame).digest(),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_message_ends_the_connection(listener, forge):
    connection = listener.admit()
    frame = encode({"kind": "none", "arrays": []})
    connection._socket.setblocking(True)
    connection._socket.sendall(forge(frame, connection.session))
    until_closed(connection)  # It would keep one that sent a message that it does not know.
    if isinstance(listener, ParameterServer):
        wait_until(lambda: listener.lines, "a line about the message")
        assert "its MAC is wrong" in listener.lines[0]


def until_closed(connection):
    deadline = time.monotonic() + DEADLINE
    while connection.ended is None:
        connection.wait(DEADLINE)
        assert time.monotonic() < deadline, "the listener keeps the connection"


def test_a_refusal_of_another_program_is_shown_without_control_characters():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(connect(address, DEADLINE)) as connection, listener.accept()[0] as server:
            server.sendall(encode(refusal("no\x1b[2J\n" + "x" * 10_000)))
            with pytest.raises(HandshakeError) as caught:
                introduce(connection, Peer(1, 2, "here", 7), SECRET, DEADLINE)
        assert str(caught.value).startswith("no?[2J?xxx")
        assert len(str(caught.value)) == 4000


def test_a_recorded_connection_cannot_be_repeated(listener):
    """All bytes of a client that was admitted, sent again."""
    recorded = bytearray()
    connection = listener.connect()
    connection._socket = Recorder(connection._socket, recorded)
    introduce(connection, listener.peer, SECRET, DEADLINE)
    wait_until_admitted(connection, DEADLINE)
    again = listener.connect()
    again._socket.setblocking(True)
    again._socket.sendall(recorded)
    until_closed(again)
    wait_until(lambda: listener.lines, "a line about the repetition")
    assert "it does not know the secret of this job" in listener.lines[0]


class Recorder:
    """A socket that notes what is sent."""

    def __init__(self, connected, recorded):
        self._connected, self._recorded = connected, recorded

    def __getattr__(self, name):
        return getattr(self._connected, name)

    def send(self, data):
        count = self._connected.send(data)
        self._recorded += data[:count]
        return count


def test_a_description_belongs_to_its_proof(listener):
    """One who changes what a worker says of itself, and keeps its proof, is refused."""
    connection = listener.connect()
    connection.send(hello("x"))
    nonce = connection.wait(DEADLINE)["nonce"]
    said = json.loads(join_request(listener.peer)[4:])["peer"]
    proof = make_proof(SECRET, "worker", "x", nonce, said)
    connection.send(encode({"kind": "join", "proof": proof, "peer": said.replace("there", "where")}))
    assert "it does not know the secret" in connection.wait(DEADLINE)["sentence"]


def test_many_silent_strangers_take_few_connections_and_keep_nobody_out(listener):
    strangers = [listener.connect() for _ in range(120)]
    wait_until(lambda: sum(is_closed(one) for one in strangers) >= 120 - 64, "the end of the oldest")
    listener.admit()
    assert not any(is_closed(one) for one in strangers[-60:])
    assert len(listener.lines) == 1
    assert "too many connections were in their handshake" in listener.lines[0]


def is_closed(connection):
    while connection.wait(0):
        pass
    return connection.ended is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Chief", "Rendezvous", "ParameterServer"])
def test_strangers_leave_the_listener_descriptors_and_its_end_of_them_costs_no_time(forks, tmp_path, kind):
    """The process has a limit of some 100 descriptors: 150 strangers leave it most; and none left, it waits without a busy loop."""
    script = Path(__file__).with_name("few_descriptors.py")
    process = forks[0].start_python(tmp_path, script=script, arguments=[kind, tmp_path])
    try:
        address = process.until("address").split(":")
        strangers = [socket.create_connection(address, DEADLINE) for _ in range(150)]
        (tmp_path / "strangers").touch()
        assert process.until("failures") == 0
        process.until("full")
        strangers.append(socket.create_connection(address, DEADLINE))
        (tmp_path / "one more").touch()
        assert process.until("cpu_seconds") < 0.3
        process.until("free")
        assert any("new connections wait: Too many open files" in line for line in process.told["all_lines"])
        strangers[-1].sendall(hello("x"))
        assert b"challenge" in strangers[-1].recv(4096)
        (tmp_path / "end").touch()
        assert process.end() == 0, process.said
    finally:
        process.clean()
        for one in strangers:
            one.close()


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


def test_a_challenge_that_comes_in_two_pieces_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = connect(f"127.0.0.1:{listener.getsockname()[1]}", DEADLINE)
        other, _ = listener.accept()
        with other, contextlib.closing(connection):
            challenge = encode({"kind": "challenge", "protocol": PROTOCOL, "nonce": "theirs", "proof": None})
            other.sendall(challenge[:10])
            timer = threading.Timer(0.3, other.sendall, [challenge[10:]])
            timer.start()
            introduce(connection, Peer(1, 2, "here", 7), None, DEADLINE)
            timer.join()
