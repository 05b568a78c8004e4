"""``lockstep checkpoint``: list checkpoints, and export arrays of one."""

import fnmatch
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep._errors import CheckpointError
from lockstep._files import replace_file
from lockstep.checkpoint.format import (
    MANIFEST,
    Loaded,
    Manifest,
    describe,
    read,
    signing_key,
    step_of,
    widened,
    write_arrays,
)
from lockstep.checkpoint.store import CheckpointStore

__all__ = ["checkpoints_of", "export", "loaded_from", "table"]

_ROW = "{:>12} {:>6} {:>8} {:>15} {:>9}  {}"


def checkpoints_of(directory: str) -> list[Path]:
    """Return the directory if it is a checkpoint, else the checkpoints in it, the newest last.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = Path(directory)
    paths = [path] if os.path.exists(path / MANIFEST) else CheckpointStore(path).paths()
    if not paths:
        raise CheckpointError(f"{path.absolute()}: no checkpoint found.")
    return paths


def loaded_from(directory: str, step: int | None) -> Loaded:
    """Load one checkpoint of a directory: that of a step, or the newest intact one.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    paths = checkpoints_of(directory)
    if paths == [Path(directory)]:
        loaded: Loaded | None = read(paths[0], signing_key())
    elif step is None:
        loaded = CheckpointStore(directory).newest()
    else:
        loaded = next((read(path, signing_key()) for path in reversed(paths) if step_of(path.name) == step), None)
    if loaded is None or step not in (None, loaded.step):
        raise CheckpointError(
            f"{directory}: no checkpoint of step {step}. Fix: choose one that 'lockstep checkpoint show' lists."
        )
    return loaded


def table(paths: list[Path], verbose: bool) -> Iterator[str]:
    """Describe each checkpoint in a line, with the finished epochs and further batches; with ``verbose`` also each of its arrays."""
    yield _ROW.format("step", "epochs", "batches", "bytes", "replicas", "versions")
    for path in paths:
        try:
            manifest = describe(path, signing_key())
        except CheckpointError as error:
            yield f"{path.name}: {error}"
            continue
        yield _row(manifest)
        if verbose:
            yield from _arrays(manifest)


def _row(manifest: Manifest) -> str:
    metadata: Mapping[str, Any] = manifest.metadata
    versions = metadata.get("versions", "-")
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    numbers = (str(metadata.get(name, "-")) for name in ("epoch", "batch"))
    return _ROW.format(manifest.step, *numbers, f"{manifest.bytes:,}", str(metadata.get("replicas", "-")), versions)


def _arrays(manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.arrays.items():
        yield f"    {name}: {entry.dtype} {entry.shape}, sha256 {entry.sha256[:16]}…"


def export(loaded: Loaded, output: str, only: str) -> int:
    """Write arrays of a checkpoint as ``numpy.savez`` does; dtypes unknown to NumPy become wider ones.

    Args:
        loaded: the checkpoint.
        output: path of the file; an existing file is replaced.
        only: pattern of names as for file names; ``*`` matches anything.

    Returns:
        The number of arrays.

    Raises:
        CheckpointError: no name matches, or the file cannot be written.
    """
    arrays = {name: widened(array) for name, array in loaded.snapshot.arrays.items() if fnmatch.fnmatchcase(name, only)}
    if not arrays:
        raise CheckpointError(f"{loaded.path}: no array name matches {only!r}.")
    try:
        replace_file(output, lambda file: write_arrays(file, arrays))
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error.strerror or error}.", error.errno) from error
    return len(arrays)
