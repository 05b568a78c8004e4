"""The callback that asks for checkpoints; what it asks for is done by the strategy, around the whole call of ``fit``."""

import os
from pathlib import Path
from typing import Any

import keras

from lockstep._errors import ScopeError, whole_number
from lockstep.fit.checkpointing.save_schedule import SaveFrequency

__all__ = ["BackupAndRestore"]


class BackupAndRestore(keras.callbacks.Callback):
    """Has ``fit`` go on at the very batch where an earlier run was stopped, with the same bits as if it had not been.

    Counterpart of ``keras.callbacks.BackupAndRestore``, which begins the epoch anew. Kept are the variables with those of the
    optimizer, the metrics of the running epoch, random states, the place in the data, and the attributes of all callbacks that are
    numbers, text, arrays, or lists and dicts of them.

    Args:
        directory: where the checkpoints are; one for each run.
        save_freq: ``"epoch"``, a number of steps, or a time such as ``"30 s"``, ``"10min"`` or ``"2h"``. The end of an epoch always counts.
        keep: how many checkpoints stay.
        async_: write them while training goes on.
        replay: read an input again up to its place where it cannot be found otherwise, as with generators and ``tf.data``. False:
            such an input is refused.
        allow_changes: go on though the number of replicas or the batches have changed; the numbers are then others.
        extend: ``epochs`` of ``fit`` are further ones where the earlier run has ended. Otherwise they are all.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import lockstep
        >>> backup = lockstep.callbacks.BackupAndRestore("run", save_freq="10min")
        >>> backup.frequency.seconds
        600.0
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int = 3,
        async_: bool = True,
        *,
        replay: bool = True,
        allow_changes: bool = False,
        extend: bool = False,
    ) -> None:
        super().__init__()
        self.directory = Path(directory)
        self.frequency = SaveFrequency(save_freq)
        self.keep = whole_number("BackupAndRestore: keep", keep)
        self.async_, self.replay = bool(async_), bool(replay)
        self.allow_changes, self.extend = bool(allow_changes), bool(extend)
        self.is_attached = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras says that training begins.

        Raises:
            ScopeError: the model is not one of a strategy.
        """
        if not self.is_attached:
            raise ScopeError(
                "lockstep.callbacks.BackupAndRestore works for models of a strategy: build, load or compile the model in "
                "lockstep.MirroredStrategy().scope(), and leave fit as Keras has it."
            )
