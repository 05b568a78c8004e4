"""``arrays.npz``: the arrays of a checkpoint, one after the other, in a zip file as ``numpy.savez`` writes it.

``numpy.load`` reads it without Lockstep. Lockstep itself reads no header of it: the manifest says where the bytes of each
array begin, of which dtype and shape they are, and which sha256 they have.
"""

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep._errors import CheckpointError
from lockstep.checkpoint.dtypes import DTYPES, in_file
from lockstep.checkpoint.manifest import Entry, Manifest

__all__ = ["check_bounds", "read_array", "write_arrays"]

_PIECE = 1 << 20  # bytes that are copied at once, so that writing takes no more memory than this


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """Write a zip file of arrays, uncompressed.

    Args:
        file: open for writing, at its beginning.
        arrays: by name.

    Returns:
        Where each lies, in the same order.
    """
    entries = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                stored = in_file(array.dtype.name)
                header = {"descr": stored.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(member, header)
                offset, digest = file.tell(), hashlib.sha256()
                for piece in _pieces(array, stored):
                    digest.update(piece)
                    member.write(piece)
            entries[name] = Entry(array.dtype.name, array.shape, offset, digest.hexdigest())
    return entries


def _pieces(array: np.ndarray, stored: np.dtype) -> Iterator[memoryview]:
    """The bytes of an array in C order, as they are in the file."""
    bits = array if array.dtype.name == stored.name else array.view(stored)
    contiguous: Any = [["readonly", "contig"]]  # Any, because NumPy's stubs know neither this nor what comes out.
    pieces: Any = np.nditer(
        bits,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=contiguous,
        op_dtypes=[stored],
        casting="equiv",
        order="C",
        buffersize=_PIECE // stored.itemsize,
    )
    return (piece.view(np.uint8).data for piece in pieces)


def check_bounds(file: io.BufferedReader, manifest: Manifest, where: Path) -> None:
    """See that the file is as long as it was, and holds what the manifest promises, before memory is taken for it.

    Raises:
        CheckpointError: it is shorter or longer, or no file of its size holds that.
    """
    size = os.fstat(file.fileno()).st_size
    if size != manifest.bytes:
        what = "truncated" if size < manifest.bytes else "damaged"
        raise CheckpointError(f"{where}: is {what}: it has {size:,} bytes, expected {manifest.bytes:,}.")
    for name, entry in manifest.arrays.items():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{where}: has {size:,} bytes, but array {name!r} of {entry.nbytes:,} begins at {entry.offset:,}."
            )
    promised = sum(entry.nbytes for entry in manifest.arrays.values())
    if promised > size:
        raise CheckpointError(f"{where}: has {size:,} bytes, but the arrays in it would take {promised:,}.")


def read_array(file: io.BufferedReader, name: str, entry: Entry, where: Path) -> np.ndarray:
    """One array, in the byte order of this machine.

    Args:
        file: open for reading.
        name: of the array, for messages.
        entry: where it lies.
        where: the file, for messages.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    try:
        array = np.empty(entry.shape, in_file(entry.dtype))
    except ValueError as error:
        raise CheckpointError(f"{where}: array {name!r}: no array has shape {entry.shape}: {error}.") from error
    digest = hashlib.sha256()
    file.seek(entry.offset)
    left = array.reshape(-1).view(np.uint8).data
    while left and (count := file.readinto(left[:_PIECE])):  # What is cut off meanwhile lacks in the digest.
        digest.update(left[:count])
        left = left[count:]
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{where}: array {name!r} is damaged: its {entry.nbytes:,} bytes have sha256 {digest.hexdigest()[:16]}…, "
            f"expected {entry.sha256[:16]}…."
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native if native.dtype.name == entry.dtype else native.view(DTYPES[entry.dtype])
