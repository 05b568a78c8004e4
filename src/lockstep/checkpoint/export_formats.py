"""Exports of a checkpoint for other programs (npz, safetensors, Orbax), and the way back into a snapshot.

An export of a whole checkpoint contains the manifest of the checkpoint (``lockstep.json``, or the metadata of a safetensors file): the
step, the metadata, and for each array dtype, shape and sha256. An import is checked against it, so that what is imported has the bits that
were exported. An export of some arrays has no manifest and cannot be imported.

Each format has the arrays under their names. A dtype that its readers do not know is changed:

- ``npz``: bfloat16 and similar dtypes become wider ones. If that would lose bits (payloads of NaN), integers with the same bits are written.
- ``safetensors`` and ``orbax``: dtypes other than NumPy's and bfloat16 become integers with the same bits, and complex128 pairs of float64.
- ``orbax``: cannot store empty arrays. The manifest has all that is in them.
"""

import fnmatch
import importlib
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep._array_encoding import DTYPES, ML_DTYPES
from lockstep._atomic_files import open_to_read, publish, read_file, replace_file, sync
from lockstep._errors import CheckpointError, LockstepError, install_extra
from lockstep.checkpoint.manifest import Entry, Manifest, decode, encode
from lockstep.checkpoint.serialization import (
    MAX_MANIFEST_BYTES,
    Loaded,
    Snapshot,
    array_digest,
    in_file,
    widened,
    write_arrays,
)

MANIFEST_NAME = "lockstep.json"
_KEY = "lockstep"  # of the manifest in the metadata of a safetensors file
_ANEW = "write it anew with 'lockstep checkpoint export'"
_RESERVED = "__metadata__"  # by safetensors, in place of the name of an array

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ExportFormat:
    """How one format is written and read.

    Args:
        name: for messages.
        write: writes arrays and the manifest, or no manifest, to a path; nothing appears there before all is written.
        read: returns the manifest, or None if there is none, and the arrays.
    """

    name: str
    write: Callable[[Path, Arrays, bytes | None], None]
    read: Callable[[Path], tuple[bytes | None, Arrays]]


def export(
    loaded: Loaded, output: str, format_name: str, *, only: str = "*", overwrite: bool = False, key: bytes | None = None
) -> int:
    """Write a checkpoint, or some arrays of it, for other programs.

    Args:
        loaded: the checkpoint.
        output: path of the file, or of the directory for ``"orbax"``.
        format_name: a name in :data:`FORMATS`.
        only: pattern of names as for file names; ``*`` matches anything.
        overwrite: whether an existing file is replaced; directories never are.
        key: signs the manifest.

    Returns:
        The number of arrays.

    Raises:
        CheckpointError: no name matches, the output is there already or named as a file of Keras, a package is missing, or the output cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> loaded = Loaded(7, {"kernel": np.ones((2, 3), np.float32)}, {"epoch": 1}, Path("run"))
        >>> file = f"{folder.name}/run.npz"
        >>> export(loaded, file, "npz")
        1
        >>> step, snapshot = read_export(file)
        >>> step, snapshot.arrays["kernel"].shape, snapshot.metadata
        (7, (2, 3), {'epoch': 1})
        >>> folder.cleanup()
    """
    path = Path(output).absolute()
    if path.suffix in (".h5", ".keras"):
        raise CheckpointError(
            f"{output}: is the name of a file of Keras, and not of {format_name}. Fix: choose another ending; for a file of Keras, restore "
            "the checkpoint with fit and call model.save or model.save_weights."
        )
    arrays = {name: array for name, array in loaded.arrays.items() if fnmatch.fnmatchcase(name, only)}
    if not arrays:
        raise CheckpointError(f"{loaded.path}: no array name matches {only!r}. Fix: see 'lockstep checkpoint show -v'.")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        fix = "remove it, or choose another path" if path.is_dir() else "give --overwrite, or choose another path"
        raise CheckpointError(f"{output}: exists already, and nothing was written. Fix: {fix}.")
    manifest = _encoded_manifest(loaded, key) if only == "*" else None
    with _errors(
        output, f"cannot be written as {format_name}", "check the directory, its permissions and the free space"
    ):
        FORMATS[format_name].write(path, arrays, manifest)
    return len(arrays)


