"""Keras's list of callbacks, which does not hear of the steps that an earlier process has done."""

from typing import Any

import keras

from lockstep.resume.run import BackedUpFit

__all__ = ["FitCallbacks"]


class FitCallbacks(keras.callbacks.CallbackList):
    """Tells callbacks what Keras tells them, and the run after them.

    Args:
        run: is asked what to skip, and told what has ended.
        callbacks: the user's.
        **options: as Keras gives them to its list.
    """

    def __init__(self, run: BackedUpFit, callbacks: list[keras.callbacks.Callback], **options: Any) -> None:
        self._run, self._epoch = run, 0
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
            self._run.batch_ended(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        super().on_epoch_end(epoch, logs)
        self._run.epoch_ended(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """See Keras."""
        super().on_train_end(logs)
        self._run.train_ended()
