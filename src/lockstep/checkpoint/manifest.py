"""``manifest.json``: what a checkpoint consists of. It ends with the sha256 of all its other bytes, so no bit of it can turn unseen.

It names no file, so nothing in it can lead out of the checkpoint's directory. Whoever changes what it contains raises ``VERSION``
and keeps reading the older ones; its first line, its ``version`` and its last line stay as they are for ever, so that
every version can tell a newer one from a damaged one.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep._errors import CheckpointError, whole_number
from lockstep.checkpoint.dtypes import DTYPES
from lockstep.checkpoint.snapshot import check_name

__all__ = ["VERSION", "Entry", "Manifest", "decode", "encode"]

VERSION = 1

_BEGIN = b'{\n"format": "lockstep checkpoint",\n'
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n')
_END_LENGTH = 79
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """One array, and where its bytes lie.

    Args:
        dtype: name in :data:`lockstep.checkpoint.dtypes.DTYPES`.
        shape: its dimensions.
        offset: of its first byte in the file of arrays.
        sha256: of its bytes there, in hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    sha256: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"an array of dtype {self.dtype!r}")
        for number in (*self.shape, self.offset):
            whole_number("a dimension or an offset", number, least=0)
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"a sha256 of {self.sha256!r}")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def nbytes(self) -> int:
        """What the array takes, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        step: how many steps had been trained.
        bytes: size of the file of arrays.
        arrays: by name.
        facts: see :class:`lockstep.checkpoint.snapshot.Snapshot`.
    """

    step: int
    bytes: int
    arrays: Mapping[str, Entry]
    facts: Mapping[str, Any]


def encode(manifest: Manifest) -> bytes:
    """The file's content.

    Example:
        >>> print(encode(Manifest(7, 0, {}, {"epoch": 1})).decode(), end="")  # doctest: +ELLIPSIS
        {
        "format": "lockstep checkpoint",
        "version": 1,
        "step": 7,
        "bytes": 0,
        "arrays": {},
        "facts": {"epoch": 1},
        "sha256": "..."
        }
    """
    fields = {"version": VERSION, **asdict(manifest)}
    head = _BEGIN + "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items()).encode()
    return head + f'"sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


def decode(data: bytes, where: Path) -> Manifest:
    """What :func:`encode` was given.

    Args:
        data: the file's content.
        where: the file, for messages.

    Raises:
        CheckpointError: it is empty, truncated, damaged, foreign or of a newer version.
    """
    if not data:
        raise CheckpointError(f"{where}: is empty; whatever wrote it was cut off.")
    if not data.startswith(_BEGIN[: len(data)]):
        raise CheckpointError(f"{where}: is foreign: no manifest of Lockstep begins with {data[:40]!r}.")
    end = _END.fullmatch(data[-_END_LENGTH:])
    if end is None:
        raise CheckpointError(
            f"{where}: is truncated, or damaged at its end: its {len(data)} bytes do not end with their sha256."
        )
    found, expected = hashlib.sha256(data[:-_END_LENGTH]).hexdigest(), end[1].decode()
    if found != expected:
        raise CheckpointError(f"{where}: is damaged: its bytes have sha256 {found[:16]}…, expected {expected[:16]}….")
    try:
        return _from_fields(json.loads(data), where)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: says what no manifest of version {VERSION} says: {type(error).__name__}: {error}."
        ) from error


def _from_fields(fields: dict[str, Any], where: Path) -> Manifest:
    version = whole_number("version", fields["version"])
    if version > VERSION:
        raise CheckpointError(
            f"{where}: is of format version {version}; this Lockstep reads versions up to {VERSION}. Read it with the Lockstep that wrote it, or a newer one."
        )
    for name in fields["arrays"]:
        check_name(name)
    arrays = {name: Entry(**entry) for name, entry in fields["arrays"].items()}
    step, size = (whole_number(name, fields[name], least=0) for name in ("step", "bytes"))
    return Manifest(step, size, arrays, dict(fields["facts"]))
