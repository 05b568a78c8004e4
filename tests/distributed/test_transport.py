"""Messages on the wire: what is sent comes back, what is no message is refused before it costs anything."""

import contextlib
import json
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import OptionError
from lockstep.distributed.control.transport import FrameDecoder, MacCounter, ProtocolError, as_json, encode, is_local


def own_address():
    """An address of this machine that is no loopback one; None if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Nothing is sent.
        return probe.getsockname()[0]
    return None


def framed(text):
    return struct.pack(">I", len(text)) + text


def test_messages_come_back_whole_in_whatever_pieces_they_arrive():
    messages = [{"kind": "beat", "step": step, "activity": "Größe \ud800", "loss": float("inf")} for step in range(5)]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        frames = FrameDecoder()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [message for piece in pieces for message in frames.feed(piece)] == messages


def authenticated(*frames):
    """Frames with their MACs, and what decodes them."""
    sent = MacCounter(b"key")
    decoder = FrameDecoder()
    decoder.macs = MacCounter(b"key")
    return [frame + sent.of(frame).digest() for frame in frames], decoder


def test_authenticated_messages_come_back_in_whatever_pieces_they_arrive():
    messages = [{"kind": "beat", "step": step} for step in range(5)]
    units, decoder = authenticated(*map(encode, messages))
    assert [message for byte in b"".join(units) for message in decoder.feed(bytes([byte]))] == messages


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [1, 0]], ids=["repeated", "left out", "moved", "swapped"])
def test_authenticated_messages_have_one_order(order):
    units, decoder = authenticated(*(encode({"kind": "beat", "step": step}) for step in range(3)))
    with pytest.raises(ProtocolError, match="its MAC is wrong"):
        list(decoder.feed(b"".join(units[number] for number in order)))


@pytest.mark.parametrize(
    ("host", "family", "expected"),
    [
        ("127.0.0.1", socket.AF_INET, True),
        ("127.1.2.3", socket.AF_INET, True),
        ("127.0.0.1", socket.AF_INET6, True),  # As a socket for both families shows it.
        (own_address(), socket.AF_INET, False),
    ],
)
def test_a_connection_within_one_machine_is_told_by_its_addresses(host, family, expected):
    if host is None:
        pytest.skip("this machine has no address but the loopback one")
    place = ("::", 0) if family == socket.AF_INET6 else (host, 0)
    with (
        socket.create_server(place, family=family, dualstack_ipv6=family == socket.AF_INET6) as listener,
        socket.create_connection((host, listener.getsockname()[1]), 20) as client,
        listener.accept()[0] as server,
    ):
        assert (is_local(client), is_local(server)) == (expected, expected)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_changed_bit_of_an_authenticated_message_is_accepted(place, change):
    (unit,), decoder = authenticated(encode({"kind": "beat", "step": 1}))
    changed = bytearray(unit)
    changed[place % len(unit)] ^= change
    with contextlib.suppress(ProtocolError):
        assert list(decoder.feed(bytes(changed))) == []  # A longer length waits for more bytes.


@pytest.mark.parametrize(
    "received",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # The beginning of TLS.
        b"\xff" * 100,
        framed(b"not JSON"),
        framed(b"\xff\xfe"),
        framed(b"[1, 2]"),
        framed(b'{"no": "kind"}'),
        framed(b'{"kind": 3}'),
        framed(b"[" * 50_000),
    ],
)
def test_what_is_no_message_is_refused(received):
    with pytest.raises(ProtocolError):
        list(FrameDecoder(2**16).feed(received))


def test_a_message_that_is_too_long_is_refused_at_its_first_bytes():
    frames = FrameDecoder(100)
    with pytest.raises(ProtocolError, match="at most 100 bytes"):
        list(frames.feed(struct.pack(">I", 101)))


def test_messages_before_a_broken_one_are_given():
    frames = FrameDecoder().feed(encode({"kind": "beat"}) + framed(b"?"))
    assert next(frames) == {"kind": "beat"}
    with pytest.raises(ProtocolError):
        next(frames)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {("a", "b"): 1}])
def test_what_json_cannot_express_is_refused_where_it_is_sent(value):
    with pytest.raises(OptionError, match="Only values of JSON"):
        encode({"kind": "call", "value": value})


def test_a_loop_of_references_is_refused_where_it_is_sent():
    value = []
    value.append(value)
    with pytest.raises(OptionError, match="Only values of JSON"):
        encode({"kind": "call", "value": value})


def test_a_message_that_is_too_large_is_refused_where_it_is_sent():
    with pytest.raises(OptionError, match=r"at most 50\."):
        encode({"kind": "call", "value": "x" * 50}, limit=50)


def test_plain_values_are_those_that_come_back():
    assert as_json({"shape": (2, 3), 4: None}) == json.loads('{"shape": [2, 3], "4": null}')
