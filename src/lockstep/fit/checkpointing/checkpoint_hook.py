"""What surrounds a call of ``fit``: with a BackupAndRestore among its callbacks, the call is backed up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from lockstep._errors import OptionError
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.keras_adapter import KerasInput
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.callback_list import FitCallbackList
from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint, Found
from lockstep.fit.checkpointing.preemption import Preemption

__all__ = ["backed_up", "backup_among"]


@contextmanager
def backed_up(
    model: keras.Model,
    arguments: dict[str, Any],
    functions: StepFunctions,
    setup: dict[str, Any],
    process_group: ProcessGroup,
    announce: Callable[[str], None],
) -> Iterator[FitCheckpoint | None]:
    """Is open during a call of ``fit``, whose arguments may be changed.

    Args:
        model: of a strategy.
        arguments: of the call; x is an :class:`KerasInput`.
        functions: of the model.
        setup: what must be the same in a run that goes on.
        process_group: the processes.
        announce: takes a line for the user.

    Raises:
        CheckpointError: no checkpoint is good, or it is one of another run; or another job writes to the directory.
        InputError: the place in the data cannot be found.
        OptionError: there are several backups.
    """
    backup = backup_among(arguments.get("callbacks"))
    if backup is None:
        yield None
        return
    data: KerasInput = arguments["x"]
    store = CheckpointStore(backup.directory, backup.keep, announce=announce) if process_group.process == 0 else None
    with store or nullcontext(), Preemption(process_group) as preemption:
        found = process_group.broadcast_from_chief(_newest(store))
        run = FitCheckpoint(
            backup, model, data, setup | {"steps of an epoch": data.steps}, found, store, preemption, announce
        )
        _begin(run, backup, arguments, model, data.steps)
        with _attached(run, backup, functions):
            yield run


@contextmanager
def _attached(run: FitCheckpoint, backup: BackupAndRestore, functions: StepFunctions) -> Iterator[None]:
    before = functions.skipped, functions.stepped
    backup.is_attached, functions.skipped, functions.stepped = True, run.skipped, run.stepped
    run.settle = functions.settle
    try:
        yield
    finally:
        backup.is_attached = False
        functions.skipped, functions.stepped = before
        run.close()


def _begin(
    run: FitCheckpoint, backup: BackupAndRestore, arguments: dict[str, Any], model: keras.Model, steps: int | None
) -> None:
    """Have Keras's loop begin where the earlier run stood, and tell its callbacks through ours."""
    epochs, verbose = arguments.get("epochs", 1), arguments.get("verbose", "auto")
    if backup.extend and run.is_finished:
        epochs += run.epoch
        run.is_stopped = False
    run.epochs = epochs
    arguments["epochs"] = min(epochs, run.epoch) if run.is_stopped else epochs
    arguments["initial_epoch"] = max(run.epoch, arguments.get("initial_epoch", 0))
    arguments["callbacks"] = FitCallbackList(
        run,
        arguments["callbacks"],
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def backup_among(callbacks: Any) -> BackupAndRestore | None:
    """The one backup of a call of ``fit``; OptionError where there are several."""
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    found = [callback for callback in given if isinstance(callback, BackupAndRestore)]
    if len(found) > 1:
        raise OptionError(f"fit: callbacks: expected one BackupAndRestore, got {len(found)}.")
    return found[0] if found else None


def _newest(store: CheckpointStore | None) -> Found | None:
    loaded = store.newest() if store else None
    return (loaded.step, loaded.snapshot.arrays, loaded.snapshot.facts) if loaded else None