def _encoded_manifest(loaded: Loaded, key: bytes | None) -> bytes:
    entries = {
        name: Entry(array.dtype.name, array.shape, 0, array_digest(array)) for name, array in loaded.arrays.items()
    }
    return encode(Manifest(loaded.step, 0, entries, loaded.metadata), key)


def read_export(output: str, key: bytes | None = None) -> tuple[int, Snapshot]:
    """Read the step and the content of an export of a whole checkpoint, and check every array; without ``key``, signatures are ignored.

    Raises:
        CheckpointError: it is absent, damaged, foreign or not signed with the key, it has no manifest, or a package is missing.
    """
    path = Path(output)
    with _errors(output, "cannot be read", "name an export that this user may read"):
        chosen = FORMATS[format_of(path)]
    with _errors(output, f"is damaged, or no {chosen.name} file", _ANEW):
        encoded, arrays = chosen.read(path)
    if encoded is None:
        raise CheckpointError(
            f"{output}: has no manifest of Lockstep: expected an export of a whole checkpoint. Fix: write it with "
            "'lockstep checkpoint export' without --only."
        )
    manifest = decode(encoded, path / MANIFEST_NAME, key)
    if unknown := sorted(arrays.keys() - manifest.arrays.keys()):
        raise CheckpointError(
            f"{output}: is not what was exported: its manifest has no array {unknown[0]!r}. Fix: {_ANEW}."
        )
    checked = {name: _restored(arrays.get(name), name, entry, output) for name, entry in manifest.arrays.items()}
    return manifest.step, Snapshot(checked, manifest.metadata)


