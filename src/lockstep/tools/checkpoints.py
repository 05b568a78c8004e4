"""``lockstep checkpoint``: find and list checkpoints, and import one."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep._errors import CheckpointError
from lockstep.checkpoint.export_formats import read_export
from lockstep.checkpoint.manifest import MANIFEST, Manifest, signing_key
from lockstep.checkpoint.serialization import Loaded, describe, parts_of, read, step_of
from lockstep.checkpoint.store import CheckpointStore

_ROW = "{:>12} {:>6} {:>8} {:>15} {:>9}  {}"


def checkpoints_of(directory: str) -> list[Path]:
    """Return the directory if it is a checkpoint, else the checkpoints in it, the newest last.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = Path(directory).absolute()
    paths = [path] if is_checkpoint(path) else CheckpointStore(path).paths()
    if not paths:
        found = "the directory has none" if os.path.isdir(path) else "there is no such directory"
        raise CheckpointError(
            f"{path}: no checkpoint found: {found}. Fix: give the directory of a lockstep.callbacks.BackupAndRestore."
        )
    return paths


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, by its files or, if they are damaged, by its name."""
    return os.path.exists(path / MANIFEST) or (os.path.isdir(path) and step_of(path.name) is not None)


def loaded_from(directory: str, step: int | None) -> Loaded:
    """Load one checkpoint of a directory: that of a step, or the newest intact one.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    paths = checkpoints_of(directory)
    if is_checkpoint(Path(directory).absolute()):
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
    key = signing_key()
    for path in paths:
        try:
            manifest = describe(path, key)
            parts = parts_of(path, manifest).values()
        except CheckpointError as error:
            yield f"{path.name}: {error}"
            continue
        yield _row(manifest, sum(each.bytes for each in (manifest, *parts)))
        if verbose:
            for each in (manifest, *parts):
                yield from _arrays(each)


def _row(manifest: Manifest, size: int) -> str:
    metadata: Mapping[str, Any] = manifest.metadata
    versions = metadata.get("versions", "-")
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    numbers = (str(metadata.get(name, "-")) for name in ("epoch", "batch"))
    return _ROW.format(manifest.step, *numbers, f"{size:,}", str(metadata.get("replicas", "-")), versions)


def _arrays(manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.arrays.items():
        yield f"    {name}: {entry.dtype} {entry.shape}, sha256 {entry.sha256[:16]}…"


def import_checkpoint(export: str, directory: str, overwrite: bool) -> Loaded:
    """Write an export of a whole checkpoint as a checkpoint again, in a directory that is made if it is missing.

    With ``overwrite`` a checkpoint of the same step is replaced; no other one is removed.

    Returns:
        The new checkpoint, as it was read again.

    Raises:
        CheckpointError: the export is damaged or foreign, or the checkpoint cannot be written.
    """
    store = CheckpointStore(directory)
    if is_checkpoint(store.directory):
        raise CheckpointError(
            f"{directory}: is a checkpoint, expected the directory of all. Fix: name {store.directory.parent}, or a new directory."
        )
    step, snapshot = read_export(export, signing_key())
    steps = store.steps()
    if step in steps and not overwrite:
        raise CheckpointError(
            f"{directory}: has a checkpoint of step {step} already. Fix: give --overwrite, or choose another directory."
        )
    with CheckpointStore(directory, keep=len(steps) + 1) as writer:
        return writer.read(writer.write(step, snapshot))
