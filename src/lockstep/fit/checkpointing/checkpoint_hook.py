"""The hook that checkpoints a call of ``fit`` if a BackupAndRestore is among its callbacks, and resumes an earlier run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras

from lockstep.checkpoint.store import CheckpointStore
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint, ResumedRun, on_all_processes
from lockstep.fit.checkpointing.metadata_check import check_metadata
from lockstep.fit.checkpointing.preemption import Preemption
from lockstep.fit.fit_hooks import FitContext, single_callback


class CheckpointHook:
    """Starts Keras's loop at the resume position, and replaces its list of callbacks with :class:`CheckpointCallbackList`.

    Raises:
        CheckpointError: on entry: no checkpoint is good, it belongs to another run, or another job writes to the directory.
        InputError: on entry: the resume position cannot be found in the input.
        OptionError: there are several BackupAndRestore callbacks.
    """

    def around_fit(self, context: FitContext) -> AbstractContextManager[None]:
        """See :class:`lockstep.fit.fit_hooks.FitHook`."""
        backup = single_callback(context.callbacks, BackupAndRestore)
        return _checkpointed(backup, context) if backup else nullcontext()


@contextmanager
def _checkpointed(backup: BackupAndRestore, context: FitContext) -> Iterator[None]:
    group = context.process_group
    store = CheckpointStore(backup.directory, backup.keep, log=context.log) if group.process == 0 else None
    with store or nullcontext(), Preemption(group, backup.frequency.is_due_by_time) as preemption:
        # No name here keeps the arrays of the resumed run, which are as large as the model.
        run = FitCheckpoint(backup, context, _resumed_run(backup, context, store), store, preemption)
        _start_at_resume_position(run, context)
        backup.is_attached, context.checkpoint = True, run
        try:
            with context.functions.hooked(run):
                yield
        finally:
            backup.is_attached = False
            with group.saving():
                run.close()


def _resumed_run(backup: BackupAndRestore, context: FitContext, store: CheckpointStore | None) -> ResumedRun:
    with context.process_group.saving():  # Reading takes as long as writing.
        check = partial(check_metadata, callbacks=context.callbacks)
        loaded = store.newest(check, keep_stored=True) if store else None
    found = on_all_processes(loaded, backup.directory, context.process_group)
    return ResumedRun.from_checkpoint(found).for_epochs(context.arguments.get("epochs", 1), backup.extend)


def _start_at_resume_position(run: FitCheckpoint, context: FitContext) -> None:
    arguments, resumed, verbose = context.arguments, run.resumed, context.arguments.get("verbose", "auto")
    arguments["epochs"] = min(resumed.epochs, resumed.position.epoch) if resumed.is_stopped else resumed.epochs
    begins, position = arguments.get("initial_epoch", 0), resumed.position.epoch
    arguments["initial_epoch"] = begins if resumed.is_new else position
    if not resumed.is_new and begins > position:
        context.log(
            f"initial_epoch={begins} has no effect: the checkpoint is in epoch {position + 1}, and the run resumes there"
        )
    arguments["callbacks"] = CheckpointCallbackList(
        run,
        arguments["callbacks"],
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=resumed.epochs,
        steps=arguments.get("steps_per_epoch") or context.data.steps,
        model=context.model,
    )


class CheckpointCallbackList(keras.callbacks.CallbackList):
    """Keras's list of callbacks, that skips the steps that an earlier process has done, and calls the checkpoint after all callbacks."""

    def __init__(self, run: FitCheckpoint, callbacks: list[keras.callbacks.Callback], **options: Any) -> None:
        self._run, self._epoch = run, 0
        super().__init__(callbacks, add_history=True, **options)
        run.callbacks = self

    def on_train_begin(self, logs: Any = None) -> None:
        self._run.train_will_begin()
        super().on_train_begin(logs)
        self._run.train_begins()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        super().on_epoch_begin(epoch, logs)
        self._run.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._run.batch_begins(self._epoch, batch):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._run.resumed.has_done(self._epoch, batch):
            super().on_train_batch_end(batch, logs)
            self._run.batch_ended(batch + 1, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._run.validation_begins()
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_test_batch_end(batch, logs)
        self._run.validation_step_ended()
        # Each access to ``model`` has Keras write the state back to the variables.
        if self._run.is_validation_cut:
            self.model.stop_evaluating = True

    def on_test_end(self, logs: Any = None) -> None:
        super().on_test_end(logs)
        self._run.validation_ended()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._run.epoch_ended(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        self._run.train_ended()
