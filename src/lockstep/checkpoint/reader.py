"""Reads a checkpoint: all of it is checked against its manifest, and nothing in it is executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import CheckpointError
from lockstep.checkpoint.format import ARRAYS, MANIFEST, Manifest, check_bounds, decode, read_array, step_of
from lockstep.checkpoint.snapshot import Snapshot

__all__ = ["Loaded", "describe", "read", "verify"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint that was read.

    Args:
        step: number of steps that were trained.
        snapshot: its content; numbers in the byte order of this machine.
        path: its directory.
    """

    step: int
    snapshot: Snapshot
    path: Path


def describe(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, without its arrays.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is not what was written.
    """
    file_path = path / MANIFEST
    with _checkpoint_errors(file_path):
        manifest = decode(file_path.read_bytes(), file_path)
    if step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path}: is the checkpoint of step {manifest.step} under the name of another.")
    return manifest


def read(path: Path) -> Loaded:
    """Read and check a checkpoint. Args and errors are those of :func:`describe`."""
    manifest, file_path = describe(path), path / ARRAYS
    with _checkpoint_errors(file_path), open(file_path, "rb") as file:
        check_bounds(file, manifest, file_path)
        arrays = {name: read_array(file, name, entry, file_path) for name, entry in manifest.arrays.items()}
    return Loaded(manifest.step, Snapshot(arrays, manifest.metadata), path)


def verify(path: Path) -> list[str]:
    """Return a sentence for each damage of a checkpoint; none if it is as it was written.

    Args:
        path: the checkpoint's directory.
    """
    problems = []
    try:
        manifest, file_path = describe(path), path / ARRAYS
        with _checkpoint_errors(file_path), open(file_path, "rb") as file:
            check_bounds(file, manifest, file_path)
            for name, entry in manifest.arrays.items():
                try:
                    read_array(file, name, entry, file_path)
                except CheckpointError as error:
                    problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    return problems


@contextmanager
def _checkpoint_errors(file_path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        there = "is missing" if file_path.parent.is_dir() else "is missing, as there is no such directory"
        raise CheckpointError(f"{file_path}: {there}.", error.errno) from error
    except OSError as error:
        raise CheckpointError(f"{file_path}: cannot be read: {error.strerror or error}.", error.errno) from error
