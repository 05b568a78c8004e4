"""The files of a checkpoint: the snapshot that is saved, and how it is written, read and verified. Reading executes nothing.

Arrays are stored little-endian. NumPy's files do not know bfloat16 and similar dtypes: those are stored as integers with the same bits,
and the manifest has the name of the dtype.

A checkpoint is a directory ``step-000000123``. If a step is written again, the second is ``step-000000123-2``, because no directory can
replace another atomically: it appears beside the first, which is then removed. Modification times are not used.

``arrays.npz`` is a zip file as ``numpy.savez`` writes it, and ``numpy.load`` reads it without Lockstep. Lockstep reads no header in it: the
manifest has the offset, dtype, shape and sha256 of each array.

If each process has written its shards (:mod:`lockstep.checkpoint.shards`), the manifest has version 2 and lists the sha256 of the manifests
of all parts. What is read are whole arrays, as if one process had written them.
"""

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from lockstep._array_encoding import DTYPES, ML_DTYPES, ArraySpec
from lockstep._atomic_files import REMOVED, WRITTEN, is_temporary, open_to_read, read_file, replace_file, sync
from lockstep._errors import CheckpointError, OptionError, without_fix
from lockstep.checkpoint.manifest import MANIFEST, RESTORE, Entry, Manifest, check_name, decode, encode
from lockstep.checkpoint.shards import PART, ShardSlice, check_cover, put_shard, shard_slices


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a run at one step.

    Args:
        arrays: by name, of any shape and of a dtype in :data:`lockstep._array_encoding.DTYPES`. They are not copied: a change in
            place before the write changes what is written.
        metadata: values of JSON, NaN and infinity included: None, bool, int, float, str, lists of these, and dicts of these by
            str. They are copied. A value that JSON would change (a tuple, a key that is a number) is refused.

    Raises:
        OptionError: a name, an array or a value of the metadata cannot be stored.

    Example:
        >>> snapshot = Snapshot({"dense/kernel": np.ones((2, 3), np.float32)}, {"epoch": 1, "loss": float("inf")})
        >>> snapshot.nbytes
        24
    """

    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.arrays:
            check_name(name)
        object.__setattr__(self, "arrays", {name: _array(name, value) for name, value in self.arrays.items()})
        metadata = dict(self.metadata)
        _check_json("metadata", metadata)
        object.__setattr__(self, "metadata", json.loads(json.dumps(metadata)))

    @property
    def nbytes(self) -> int:
        """Size of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


def _array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise OptionError(
            f"Snapshot: arrays[{name!r}] cannot be stored: its dtype is {array.dtype}, expected one of {', '.join(DTYPES)}. "
            "Fix: put text and the like into the metadata."
        )
    return array


