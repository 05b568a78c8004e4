"""Only the chief prints and writes: on the other workers, what would do so is left out."""

from typing import Any

import keras

from lockstep._errors import ModelError
from lockstep._keras.patches import CHIEF_ONLY_FILES, install

__all__ = ["leave_files_to_the_chief", "leave_printing_to_the_chief"]

_WRITING = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def leave_files_to_the_chief(model: keras.Model) -> None:
    """Have ``save``, ``save_weights`` and ``export`` of a model write nothing, so that ModelCheckpoint does not, either."""
    install(CHIEF_ONLY_FILES, [(model, name, _write_nothing) for name in CHIEF_ONLY_FILES.attributes])


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """The chief writes."""


def leave_printing_to_the_chief(arguments: dict[str, Any]) -> None:
    """Have a call of ``fit``, ``evaluate`` or ``predict`` print nothing, and drop Keras's callbacks that only write.

    Args:
        arguments: of the call, which are changed.
    """
    arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, (list, tuple)):
        arguments["callbacks"] = [callback for callback in callbacks if not isinstance(callback, _WRITING)]


def refuse_backup(arguments: dict[str, Any]) -> None:
    """Refuse Keras's own BackupAndRestore, whose files every worker would write and delete.

    Raises:
        ModelError: it is among the callbacks.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, (list, tuple)) and any(isinstance(x, keras.callbacks.BackupAndRestore) for x in callbacks):
        raise ModelError(
            "keras.callbacks.BackupAndRestore writes and deletes its files on every worker at once, and restores the beginning of an "
            "epoch only. Take lockstep.callbacks.BackupAndRestore."
        )
