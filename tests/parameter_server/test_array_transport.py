"""Arrays on the wire: what is sent comes back, and what is wrong is refused before memory is taken for it."""

import socket
import struct
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.distributed.control.handshake import make_session
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.array_transport import (
    MAX_HEAD_BYTES,
    ArrayConnection,
    ConnectionLostError,
)
from tests.parameter_server.threaded_servers import DEADLINE, framed


def pair(*, authenticated=False, **options):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname(), DEADLINE)
        there, _ = listener.accept()
    sessions = [make_session(b"secret", "one", "two", is_client=is_client) for is_client in (True, False)]
    here_session, there_session = sessions if authenticated else (None, None)
    return (
        ArrayConnection(here, DEADLINE, here_session, **options),
        ArrayConnection(there, DEADLINE, there_session),
    )


def anything(message, specs):
    pass


@pytest.mark.parametrize("authenticated", [False, True])
@given(
    described=st.dictionaries(
        st.text(max_size=20),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=4).map(tuple),
            st.sampled_from(["float32", "int64", "bool", "bfloat16", "float8_e4m3fn"]),
        ),
        max_size=6,
    )
)
def test_arrays_come_back_bit_for_bit(authenticated, described):
    arrays = {
        name: np.arange(int(np.prod(shape)))
        .astype(np.dtype(dtype) if hasattr(np, dtype) else getattr(ml_dtypes, dtype))
        .reshape(shape)
        for name, (shape, dtype) in described.items()
    }
    here, there = pair(authenticated=authenticated)
    here.send({"kind": "push", "step": 3}, arrays)
    message, received = there.receive(anything)
    here.close()
    there.close()
    assert message == {"kind": "push", "step": 3}
    assert list(received) == list(arrays)
    for name, array in arrays.items():
        assert (received[name].dtype, received[name].shape) == (array.dtype, array.shape)
        assert received[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("place", [0, 10, 60, 5_000, -1])
def test_a_changed_byte_of_an_authenticated_message_is_refused(place):
    here, there = pair(authenticated=True)
    wire, end = socket.socketpair()
    recorder = ArrayConnection(wire, DEADLINE, here._session)
    recorder.send({"kind": "push"}, {"a": np.arange(4096, dtype="float32")})
    wire.close()
    sent = bytearray()
    while received := end.recv(2**20):
        sent += received
    end.close()
    sent[place] ^= 1
    here._socket.sendall(sent)
    here.close()
    with pytest.raises((ProtocolError, ConnectionLostError)) as caught:
        there.receive(anything)
    assert place == 0 or "its MAC is wrong" in str(caught.value)  # The first byte is one of the length.
    there.close()


@pytest.mark.parametrize("covers_arrays", [False, True])
def test_the_sender_decides_whether_arrays_have_a_mac(covers_arrays):
    here, there = pair(authenticated=True)
    here._session = replace(here._session, covers_arrays=covers_arrays)
    for number in range(3):  # Both count alike.
        here.send({"kind": "push"}, {"a": np.float32([number])})
        message, received = there.receive(anything)
        assert (message, received["a"][0]) == ({"kind": "push"}, number)
    assert here.sent == there.received
    here.close()
    there.close()


def test_an_authenticated_message_cannot_be_repeated():
    here, there = pair(authenticated=True)
    wire, end = socket.socketpair()
    ArrayConnection(wire, DEADLINE, here._session).send({"kind": "push"}, {"a": np.float32([1])})
    recorded = end.recv(4096)
    wire.close()
    end.close()
    here._socket.sendall(recorded * 2)
    assert there.receive(anything)[1]["a"] == 1
    with pytest.raises(ProtocolError, match="its MAC is wrong"):
        there.receive(anything)
    here.close()
    there.close()


def test_a_large_array_and_a_thousand_small_ones_arrive():
    here, there = pair()
    arrays = {f"small {n}": np.float32([n]) for n in range(1000)} | {"large": np.arange(3_000_000)}
    sending = threading.Thread(target=here.send, args=({"kind": "push"}, arrays))
    sending.start()
    _, received = there.receive(anything)
    sending.join(DEADLINE)
    assert all((received[name] == array).all() for name, array in arrays.items())
    assert here.sent == there.received > 24_000_000
    here.close()
    there.close()


def test_what_is_not_contiguous_is_sent_in_the_order_of_its_rows():
    here, there = pair()
    array = np.arange(12).reshape(3, 4)
    here.send({"kind": "push"}, {"turned": array.T, "every second": array[:, ::2]})
    _, received = there.receive(anything)
    assert (received["turned"] == array.T).all()
    assert (received["every second"] == array[:, ::2]).all()
    here.close()
    there.close()


@pytest.mark.parametrize(
    "arrays",
    [
        "kernel",
        {},
        [["kernel", "float32", [2]]],
        [["kernel", "float32", [2], 9]],
        [["kernel", "float32", [-2, -1], 8]],
        [["kernel", "float32", [2.0], 8]],
        [["kernel", "float32", [True], 4]],
        [["kernel", "object", [1], 8]],
        [["kernel", "V8", [1], 8]],
        [["kernel", "float32", [1] * 33, 4]],
        [[3, "float32", [1], 4]],
        [["twice", "int8", [1], 1], ["twice", "int8", [1], 1]],
    ],
)
def test_what_describes_no_arrays_is_refused(arrays):
    here, there = pair()
    here._socket.sendall(framed({"kind": "push", "arrays": arrays}))
    with pytest.raises(ProtocolError):
        there.receive(anything)
    here.close()
    there.close()


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, framed([1]), framed({"no": "kind"}), b"\0\0\0\0"]
)
def test_what_is_no_message_is_refused(sent):
    here, there = pair()
    here._socket.sendall(sent)
    with pytest.raises(ProtocolError):
        there.receive(anything)
    here.close()
    there.close()


