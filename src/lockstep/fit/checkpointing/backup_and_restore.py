"""The BackupAndRestore callback, and when a checkpoint is due: its ``save_freq``, which ``strategy.checkpoint`` has, too.

``CheckpointHook`` writes and restores the callback's checkpoints around each call of ``fit``. ``FitCheckpoint.batch_ended`` asks after
each step if one is due. Of several workers the chief's clock decides (``preemption``), as all write at the same step.
"""

import os
import re
import time
from collections.abc import Callable
from typing import Any

import keras

from lockstep._errors import OptionError, file_path, flag, outside_of_strategy, seconds, shown, whole_number

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


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


class SaveFrequency:
    """The schedule that ``save_freq`` describes.

    Args:
        save_freq: ``"epoch"``, a number of steps, or a time such as ``"30 s"``, ``"10min"`` or ``"2h"``.
        clock: gives seconds; monotonic.
        has_epochs: whether ``"epoch"`` is allowed.

    Raises:
        OptionError: ``save_freq`` is something else.

    Example:
        >>> every = SaveFrequency(100)
        >>> every.is_due_by_steps(199, 201), every.is_due_by_steps(201, 203)
        (True, False)
    """

    def __init__(
        self, save_freq: str | int, clock: Callable[[], float] = time.monotonic, has_epochs: bool = True
    ) -> None:
        self.steps, self.seconds = _frequency(save_freq, has_epochs)
        self._clock = clock
        self.saved()

    def is_due_by_steps(self, before: int, now: int) -> bool:
        """Return whether to save after a number of steps, given the number of steps at the last call and now."""
        return self.steps is not None and now // self.steps > before // self.steps

    def is_due_by_time(self) -> bool:
        """Return whether so many seconds have passed since the last save."""
        return self.seconds is not None and self._clock() - self._saved_at >= self.seconds

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._saved_at = self._clock()


def _frequency(save_freq: str | int, has_epochs: bool) -> tuple[int | None, float | None]:
    """Return steps and seconds from one checkpoint to the next; both None: only at the end of epochs."""
    if not isinstance(save_freq, str):
        return whole_number("save_freq", save_freq), None
    if save_freq == "epoch" and has_epochs:
        return None, None
    match = _DURATION.fullmatch(save_freq)
    if match is None:
        allowed = ['"epoch"'] * has_epochs + ["a number of steps", 'or a time such as "30 s", "10min" or "2h"']
        raise OptionError(
            f"save_freq: expected {', '.join(allowed)}, got {shown(save_freq)}. Fix: pass an int, or one of these texts."
        )
    return None, seconds("save_freq", float(match[1]) * _SECONDS[match[2]], above=None)
