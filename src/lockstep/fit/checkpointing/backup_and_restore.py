"""The BackupAndRestore callback; ``CheckpointHook`` writes and restores its checkpoints around each call of ``fit``."""

import os
from typing import Any

import keras

from lockstep._errors import file_path, flag, outside_of_strategy, whole_number
from lockstep.fit.checkpointing.save_frequency import SaveFrequency


class BackupAndRestore(keras.callbacks.Callback):
    """Checkpoints ``fit``, and resumes at the exact batch at which an earlier run was stopped, with the bits of an uninterrupted run.

    Counterpart of ``keras.callbacks.BackupAndRestore``, which begins the epoch anew. A checkpoint has the variables with those of the
    optimizer, the metrics of the running epoch, random states, the position in the input, and the state of all callbacks: of those of Keras
    and Lockstep what training changes, and never the arguments of their constructors; of others the attributes that training has changed,
    if they are numbers, text, arrays, or containers of them, such as lists, tuples, sets, dicts and deques.

    Args:
        directory: directory of the checkpoints; one for each run.
        save_freq: ``"epoch"``, a number of steps, or a time such as ``"30 s"``, ``"10min"`` or ``"2h"``. The end of an epoch always counts.
        keep: number of the newest checkpoints that are kept.
        async_: write checkpoints in a thread, while training continues.
        replay: read an input that cannot seek, such as a generator or ``tf.data``, again up to the position of the checkpoint. False:
            refuse such an input.
        allow_changes: resume even if the number of replicas or the batches have changed; the numbers then change, too.
        extend: if the earlier run has finished, train ``epochs`` further epochs; an extension that was interrupted is resumed. Otherwise
            ``epochs`` counts those of the earlier run.

    Raises:
        CheckpointError: from ``fit``: another job writes there, the directory is not writable, no checkpoint in it is good, or the one
            that would be resumed is of a run with another set-up.
        InputError: from ``fit``: the data are not those of the checkpoint, or cannot be read up to its position.
        OptionError: an argument is out of its range; from ``fit``: there are two of these callbacks.
        ScopeError: from ``fit``: the model does not belong to a strategy.

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
        self.directory = file_path("BackupAndRestore: directory", directory)
        self.frequency = SaveFrequency(save_freq)
        self.keep = whole_number("BackupAndRestore: keep", keep)
        self.async_ = flag("BackupAndRestore: async_", async_)
        self.replay = flag("BackupAndRestore: replay", replay)
        self.allow_changes = flag("BackupAndRestore: allow_changes", allow_changes)
        self.extend = flag("BackupAndRestore: extend", extend)
        self.is_attached = False

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        if not self.is_attached:
            raise outside_of_strategy(self)
