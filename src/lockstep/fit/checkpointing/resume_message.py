"""What the user is told of the place from which a call of ``fit`` goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ResumePosition", "about_other_versions"]


@dataclass(frozen=True)
class ResumePosition:
    """Where an earlier run stood.

    Args:
        step: number of its steps.
        epoch: the one that comes, or is begun; from 0.
        done: steps of that epoch.
        epochs: that are asked for now, those of the earlier run included.
        is_stopped: whether a callback has ended it.
    """

    step: int
    epoch: int
    done: int
    epochs: int
    is_stopped: bool

    def told(self, directory: Path) -> str:
        """A line about it.

        Args:
            directory: of its checkpoints.

        Example:
            >>> ResumePosition(step=56, epoch=3, done=8, epochs=5, is_stopped=False).told(Path("run"))
            'goes on from run at step 56: epoch 4, after 8 of its steps'
        """
        has = f"{directory} has {self.epoch} of {self.epochs} epochs, {self.step} steps"
        if self.is_stopped:
            return f"{has}, and a callback has ended it: nothing is left to train. For more say BackupAndRestore(extend=True); to begin anew, another directory."
        if self.epoch >= self.epochs:
            return f"{has}: nothing is left to train. For more give fit more epochs; to begin anew, another directory."
        return f"goes on from {directory} at step {self.step}: epoch {self.epoch + 1}, after {self.done} of its steps"


def about_other_versions(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """A line about packages that have changed since a checkpoint was written; None where none has.

    Example:
        >>> about_other_versions({"jax": "0.10.0"}, {"jax": "0.10.2"})
        'the bits may be others from here on, as other programs compute them: jax 0.10.0 then, 0.10.2 now'
    """
    changed = [f"{name} {then.get(name)} then, {new} now" for name, new in now.items() if then.get(name) != new]
    return (
        f"the bits may be others from here on, as other programs compute them: {'; '.join(changed)}"
        if changed
        else None
    )
