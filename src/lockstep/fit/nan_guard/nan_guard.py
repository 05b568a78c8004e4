"""The callback that asks for the guard; what it asks for is done by the strategy, around the whole call of ``fit``."""

from dataclasses import dataclass
from typing import Any

import keras

from lockstep._errors import OptionError, ScopeError, whole_number

__all__ = ["NanGuard", "NanGuardOptions"]

ACTIONS = ("stop", "rollback", "skip")


@dataclass(frozen=True)
class NanGuardOptions:
    """What a guard was asked for; an object of its own, so that no checkpoint brings back that of an earlier run."""

    action: str
    max_in_a_row: int
    max_rollbacks: int


class NanGuard(keras.callbacks.Callback):
    """Keeps NaN and Inf out of the weights, and says where they come from.

    No training step whose loss or new state is not finite changes anything: not the weights, not the optimizer, not the metrics. With
    finite numbers the bits are those of a run without the guard. A bad step is run again, replica by replica and layer by layer, to name
    the batch, the rows, the replica, the layer or the variable that it comes from. ``docs/nan_guard.md`` has examples and the price.

    Args:
        action: ``"stop"``: ``fit`` raises :class:`lockstep.NonFiniteError`. ``"skip"``: a line is logged, and training goes on with the
            next batch. ``"rollback"``: so it does from the newest checkpoint of the BackupAndRestore among the callbacks.
        max_in_a_row: so many bad steps one after the other stop the training in any case.
        max_rollbacks: one more rollback stops it, too.

    Attributes:
        skipped: number of steps that were left out.
        rollbacks: how often training went back to a checkpoint.

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
        self.watch: Any = None  # is there during a call of fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras says that training begins.

        Raises:
            ScopeError: the model is not one of a strategy.
        """
        if self.watch is None:
            raise ScopeError(
                "lockstep.callbacks.NanGuard works for models of a strategy: build, load or compile the model in "
                "lockstep.MirroredStrategy().scope(), and leave fit as Keras has it."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch begins."""
        self.watch.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras says that a step begins, or the first of several."""
        self.watch.batch = batch

    def on_test_begin(self, logs: Any = None) -> None:
        """The validation of an epoch begins: it should see a state that was answered for."""
        if self.watch:
            self.watch.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch ends, with no step under way."""
        self.watch.settle()