def test_a_refused_message_takes_no_memory_for_its_arrays():
    here, there = pair()
    size = 2**60
    here._socket.sendall(framed({"kind": "push", "arrays": [["kernel", "float32", [size], 4 * size]]}))

    def refuse(message, specs):
        raise ProtocolError(f"{specs[0].shape} is not wanted")

    with pytest.raises(ProtocolError, match=f"{size},.*is not wanted"):
        there.receive(refuse)
    here.close()
    there.close()


def test_a_head_that_is_too_long_is_refused_at_its_first_bytes():
    here, there = pair()
    here._socket.sendall(struct.pack(">I", MAX_HEAD_BYTES + 1))
    with pytest.raises(ProtocolError, match=f"at most {MAX_HEAD_BYTES:,} bytes"):
        there.receive(anything)
    here.close()
    there.close()


def test_half_a_message_and_then_the_end_is_a_loss():
    here, there = pair()
    here._socket.sendall(framed({"kind": "push", "arrays": [["kernel", "float32", [8], 32]]}) + b"1234")
    here.close()
    with pytest.raises(ConnectionLostError, match="its connection closed"):
        there.receive(anything)
    there.close()


def test_silence_has_a_limit():
    here, there = pair()
    there.set_timeout(0.05)
    with pytest.raises(ConnectionLostError, match="sent no data in time"):
        there.receive(anything)
    here.close()
    there.close()


def test_what_comes_before_the_deadline_is_waited_for():
    here, there = pair()
    here.set_deadline(DEADLINE)
    later = threading.Timer(0.05, there.send, args=({"kind": "late"},))
    later.start()
    assert here.receive(anything)[0]["kind"] == "late"
    later.join(DEADLINE)
    here.close()
    there.close()


def test_single_bytes_do_not_extend_a_deadline():
    times = iter([0.0, 1.0, 4.99])
    here, there = pair(clock=lambda: next(times))
    here.set_deadline(5.0)
    there._socket.sendall(b"\0\0")
    with pytest.raises(ConnectionLostError, match="sent no data in time"):
        here.receive(anything)
    here.close()
    there.close()


def test_who_does_not_read_is_given_up():
    here, there = pair()
    here.set_timeout(0.05)
    with pytest.raises(ConnectionLostError, match="accepted no data in time"):
        here.send({"kind": "push"}, {"large": np.zeros(2**24)})
    here.close()
    there.close()


def test_who_is_refused_hears_why_although_it_was_still_sending():
    here, there = pair()
    sending = threading.Thread(target=here.send, args=({"kind": "push"}, {"large": np.zeros(2**21)}))
    sending.start()
    there.receive_head()
    refusing = threading.Thread(target=there.refuse, args=({"kind": "refused", "sentence": "no"}, DEADLINE))
    refusing.start()
    sending.join(DEADLINE)
    assert here.receive(anything)[0]["sentence"] == "no"
    here.close()
    refusing.join(DEADLINE)
    assert not refusing.is_alive()


def test_the_end_of_the_other_side_is_seen_without_waiting():
    here, there = pair()
    assert not there.is_closed()
    here.close()
    there.set_timeout(DEADLINE)
    with pytest.raises(ConnectionLostError):
        there.wait_for_message()
    assert there.is_closed()
    there.close()
    assert there.is_closed()