def _check_json(path: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise OptionError(f"Snapshot: {path}: expected keys of type str, got {key!r}. Fix: use str({key!r}).")
            _check_json(f"{path}[{key!r}]", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_json(f"{path}[{number}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise OptionError(
            f"Snapshot: {path}: expected None, bool, int, float, str, list or dict, as JSON has them, got {value!r} "
            f"({type(value).__name__}). Fix: put numbers of NumPy into the arrays."
        )


def in_file(name: str) -> np.dtype:
    """Return the dtype in the file for a dtype of this name.

    Example:
        >>> in_file("float32"), in_file("bfloat16")
        (dtype('float32'), dtype('uint16'))
    """
    dtype = DTYPES[name]
    return np.dtype(f"<u{dtype.itemsize}" if name in ML_DTYPES else f"<{dtype.str[1:]}")


def widened(array: np.ndarray) -> np.ndarray:
    """Return the same numbers in a dtype that every NumPy knows.

    Example:
        >>> widened(np.ones(2, DTYPES["bfloat16"])), widened(np.ones(2))
        (array([1., 1.], dtype=float32), array([1., 1.]))
    """
    name = array.dtype.name
    if name not in ML_DTYPES:
        return array
    return array.astype(name.rstrip("0123456789") + "8" if "int" in name else "float32")


ARRAYS, STATUS = "arrays.npz", "status.json"

_NAME = re.compile(r"step-(\d{9,})(?:-([2-9]|[1-9]\d+))?", re.ASCII)
_CHUNK = 1 << 20  # bytes that are copied at once, the most memory that writing takes
MAX_MANIFEST_BYTES = 1 << 28


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


def is_stray(name: str) -> bool:
    """Return whether a killed job may have left a file of this name: a part that is in no checkpoint, or a status that was not renamed."""
    return name.removeprefix(WRITTEN).startswith(f".{PART}") or is_temporary(name, STATUS)


def _order(path: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


# arrays.npz


def write_arrays(
    file: BinaryIO, arrays: Mapping[str, np.ndarray], members: Mapping[str, bytes] = MappingProxyType({})
) -> dict[str, Entry]:
    """Write arrays and other ``members`` as an uncompressed zip file, at the beginning of ``file``; return the entry of each array, in order."""
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
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return entries


def array_digest(array: np.ndarray) -> str:
    """Return the sha256 of the bytes of an array, as they are in the file.

    Example:
        >>> array_digest(np.zeros(3, np.float32)) == hashlib.sha256(bytes(12)).hexdigest()
        True
    """
    digest = hashlib.sha256()
    for chunk in _chunks(array, in_file(array.dtype.name)):
        digest.update(chunk)
    return digest.hexdigest()


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
        raise CheckpointError(f"{path}: is {what}: it has {size:,} bytes, expected {manifest.bytes:,}. {RESTORE}")
    for name, entry in manifest.arrays.items():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, but array {name!r} of {entry.nbytes:,} begins at {entry.offset:,}. {RESTORE}"
            )
    promised = sum(entry.nbytes for entry in manifest.arrays.values())
    if promised > size:
        raise CheckpointError(f"{path}: has {size:,} bytes, but the arrays in it would take {promised:,}. {RESTORE}")


def read_array(file: io.BufferedReader, name: str, entry: Entry, path: Path) -> np.ndarray:
    """Read one array, in the byte order of this machine.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    try:
        array = np.empty(entry.shape, in_file(entry.dtype))
    except ValueError as error:
        raise CheckpointError(
            f"{path}: array {name!r}: no array has shape {entry.shape}: {error}. {RESTORE}"
        ) from error
    digest = hashlib.sha256()
    file.seek(entry.offset)
    left = array.reshape(-1).view(np.uint8).data
    while left and (count := file.readinto(left[:_CHUNK])):  # If the file is cut off meanwhile, the digest differs.
        digest.update(left[:count])
        left = left[count:]
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{path}: array {name!r} is damaged: its {entry.nbytes:,} bytes have sha256 {digest.hexdigest()[:16]}…, "
            f"expected {entry.sha256[:16]}…. {RESTORE}"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native if native.dtype.name == entry.dtype else native.view(DTYPES[entry.dtype])


@dataclass(frozen=True)
class _StoredShard:
    """A whole array, or a shard of one, in a file of arrays: its name and entry there, and its place in the whole array."""

    file: Path
    name: str
    entry: Entry
    place: ShardSlice

    def read(self) -> np.ndarray:
        with _checkpoint_errors(self.file), open_to_read(self.file) as file:
            return read_array(file, self.name, self.entry, self.file)


class StoredArrays(Mapping[str, np.ndarray]):
    """The whole arrays of a checkpoint; each is read from its files and checked whenever it is asked for.

    Attributes:
        specs: shapes and dtypes of the arrays, by name; nothing is read for these.
    """

    def __init__(self, pieces: Iterable[_StoredShard]) -> None:
        self._pieces: dict[str, list[_StoredShard]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.place.array, []).append(piece)
        self.specs = {
            name: ArraySpec(name, pieces[0].place.shape, pieces[0].entry.dtype) for name, pieces in self._pieces.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        arrays: dict[str, np.ndarray] = {}
        for piece in self._pieces[name]:
            put_shard(arrays, piece.place, piece.read())
        return arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def specs_of(arrays: Mapping[str, np.ndarray]) -> dict[str, ArraySpec]:
    """Return the shapes and dtypes of arrays by name, without reading them from a file."""
    if isinstance(arrays, StoredArrays):
        return arrays.specs
    return {name: ArraySpec(name, array.shape, array.dtype.name) for name, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint that was read.

    Args:
        step: number of steps that were trained.
        arrays: by name; numbers in the byte order of this machine.
        metadata: see :class:`lockstep.checkpoint.serialization.Snapshot`.
        path: its directory.
        sha256: of its manifest, in hexadecimal digits.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, Any]
    path: Path
    sha256: str = ""


def write(path: Path, step: int, snapshot: Snapshot, key: bytes | None = None, parts: Sequence[str] = ()) -> str:
    """Write the files of a checkpoint into a directory that has none but its parts, synced to the disk; return the sha256 of the manifest.

    ``parts`` has what this function has returned for each part.

    Raises:
        OSError: a file cannot be written.
        OptionError: the metadata is too large to be read again.
    """
    with open(path / ARRAYS, "xb") as file:
        entries = write_arrays(file, snapshot.arrays)
        size = file.tell()
    sync(path / ARRAYS)
    content = encode(Manifest(step, size, entries, snapshot.metadata, tuple(parts)), key)
    if len(content) > MAX_MANIFEST_BYTES:
        raise OptionError(
            f"Snapshot: metadata: its manifest would have {len(content):,} bytes, at most {MAX_MANIFEST_BYTES:,} are read. Fix: put "
            "long lists of numbers into the arrays; attributes of callbacks may be NumPy arrays."
        )
    with open(path / MANIFEST, "xb") as file:
        file.write(content)
    sync(path / MANIFEST)
    return hashlib.sha256(content).hexdigest()


def bytes_of_files(snapshot: Snapshot) -> int:
    """Return about how many bytes :func:`write` writes: those of the arrays, and the files without them."""
    file = io.BytesIO()
    entries = write_arrays(file, {name: np.empty(0, array.dtype) for name, array in snapshot.arrays.items()})
    return snapshot.nbytes + file.tell() + len(encode(Manifest(0, 0, entries, snapshot.metadata)))


def sign(path: Path, key: bytes) -> None:
    """Sign a checkpoint that was written without a key, or with another one.

    Raises:
        CheckpointError: it is damaged, or cannot be written.
    """
    problems = verify(path)
    if problems:
        raise CheckpointError(problems[0])
    content = encode(describe(path), key)
    try:
        replace_file(path / MANIFEST, lambda file: file.write(content), is_synced=True)
    except OSError as error:
        raise CheckpointError(
            f"{path / MANIFEST}: cannot be written: {error.strerror or error}. Fix: make its directory writable for this user.",
            error.errno,
        ) from error


def describe(path: Path, key: bytes | None = None) -> Manifest:
    """Read the manifest of a checkpoint, which ``key`` must have signed if it is given, without the arrays.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is not what was written.
    """
    return _described(path, key)[0]


def _described(path: Path, key: bytes | None) -> tuple[Manifest, str]:
    """Return the manifest and the sha256 of its file."""
    file_path = path / MANIFEST
    with _checkpoint_errors(file_path):
        content = read_file(file_path, MAX_MANIFEST_BYTES)
        manifest = decode(content, file_path, key)
    if step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{path}: is the checkpoint of step {manifest.step} under the name of another. Fix: rename it to "
            f"{free_name(manifest.step, [])}, or remove it."
        )
    return manifest, hashlib.sha256(content).hexdigest()


def parts_of(path: Path, manifest: Manifest) -> dict[Path, Manifest]:
    """Read the manifests of a checkpoint's parts, by directory.

    Raises:
        CheckpointError: a part is missing, is not what was written, or the parts do not make up whole arrays.
    """
    found = {}
    for number, expected in enumerate(manifest.parts):
        file_path = path / f"{PART}{number}" / MANIFEST
        with _checkpoint_errors(file_path):
            data = read_file(file_path, MAX_MANIFEST_BYTES)
        if hashlib.sha256(data).hexdigest() != expected:
            raise CheckpointError(
                f"{file_path}: is damaged, or of another checkpoint: its sha256 is not {expected[:16]}…. {RESTORE}"
            )
        found[file_path.parent] = decode(data, file_path)
    try:
        check_cover(
            (place, part.arrays[name].shape, part.arrays[name].dtype)
            for part in found.values()
            for name, place in shard_slices(part.metadata).items()
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: its parts are no whole arrays: {type(error).__name__}: {without_fix(error)}. {RESTORE}"
        ) from error
    return found


def read(path: Path, key: bytes | None = None) -> Loaded:
    """Read and check a checkpoint. Args and errors are those of :func:`describe`."""
    loaded = open_stored(path, key)
    return replace(loaded, arrays=dict(loaded.arrays))


def open_stored(path: Path, key: bytes | None = None) -> Loaded:
    """Read a checkpoint without its arrays: each is read and checked when it is asked for. Args and errors are those of :func:`describe`."""
    manifest, digest = _described(path, key)
    pieces = [piece for each in _files(path, manifest) for piece in _pieces_in(*each)]
    return Loaded(manifest.step, StoredArrays(pieces), manifest.metadata, path, digest)


def _files(path: Path, manifest: Manifest) -> list[tuple[Path, Manifest, dict[str, ShardSlice]]]:
    """Return the file of arrays of a checkpoint and of each of its parts, with its manifest, and where its shards belong."""
    parts = parts_of(path, manifest).items()
    return [
        (path / ARRAYS, manifest, {}),
        *((each / ARRAYS, part, shard_slices(part.metadata)) for each, part in parts),
    ]


def _pieces_in(file_path: Path, manifest: Manifest, belongs: Mapping[str, ShardSlice]) -> list[_StoredShard]:
    """Return what is in a file of arrays, after a check of its size."""
    with _checkpoint_errors(file_path), open_to_read(file_path) as file:
        check_bounds(file, manifest, file_path)
    return [
        _StoredShard(
            file_path, name, entry, belongs.get(name) or ShardSlice(name, entry.shape, (0,) * len(entry.shape))
        )
        for name, entry in manifest.arrays.items()
    ]


def verify(path: Path, key: bytes | None = None) -> list[str]:
    """Return a sentence for each damage of a checkpoint, which ``key`` must have signed if it is given; none if it is as it was written."""
    try:
        files = _files(path, describe(path, key))
    except CheckpointError as error:
        return [str(error)]
    return [problem for each in files for problem in _damage(*each)]


def _damage(file_path: Path, manifest: Manifest, belongs: Mapping[str, ShardSlice]) -> Iterator[str]:
    """Yield a sentence for the damage of a file, or of each array in it."""
    try:
        pieces = _pieces_in(file_path, manifest, belongs)
    except CheckpointError as error:
        yield str(error)
        return
    for piece in pieces:
        try:
            piece.read()
        except CheckpointError as error:
            yield str(error)


@contextmanager
def _checkpoint_errors(file_path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        there = f"is missing. {RESTORE}"
        if not file_path.parent.is_dir():
            there = "is missing, as there is no such directory. Fix: name the directory of a checkpoint."
        raise CheckpointError(f"{file_path}: {there}", error.errno) from error
    except OSError as error:
        raise CheckpointError(
            f"{file_path}: cannot be read: {error.strerror or error}. Fix: make it readable for this user, or use another checkpoint.",
            error.errno,
        ) from error
