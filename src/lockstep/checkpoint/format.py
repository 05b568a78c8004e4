"""The files of a checkpoint, and their names in a run's folder.

A checkpoint is a directory ``step-000000123``. If a step is written again, the second is ``step-000000123-2``, because no directory can
replace another atomically: it appears beside the first, which is then removed. Modification times are not used.

``manifest.json`` lists the arrays and has the metadata. It ends with the sha256 of all its other bytes, so that every damage is found. It
names no file, so nothing in it can lead out of the checkpoint's directory. A change of its content needs a higher ``VERSION``, and older
versions must still be read. Its first line, its ``version`` and its last line never change, so that every version can tell a newer
manifest from a damaged one.

``arrays.npz`` is a zip file as ``numpy.savez`` writes it, and ``numpy.load`` reads it without Lockstep. Lockstep reads no header in it: the
manifest has the offset, dtype, shape and sha256 of each array.
"""

import hashlib
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep._arrays import DTYPES
from lockstep._errors import CheckpointError, whole_number
from lockstep.checkpoint.snapshot import check_name, in_file

__all__ = [
    "ARRAYS",
    "MANIFEST",
    "REMOVED",
    "STATUS",
    "VERSION",
    "WRITTEN",
    "Entry",
    "Manifest",
    "check_bounds",
    "checkpoints_in",
    "decode",
    "encode",
    "free_name",
    "is_leftover",
    "read_array",
    "step_of",
    "write_arrays",
]

WRITTEN, REMOVED = ".writing-", ".removing-"
MANIFEST, ARRAYS, STATUS = "manifest.json", "arrays.npz", "status.json"
VERSION = 1

