"""Checkpoints of which each process writes its shards, into a directory that all processes have."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep._errors import CheckpointError, LockstepError
from lockstep._files import open_own
from lockstep.checkpoint.format import Snapshot
from lockstep.checkpoint.shards import PART, ArrayShard, pack
from lockstep.checkpoint.store import CheckpointStore

Gather = Callable[[str, Any], list[Any]]  # returns the values of all processes, which all call it with the same topic


@dataclass(frozen=True, eq=False)
class ShardedSnapshot:
    """What one process writes of a checkpoint.

    Args:
        shards: by name of the array, those of this process.
        whole: all that is not in shards; None on other processes than the first.
    """

    shards: Mapping[str, Sequence[ArrayShard]]
    whole: Snapshot | None = None


def shared_token(directory: Path, *, is_chief: bool, gather: Gather) -> str | None:
    """Find out whether all processes have the chief's directory; all call this.

    Args:
        directory: of the checkpoints, as this process names it.
        is_chief: whether this is the first process.
        gather: see above.

    Returns:
        A random name that all processes got and saw there as a file; None if one did not see it.
    """
    token = gather("a name for parts of checkpoints", secrets.token_hex(8))[0]
    probe = directory / f".shared-{token}"
    try:
        if is_chief:
            with contextlib.suppress(OSError):  # Then no process sees it.
                os.close(open_own(probe, os.O_WRONLY))
        gather("the file by which the directory of checkpoints is known", None)
        is_shared = all(gather("whether all see the directory of checkpoints", os.path.exists(probe)))
    finally:
        if is_chief:
            probe.unlink(missing_ok=True)
    return token if is_shared else None


@dataclass(frozen=True)
class ShardedStore:
    """The store of one process for checkpoints that all processes write together.

    Each writes its shards as a part, under a hidden name. When all have, the chief moves the parts into the new checkpoint, so that it
    appears as a whole.

    Args:
        store: of the directory; the chief's writes.
        process: number of this process.
        token: of :func:`shared_token`; names of parts have it, so that a process of an earlier job cannot write into this one's.
        gather: see above.
    """

    store: CheckpointStore
    process: int
    token: str
    gather: Gather

    @property
    def directory(self) -> Path:
        """Of the checkpoints."""
        return self.store.directory

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return self.store.steps()

    def write(self, step: int, snapshot: ShardedSnapshot) -> None:
        """Write this process's shards, and wait until the checkpoint is complete; all processes call this.

        Args:
            step: number of steps that were trained.
            snapshot: the content.

        Raises:
            CheckpointError: a process could not write its part, or the chief the checkpoint. Every process gets the error.
        """
        topic, own = f"the checkpoint of step {step}", self._part(step, self.process)
        try:
            written = self.gather(f"{topic}, shards", self._write_part(own, step, snapshot.shards))
            problem = next((f"worker {n}: {each['error']}" for n, each in enumerate(written) if "error" in each), None)
            if problem is None and snapshot.whole is not None:
                parts = [(self._part(step, n), each["sha256"]) for n, each in enumerate(written)]
                problem = self._write_whole(step, snapshot.whole, parts)
            problem = self.gather(f"{topic}, outcome", problem)[0]
        finally:
            shutil.rmtree(own, ignore_errors=True)
        if problem is not None:
            raise CheckpointError(problem)

    def _part(self, step: int, process: int) -> Path:
        return self.directory / f".{PART}{process}-of-{step:09}-{self.token}"

    # An error is returned, as the other processes wait for the outcome.

    def _write_part(self, path: Path, step: int, shards: Mapping[str, Sequence[ArrayShard]]) -> dict[str, str]:
        try:
            return {"sha256": self.store.write_part(path.name, step, Snapshot(*pack(shards)))}
        except LockstepError as error:
            return {"error": str(error)}

    def _write_whole(self, step: int, whole: Snapshot, parts: Sequence[tuple[Path, str]]) -> str | None:
        try:
            self.store.write(step, whole, parts)
        except LockstepError as error:
            return str(error)
        return None
