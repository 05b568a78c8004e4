"""Positions in a training, the run that a checkpoint resumes, and the log lines about a resume."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lockstep.data.iterator_state import IteratorState

__all__ = ["Found", "ResumedRun", "TrainPosition", "changed_versions_message", "resume_message"]

Found = tuple[int, Mapping[str, np.ndarray], Mapping[str, Any]]  # step, arrays and metadata of a checkpoint


class TrainPosition(NamedTuple):
    """A point between two training steps.

    Args:
        step: number of steps of the run before it.
        epoch: the epoch that runs, or comes next; from 0.
        batch: number of steps of that epoch before it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class ResumedRun:
    """The checkpoint of an earlier run, and the epochs to train now; without a checkpoint, the begin of a new run.

    Args:
        position: of the checkpoint.
        arrays: of the checkpoint, by name.
        metadata: of the checkpoint; empty for a new run.
        epochs: number of epochs that ``fit`` trains in all, those of the earlier run included.
        is_stopped: whether a callback stopped the earlier run at the end of an epoch, so that nothing is left to train.
    """

    position: TrainPosition = field(default_factory=TrainPosition)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 0
    is_stopped: bool = False

    @classmethod
    def from_checkpoint(cls, found: Found | None) -> "ResumedRun":
        """The run whose checkpoint was found; a new run if there is none."""
        if found is None:
            return cls()
        step, arrays, metadata = found
        position = TrainPosition(step, metadata.get("epoch", 0), metadata.get("batch", 0))
        return cls(position, arrays, metadata, is_stopped=bool(metadata.get("stop_training")) and not position.batch)

    def for_epochs(self, epochs: int, extend: bool) -> "ResumedRun":
        """Return the run with the epochs of a call of ``fit``; ``extend``: they come after those of an earlier run that has finished."""
        if extend and self.metadata.get("is_finished"):
            return replace(self, epochs=self.position.epoch + epochs, is_stopped=False)
        return replace(self, epochs=epochs)

    @property
    def is_new(self) -> bool:
        """Whether there was no checkpoint."""
        return not self.metadata

    @property
    def iterator(self) -> IteratorState | None:
        """The position in the input; None: a new pass begins."""
        given = self.metadata.get("position")
        return IteratorState(**given) if given else None

    @property
    def logs(self) -> Any:
        """The logs of the last step."""
        return jax.tree.map(lambda number: self.arrays[f"logs/{number}"], self.metadata.get("logs", {}))

    def has_done(self, epoch: int, batch: int) -> bool:
        """Whether the earlier run has trained this batch of this epoch, or has found the end of the epoch before it."""
        is_over: bool = self.metadata.get("is_epoch_over", False)
        return epoch == self.position.epoch and (batch < self.position.batch or is_over)

    def has_ended_before(self, epoch: int, batch: int) -> bool:
        """Whether the earlier run has found the end of the epoch before this batch."""
        return self.has_done(epoch, batch) and batch >= self.position.batch


def resume_message(resumed: ResumedRun, directory: Path) -> str:
    """Return the line about the resume position, or why nothing is left to train.

    Args:
        resumed: the earlier run.
        directory: of the checkpoints.

    Example:
        >>> resume_message(ResumedRun(TrainPosition(step=56, epoch=3, batch=8), epochs=5), Path("run"))
        'resumes from run at step 56: epoch 4, after 8 of its steps'
    """
    position = resumed.position
    has = f"{directory} has {position.epoch} of {resumed.epochs} epochs, {position.step} steps"
    if resumed.is_stopped:
        return f"{has}, and a callback has ended it: nothing is left to train. To train more, use BackupAndRestore(extend=True); to begin anew, take another directory."
    if position.epoch >= resumed.epochs:
        return f"{has}: nothing is left to train. To train more, give fit more epochs; to begin anew, take another directory."
    return f"resumes from {directory} at step {position.step}: epoch {position.epoch + 1}, after {position.batch} of its steps"


def changed_versions_message(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return a line about packages that have changed since a checkpoint was written; None if none has.

    Example:
        >>> changed_versions_message({"jax": "0.10.0"}, {"jax": "0.10.2"})
        'results may differ in single bits from here on, as other versions compute them: jax 0.10.0 then, 0.10.2 now'
    """
    changed = [f"{name} {then.get(name)} then, {new} now" for name, new in now.items() if then.get(name) != new]
    return (
        f"results may differ in single bits from here on, as other versions compute them: {'; '.join(changed)}"
        if changed
        else None
    )
