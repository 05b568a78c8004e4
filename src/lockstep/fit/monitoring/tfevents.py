"""Writes and reads TensorBoard event files: records with checksums, each of which is an ``Event`` protocol buffer.

Formats: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto (``event.proto``, ``summary.proto``, ``tensor.proto``),
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details and, for the polynomial, RFC 3720. Values are written as
``tf.summary`` of TensorFlow 2 does: as tensors, with the name of the plugin that shows them.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EventFile", "Value", "crc32c", "graph", "histogram", "newest_steps", "scalar"]

BUCKETS = 30  # of a histogram, as in TensorFlow
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FLOAT, _DOUBLE, _STRING = 1, 2, 7  # types of tensors
_SCALARS, _TENSORS, _BLOBS = 1, 2, 3  # classes of data
_MASK = 0xA282EAD8

Value = tuple[str, bytes]  # a tag, and a Summary.Value in bytes
_numbers = (
    count()
)  # two files of a process never have the same name, and their names have their order, in which TensorBoard reads them


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def scalar(tag: str, number: float) -> Value:
    """Encode a number."""
    return _value(tag, "scalars", _SCALARS, _tensor(_FLOAT, np.asarray(number, "<f4")))


def histogram(tag: str, numbers: np.ndarray) -> Value:
    """Encode a histogram of the finite numbers, in buckets of one width: rows of left edge, right edge and count."""
    numbers = np.asarray(numbers, np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    counts, edges = np.histogram(numbers, BUCKETS) if numbers.size else (np.zeros(0), np.zeros(1))
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1).astype("<f8")
    return _value(tag, "histograms", _TENSORS, _tensor(_DOUBLE, rows))


def graph(tag: str, description: str) -> Value:
    """Encode a Keras model, given its JSON."""
    tensor = _number(1, _STRING) + _bytes(2, b"") + _bytes(8, description.encode())
    return _value(tag, "graph_keras_model", _BLOBS, tensor, content=b"1")


class EventFile:
    """A file of events. A write has reached the operating system when it returns, so that other processes can read it, also after a kill.

    Args:
        folder: of the file; it is made if necessary.
        known: by tag the last step that is written already, up to which nothing is written again.
        clock: gives the seconds since 1970.

    Raises:
        OSError: the file cannot be made.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = EventFile(folder)
        ...     file.write(7, [scalar("epoch_loss", 0.5)])
        ...     file.close()
        ...     newest_steps(folder)
        {'epoch_loss': 7}
    """

    def __init__(
        self, folder: str | Path, known: Mapping[str, int] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._known, self._clock = known or {}, clock
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(clock())}.{socket.gethostname()}.{getpid()}.{next(_numbers):09}.v2"
        self._file = open(Path(folder) / name, "ab", buffering=0)  # noqa: SIM115  # closed by close
        self._write(_bytes(3, b"brain.Event:2"))

    def write(self, step: int, values: Sequence[Value]) -> None:
        """Write values of one step.

        Raises:
            OSError: the write has failed; earlier writes can be read.
        """
        new = [packed for tag, packed in values if step > self._known.get(tag, -1)]
        if new:
            self._write(_number(2, step) + _bytes(5, b"".join(_bytes(1, packed) for packed in new)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        data = _key(1, _FIXED64) + struct.pack("<d", self._clock()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


def newest_steps(folder: str | Path) -> dict[str, int]:
    """Return the largest step of each tag in a folder's files; a file ends at a record that a kill has cut off."""
    found: dict[str, int] = {}
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        for event in _records(path.read_bytes()):
            fields = dict(_fields(event))
            step = fields.get(2, 0)
            for number, packed in _fields(fields.get(5, b"")):
                tag = dict(_fields(packed)).get(1, b"").decode() if number == 1 else ""
                found[tag] = max(found.get(tag, 0), step)
    return found


# Protocol buffers.


def _value(tag: str, plugin: str, kind: int, tensor: bytes, content: bytes = b"") -> Value:
    metadata = _bytes(1, _bytes(1, plugin.encode()) + _bytes(2, content)) + _number(4, kind)
    return tag, _bytes(1, tag.encode()) + _bytes(9, metadata) + _bytes(8, tensor)


def _tensor(kind: int, array: np.ndarray) -> bytes:
    shape = b"".join(_bytes(2, _number(1, length)) for length in array.shape)
    return _number(1, kind) + _bytes(2, shape) + _bytes(4, array.tobytes())


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _records(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 12 + length + 4
        if position <= len(data):
            yield data[position - 4 - length : position - 4]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _read_varint(message, position)
            yield field, value
            continue
        length, position = (
            _read_varint(message, position) if wire == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[wire], position)
        )
        yield field, message[position : position + length]
        position += length


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value, position, shift = value | (byte & 127) << shift, position + 1, shift + 7
        if byte < 128:
            return value, position
