"""Messages on the wire: what is sent comes back, what is no message is refused before it costs anything."""

import json
import struct

import pytest

from lockstep import OptionError
from lockstep.distributed.control.transport import FrameDecoder, ProtocolError, as_json, encode


def framed(text):
    return struct.pack(">I", len(text)) + text


def test_messages_come_back_whole_in_whatever_pieces_they_arrive():
    messages = [{"kind": "beat", "step": step, "activity": "Größe \ud800", "loss": float("inf")} for step in range(5)]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        frames = FrameDecoder()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [message for piece in pieces for message in frames.feed(piece)] == messages


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