_NAME = re.compile(r"step-(\d{9,})(?:-([2-9]|[1-9]\d+))?", re.ASCII)
_BEGIN = b'{\n"format": "lockstep checkpoint",\n'
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n')
_END_LENGTH = 79
_DIGEST = re.compile("[0-9a-f]{64}")
_CHUNK = 1 << 20  # bytes that are copied at once, the most memory that writing takes


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint of this name; None if no checkpoint has such a name.

    Example:
        >>> step_of("step-000000123"), step_of("step-000000123-2"), step_of("model.keras")
        (123, 123, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def free_name(step: int, present: list[Path]) -> str:
    """Return a name for the next checkpoint of a step; readers prefer it to the present ones.

    Example:
        >>> free_name(123, []), free_name(123, [Path("step-000000123"), Path("step-000000123-2")])
        ('step-000000123', 'step-000000123-3')
    """
    times = [_order(path)[1] for path in present if step_of(path.name) == step]
    return f"step-{step:09}" + (f"-{max(times) + 1}" if times else "")


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the directories with names of checkpoints, the newest last; none if ``directory`` does not exist yet."""
    try:
        return sorted((path for path in directory.iterdir() if step_of(path.name) is not None), key=_order)
    except FileNotFoundError:
        return []


def is_leftover(name: str) -> bool:
    """Return whether a killed writer may have left a file of this name."""
    return any(name.startswith(mark) and step_of(name.removeprefix(mark)) is not None for mark in (WRITTEN, REMOVED))


def _order(path: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


@dataclass(frozen=True)
class Entry:
    """One array, and the position of its bytes.

    Args:
        dtype: name in :data:`lockstep._arrays.DTYPES`.
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
        """Size of the array, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Args:
        step: number of steps that were trained.
        bytes: size of the file of arrays.
        arrays: by name.
        metadata: see :class:`lockstep.checkpoint.snapshot.Snapshot`.
    """

    step: int
    bytes: int
    arrays: Mapping[str, Entry]
    metadata: Mapping[str, Any]


def encode(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json``.

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
    fields["facts"] = fields.pop("metadata")  # its name on disk
    head = _BEGIN + "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items()).encode()
    return head + f'"sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


def decode(data: bytes, path: Path) -> Manifest:
    """Return the manifest that :func:`encode` was given.

    Args:
        data: the content of the file.
        path: the file, for messages.

    Raises:
        CheckpointError: it is empty, truncated, damaged, foreign or of a newer version.
    """
    if not data:
        raise CheckpointError(f"{path}: is empty: its writer was interrupted.")
    if not data.startswith(_BEGIN[: len(data)]):
        raise CheckpointError(f"{path}: is foreign: no manifest of Lockstep begins with {data[:40]!r}.")
    end = _END.fullmatch(data[-_END_LENGTH:])
    if end is None:
        raise CheckpointError(
            f"{path}: is truncated, or damaged at its end: its {len(data)} bytes do not end with their sha256."
        )
    found, expected = hashlib.sha256(data[:-_END_LENGTH]).hexdigest(), end[1].decode()
    if found != expected:
        raise CheckpointError(f"{path}: is damaged: its bytes have sha256 {found[:16]}…, expected {expected[:16]}….")
    try:
        return _from_fields(json.loads(data), path)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is no valid manifest of version {VERSION}: {type(error).__name__}: {error}."
        ) from error


def _from_fields(fields: dict[str, Any], path: Path) -> Manifest:
    version = whole_number("version", fields["version"])
    if version > VERSION:
        raise CheckpointError(
            f"{path}: is of format version {version}; this Lockstep reads versions up to {VERSION}. Fix: read it with the Lockstep that wrote it, or a newer one."
        )
    for name in fields["arrays"]:
        check_name(name)
    arrays = {name: Entry(**entry) for name, entry in fields["arrays"].items()}
    step, size = (whole_number(name, fields[name], least=0) for name in ("step", "bytes"))
    return Manifest(step, size, arrays, dict(fields["facts"]))


# arrays.npz


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """Write arrays as an uncompressed zip file.

    Args:
        file: open for writing, at its beginning.
        arrays: by name.

    Returns:
        The entry of each, in the same order.
    """
    entries = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                stored = in_file(array.dtype.name)
                header = {"descr": stored.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(member, header)
                offset, digest = file.tell(), hashlib.sha256()
                for chunk in _chunks(array, stored):
                    digest.update(chunk)
                    member.write(chunk)
            entries[name] = Entry(array.dtype.name, array.shape, offset, digest.hexdigest())
    return entries


def _chunks(array: np.ndarray, stored: np.dtype) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, as they are in the file."""
    bits = array if array.dtype.name == stored.name else array.view(stored)
    contiguous: Any = [["readonly", "contig"]]  # Any: NumPy's stubs do not know this, nor the result.
    chunks: Any = np.nditer(
        bits,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=contiguous,
        op_dtypes=[stored],
        casting="equiv",
        order="C",
        buffersize=_CHUNK // stored.itemsize,
    )
    return (chunk.view(np.uint8).data for chunk in chunks)


def check_bounds(file: io.BufferedReader, manifest: Manifest, path: Path) -> None:
    """Check the size of the file against the manifest, before memory is allocated for the arrays.

    Raises:
        CheckpointError: the file is shorter or longer than expected, or too small for the arrays.
    """
    size = os.fstat(file.fileno()).st_size
    if size != manifest.bytes:
        what = "truncated" if size < manifest.bytes else "damaged"
        raise CheckpointError(f"{path}: is {what}: it has {size:,} bytes, expected {manifest.bytes:,}.")
    for name, entry in manifest.arrays.items():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, but array {name!r} of {entry.nbytes:,} begins at {entry.offset:,}."
            )
    promised = sum(entry.nbytes for entry in manifest.arrays.values())
    if promised > size:
        raise CheckpointError(f"{path}: has {size:,} bytes, but the arrays in it would take {promised:,}.")


def read_array(file: io.BufferedReader, name: str, entry: Entry, path: Path) -> np.ndarray:
    """Read one array, in the byte order of this machine.

    Args:
        file: open for reading.
        name: of the array, for messages.
        entry: of the array.
        path: the file, for messages.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    try:
        array = np.empty(entry.shape, in_file(entry.dtype))
    except ValueError as error:
        raise CheckpointError(f"{path}: array {name!r}: no array has shape {entry.shape}: {error}.") from error
    digest = hashlib.sha256()
    file.seek(entry.offset)
    left = array.reshape(-1).view(np.uint8).data
    while left and (count := file.readinto(left[:_CHUNK])):  # If the file is cut off meanwhile, the digest differs.
        digest.update(left[:count])
        left = left[count:]
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{path}: array {name!r} is damaged: its {entry.nbytes:,} bytes have sha256 {digest.hexdigest()[:16]}…, "
            f"expected {entry.sha256[:16]}…."
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native if native.dtype.name == entry.dtype else native.view(DTYPES[entry.dtype])
