"""The callback that asks for the NaN guard; ``NanGuardHook`` guards the steps, around the whole call of ``fit``."""

from dataclasses import dataclass
from typing import Any

import keras

from lockstep._errors import OptionError, ScopeError, whole_number

__all__ = ["NanGuard", "NanGuardOptions"]

ACTIONS = ("stop", "rollback", "skip")


@dataclass(frozen=True)
class NanGuardOptions:
    """Options of a NanGuard; an object of its own, so that a checkpoint does not restore the options of an earlier run."""

    action: str
    max_in_a_row: int
    max_rollbacks: int


class NanGuard(keras.callbacks.Callback):
    """Keeps NaN and Inf out of the weights, and reports where they come from.

    A training step whose loss or new state is not finite changes nothing: not the weights, not the optimizer, not the metrics. With
    finite numbers the bits are those of a run without the guard. A non-finite step is run again, replica by replica and layer by layer, to
    name the batch, rows, replica, layer or variable that it comes from. ``docs/nan_guard.md`` has examples and the cost.

    Args:
        action: ``"stop"``: ``fit`` raises :class:`lockstep.NonFiniteError`. ``"skip"``: a line is logged, and training continues with the
            next batch. ``"rollback"``: training continues from the newest checkpoint of the BackupAndRestore among the callbacks.
        max_in_a_row: this number of consecutive non-finite steps stops the training in any case.
        max_rollbacks: a further rollback after this number stops the training, too.

    Attributes:
        skipped: number of skipped steps.
        rollbacks: number of rollbacks.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import lockstep
        >>> guard = lockstep.callbacks.NanGuard("skip", max_in_a_row=3)
        >>> guard.skipped
        0
    """

    def __init__(self, action: str = "stop", *, max_in_a_row: int = 10, max_rollbacks: int = 3) -> None:
        super().__init__()
        if action not in ACTIONS:
            raise OptionError(f"NanGuard: action: expected one of {', '.join(ACTIONS)}, got {action!r}.")
        self.asked = NanGuardOptions(
            action,
            whole_number("NanGuard: max_in_a_row", max_in_a_row),
            whole_number("NanGuard: max_rollbacks", max_rollbacks),
        )
        self.skipped = self.rollbacks = 0
        self.watch: Any = None  # the StepGuard, during a call of fit

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        if self.watch is None:
            raise ScopeError(
                "lockstep.callbacks.NanGuard works for models of a strategy: build, load or compile the model in "
                "lockstep.MirroredStrategy().scope(), and leave fit as Keras has it."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        self.watch.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        self.watch.batch = batch

    def on_test_begin(self, logs: Any = None) -> None:
        """Check the last step before a validation."""
        if self.watch:
            self.watch.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check the last step of the epoch."""
        self.watch.settle()
