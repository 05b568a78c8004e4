"""The manifest of a checkpoint: its arrays, its metadata, checksums and a signature.

``manifest.json`` lists the arrays and has the metadata. It ends with the sha256 of all its other bytes, so that every damage is found. It
names no file, so nothing in it can lead out of the checkpoint's directory. A change of its content needs a higher ``VERSION``, and older
versions must still be read. Its first line, its ``version`` and its last line never change, so that every version can tell a newer
manifest from a damaged one.

With a key, the line before the last is an HMAC of all bytes before it: that a process wrote the manifest, and with it the arrays, which had
the key. Older versions ignore that line.
"""

import hashlib
import hmac
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep._array_encoding import DTYPES
from lockstep._atomic_files import read_file
from lockstep._errors import CheckpointError, OptionError, whole_number, without_fix

MANIFEST = "manifest.json"
_MAX_NAME_BYTES = 65_000  # A zip file stores the length in two bytes
VERSION = 2  # of a manifest with parts; others have version 1
KEY_FILE = "LOCKSTEP_CHECKPOINT_KEY_FILE"  # names the file of the key that signs checkpoints
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 16, 4096
_BEGIN = b'{\n"format": "lockstep checkpoint",\n'
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n')
_END_LENGTH = 79
_SIGNATURE = re.compile(rb'"hmac": "([0-9a-f]{64})",\n')
_SIGNATURE_LENGTH = 76
_DIGEST = re.compile("[0-9a-f]{64}")
RESTORE = "Fix: restore it from a copy, or use another checkpoint."


def check_name(name: Any) -> None:
    """Raise OptionError if this cannot be the name of an array."""
    if not isinstance(name, str) or "\0" in name:
        raise OptionError(
            f"Snapshot: arrays: expected names of type str without NUL, got {name!r}. Fix: rename the array."
        )
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise OptionError(
            f"Snapshot: arrays: the name {name!r} is no Unicode text: {error}. Fix: rename the array."
        ) from None
    if length > _MAX_NAME_BYTES:
        raise OptionError(
            f"Snapshot: arrays: expected names of at most {_MAX_NAME_BYTES} bytes, got one of {length}: {name[:60]}…. Fix: shorten it."
        )


@dataclass(frozen=True)
class Entry:
    """One array, and the position of its bytes.

    Args:
        dtype: name in :data:`lockstep._array_encoding.DTYPES`.
        shape: its dimensions.
        offset: offset of its first byte in the file of arrays.
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
            whole_number("a dimension or an offset", number, minimum=0)
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"a sha256 of {self.sha256!r}")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def nbytes(self) -> int:
        """Size of the array, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Args:
        step: number of steps that were trained.
        bytes: size of the file of arrays.
        arrays: by name.
        metadata: see :class:`lockstep.checkpoint.serialization.Snapshot`.
        parts: the sha256 of the manifest of each part, in hexadecimal digits.
    """

    step: int
    bytes: int
    arrays: Mapping[str, Entry]
    metadata: Mapping[str, Any]
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(_DIGEST.fullmatch, self.parts)):
            raise ValueError(f"parts of {self.parts}")


def signing_key(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the key that signs checkpoints; None if the environment names no file for it.

    Raises:
        OptionError: there is no such file, or its key is too short.
    """
    path = environment.get(KEY_FILE)
    if not path:
        return None
    try:
        key = read_file(path, _MAX_KEY_BYTES).strip()
    except OSError as error:
        raise OptionError(
            f"{KEY_FILE}: {path}: cannot be read: {error.strerror or error}. Fix: name a file with the key, or unset it."
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise OptionError(
            f"{KEY_FILE}: {path}: expected a key of at least {_MIN_KEY_BYTES} bytes, got {len(key)}. Fix: openssl rand -hex 32 > {path}"
        )
    return key


def encode(manifest: Manifest, key: bytes | None = None) -> bytes:
    """Return the content of ``manifest.json``, signed if there is a key.

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
    fields: dict[str, Any] = {
        "version": 2 if manifest.parts else 1,
        "step": manifest.step,
        "bytes": manifest.bytes,
        "arrays": {name: vars(entry) for name, entry in manifest.arrays.items()},
        "facts": manifest.metadata,
    }
    if manifest.parts:
        fields["parts"] = manifest.parts
    head = _BEGIN + "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items()).encode()
    if key is not None:
        head += f'"hmac": "{hmac.new(key, head, hashlib.sha256).hexdigest()}",\n'.encode()
    return head + f'"sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


def decode(data: bytes, path: Path, key: bytes | None = None) -> Manifest:
    """Return the manifest that :func:`encode` was given; without ``key``, signatures are ignored.

    Raises:
        CheckpointError: it is empty, truncated, damaged, foreign, of a newer version, or not signed with the key.
    """
    if not data:
        raise CheckpointError(f"{path}: is empty: its writer was interrupted. {RESTORE}")
    if not data.startswith(_BEGIN[: len(data)]):
        raise CheckpointError(f"{path}: is foreign: no manifest of Lockstep begins with {data[:40]!r}. {RESTORE}")
    end = _END.fullmatch(data[-_END_LENGTH:])
    if end is None:
        raise CheckpointError(
            f"{path}: is truncated, or damaged at its end: its {len(data)} bytes do not end with their sha256. {RESTORE}"
        )
    found, expected = hashlib.sha256(data[:-_END_LENGTH]).hexdigest(), end[1].decode()
    if found != expected:
        raise CheckpointError(
            f"{path}: is damaged: its bytes have sha256 {found[:16]}…, expected {expected[:16]}…. {RESTORE}"
        )
    if key is not None:
        _check_signature(data[:-_END_LENGTH], path, key)
    try:
        return _from_fields(json.loads(data), path)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is no valid manifest: {type(error).__name__}: {without_fix(error)}. {RESTORE}"
        ) from error


def _check_signature(head: bytes, path: Path, key: bytes) -> None:
    found = _SIGNATURE.fullmatch(head[-_SIGNATURE_LENGTH:])
    fix = f"run 'lockstep checkpoint sign {path.parent}'"
    if path.name != MANIFEST:
        fix = f"import it with {KEY_FILE} unset, and sign the checkpoint"
    if found is None:
        raise CheckpointError(f"{path}: is not signed, and {KEY_FILE} is set. Fix: if you trust it, {fix}.")
    expected = hmac.new(key, head[:-_SIGNATURE_LENGTH], hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected, found[1].decode()):
        raise CheckpointError(
            f"{path}: is signed with another key than that of {KEY_FILE}, or was changed. Fix: if you trust it, {fix}."
        )


def _from_fields(fields: dict[str, Any], path: Path) -> Manifest:
    version = whole_number("version", fields["version"])
    if version > VERSION:
        raise CheckpointError(
            f"{path}: is of format version {version}; this Lockstep reads versions up to {VERSION}. Fix: read it with the Lockstep that wrote it, or a newer one."
        )
    for name in fields["arrays"]:
        check_name(name)
    arrays = {name: Entry(**entry) for name, entry in fields["arrays"].items()}
    step, size = (whole_number(name, fields[name], minimum=0) for name in ("step", "bytes"))
    return Manifest(step, size, arrays, dict(fields["facts"]), tuple(fields.get("parts", ())))