def format_of(path: Path) -> str:
    """Return the name of the format of an export, from its first bytes.

    Raises:
        CheckpointError: it is of no known format.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return "orbax"
    with open_to_read(path) as file:
        begin = file.read(9)
    if begin.startswith(b"PK"):
        return "npz"
    if begin[8:] == b"{":
        return "safetensors"
    raise CheckpointError(
        f"{path}: is foreign or truncated: expected a file of npz or safetensors or a directory of Orbax, got a file that "
        f"begins with {begin!r}. Fix: name an export of 'lockstep checkpoint export'."
    )


def _restored(array: np.ndarray | None, name: str, entry: Entry, output: str) -> np.ndarray:
    """Return an array with the dtype and bits that it had in the checkpoint."""
    if entry.nbytes == 0:
        return np.empty(entry.shape, DTYPES[entry.dtype])
    if array is None:
        raise CheckpointError(f"{output}: is not what was exported: it has no array {name!r}. Fix: {_ANEW}.")
    dtype = DTYPES[entry.dtype]
    is_wider = array.dtype == widened(np.empty(0, dtype)).dtype != in_file(entry.dtype)
    try:
        if is_wider:
            found = array.astype(dtype, copy=False)
        else:
            found = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(entry.shape)
    except (TypeError, ValueError):
        found = array
    if (found.dtype, found.shape) != (dtype, entry.shape) or array_digest(found) != entry.sha256:
        raise CheckpointError(
            f"{output}: array {name!r} is damaged or was changed: got {array.dtype} {array.shape}, expected {entry.dtype} "
            f"{entry.shape} with sha256 {entry.sha256[:16]}…. Fix: {_ANEW}."
        )
    return found


@contextmanager
def _errors(output: str, problem: str, fix: str) -> Iterator[None]:
    """Turn errors of files and of packages, which are of any type, into one of ours."""
    try:
        yield
    except LockstepError:
        raise
    except OSError as error:
        raise CheckpointError(f"{output}: {problem}: {error.strerror or error}. Fix: {fix}.", error.errno) from error
    except Exception as error:
        text = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{output}: {problem}: {type(error).__name__}: {text}. Fix: {fix}.") from error


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"the format {extra} needs the package {(error.name or module).partition('.')[0]}. Fix: {install_extra(extra)}."
        ) from error


# npz


def _write_npz(path: Path, arrays: Arrays, manifest: bytes | None) -> None:
    members = {} if manifest is None else {MANIFEST_NAME: manifest}
    readable = {name: _widened_or_bits(array) for name, array in arrays.items()}
    replace_file(path, lambda file: write_arrays(file, readable, members), is_synced=True)


def _widened_or_bits(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = widened(array)
        is_same = array_digest(wide.astype(array.dtype, copy=False)) == array_digest(array)
    return wide if is_same else array.view(in_file(array.dtype.name))


def _read_npz(path: Path) -> tuple[bytes | None, Arrays]:
    with open_to_read(path) as file, zipfile.ZipFile(file) as archive:
        members = set(archive.namelist())
        if MANIFEST_NAME not in members:
            return None, {}
        arrays = {}
        for name in members - {MANIFEST_NAME}:
            with archive.open(name) as member:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
        return archive.read(MANIFEST_NAME), arrays


# safetensors


def _write_safetensors(path: Path, arrays: Arrays, manifest: bytes | None) -> None:
    safetensors = _package("safetensors.numpy", "safetensors")
    if _RESERVED in arrays:
        raise CheckpointError(
            f"{path}: safetensors cannot store an array with the name {_RESERVED!r}. Fix: --format npz."
        )
    metadata = None if manifest is None else {_KEY: manifest.decode()}
    readable = {name: _without_rare_dtypes(array) for name, array in arrays.items()}

    def write(file: io.BufferedWriter) -> None:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        # It replaces the file by another one, which only the owner reads.
        safetensors.save_file(readable, file.name, metadata)
        with open(file.name, "rb") as written:
            os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())

    replace_file(path, write, is_synced=True)


def _without_rare_dtypes(array: np.ndarray) -> np.ndarray:
    name = array.dtype.name
    if name == "complex128":
        return np.asarray(array, order="C")[..., None].view(np.float64)
    bits = array.view(in_file(name)) if name in ML_DTYPES and name != "bfloat16" else array
    return np.asarray(bits, order="C")  # safetensors would write other arrays wrongly


def _read_safetensors(path: Path) -> tuple[bytes | None, Arrays]:
    safetensors = _package("safetensors", "safetensors")
    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        if _KEY not in metadata:
            return None, {}
        names = file.keys()
        return metadata[_KEY].encode(), {name: file.get_tensor(name) for name in names}


# Orbax


def _write_orbax(path: Path, arrays: Arrays, manifest: bytes | None) -> None:
    orbax = _package("orbax.checkpoint", "orbax")
    stored = {name: _without_rare_dtypes(array) for name, array in arrays.items() if array.size}
    if not stored:
        raise CheckpointError(f"{path}: Orbax cannot store a checkpoint without numbers. Fix: --format npz.")

    def write(directory: Path) -> None:
        inner = directory / "orbax"  # Orbax makes a directory of its own beside this one.
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(inner, args=orbax.args.PyTreeSave(stored))
        for file in inner.iterdir():
            file.rename(directory / file.name)
        inner.rmdir()
        for file in directory.rglob("*"):
            sync(file)
        if manifest is not None:
            replace_file(directory / MANIFEST_NAME, lambda file: file.write(manifest), is_synced=True)

    publish(path.parent, path.name, write)


def _read_orbax(path: Path) -> tuple[bytes | None, Arrays]:
    orbax = _package("orbax.checkpoint", "orbax")
    if not (path / MANIFEST_NAME).exists():
        return None, {}
    manifest = read_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(path.absolute()).item_metadata
        if found is None:
            raise ValueError("Orbax finds no arrays in it")
        each = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in found.tree}
        return manifest, checkpointer.restore(path.absolute(), args=orbax.args.PyTreeRestore(restore_args=each))


FORMATS = {
    "npz": ExportFormat("npz", _write_npz, _read_npz),
    "safetensors": ExportFormat("safetensors", _write_safetensors, _read_safetensors),
    "orbax": ExportFormat("Orbax", _write_orbax, _read_orbax),
}
