"""Keras's list of callbacks, which does not hear of the steps that an earlier process has done."""

from typing import Any

import keras

from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint

__all__ = ["FitCallbackList"]


class FitCallbackList(keras.callbacks.CallbackList):
    """Tells callbacks what Keras tells them, and the run after them.

    Args:
        run: is asked what to skip, and told what has ended.
        callbacks: the user's.
        **options: as Keras gives them to its list.
    """

    def __init__(self, run: FitCheckpoint, callbacks: list[keras.callbacks.Callback], **options: Any) -> None:
        self._run, self._epoch, self._is_whole = run, 0, True
        super().__init__(callbacks, add_history=True, **options)
        run.callbacks = self.callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras."""
        super().on_train_begin(logs)
        self._run.train_begins()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        self._epoch = epoch
        super().on_epoch_begin(epoch, logs)
        self._run.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        if not self._run.skips(self._epoch, batch):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        if not self._run.skips(self._epoch, batch):
            super().on_train_batch_end(batch, logs)
            self._run.batch_ended(batch + 1, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """See Keras."""
        self._run.validation_begins()
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        super().on_test_batch_end(batch, logs)
        self._is_whole = self._is_whole and self._run.validation_goes_on()
        self.model.stop_evaluating = self.model.stop_evaluating or not self._is_whole

    def on_test_end(self, logs: Any = None) -> None:
        """See Keras."""
        super().on_test_end(logs)
        self._run.validation_ended(self._is_whole)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        super().on_epoch_end(epoch, logs)
        self._run.epoch_ended(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """See Keras."""
        super().on_train_end(logs)
        self._run.train_ended()
