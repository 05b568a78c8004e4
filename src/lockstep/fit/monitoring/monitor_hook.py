"""What surrounds a call of ``fit``: where a callback or a folder wants to know how it goes, its steps are measured."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras

from lockstep._keras.fit_state import steps_done
from lockstep.data.device_placement import Placement
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.keras_adapter import KerasInput
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.checkpoint_hook import backup_among
from lockstep.fit.monitoring.base_callback import Attachment, MonitorCallback
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.status_file import StatusWriter
from lockstep.fit.monitoring.step_timer import FitProgress, StepTimer
from lockstep.fit.monitoring.tensorboard import TensorBoard
from lockstep.fit.monitoring.throughput import ThroughputMonitor

__all__ = ["monitored"]

_WINDOW = 100


@contextmanager
def monitored(
    arguments: dict[str, Any],
    functions: StepFunctions,
    placement: Placement,
    process_group: ProcessGroup,
    announce: Callable[[str], None],
) -> Iterator[None]:
    """Is open during a call of ``fit``, whose arguments may be changed.

    Args:
        arguments: of the call; x is an :class:`KerasInput`.
        functions: of the model.
        placement: devices and number of replicas.
        process_group: the processes.
        announce: takes a line for the user.
    """
    given = arguments.get("callbacks")
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    watching = [callback for callback in callbacks if isinstance(callback, MonitorCallback)]
    folders = _folders(watching, backup_among(callbacks))
    if not watching and (not folders or process_group.process):
        yield
        return
    data: KerasInput = arguments["x"]
    window = max((found.window for found in watching if isinstance(found, ThroughputMonitor)), default=_WINDOW)
    clock, devices = StepTimer(functions.listener, lambda: data.meter.waited, window), placement.devices
    status = StatusWriter(
        [] if process_group.process else folders, clock, data.meter, process_group, len(devices), announce
    )
    # The others see what these add to the logs.
    first = [callback for callback in watching if isinstance(callback, ThroughputMonitor)]
    others = [callback for callback in callbacks if callback not in first]
    arguments["callbacks"] = [_Marks(clock, data, status), *first, *others]
    with _listening(functions, clock), _told(status), ExitStack() as stack:
        attachment = Attachment(
            clock, devices, FlopCounter(), lambda: data.resumed, process_group.process == 0, announce
        )
        clock.followers.append(attachment.counting)
        for callback in watching:
            stack.callback(callback.detach)
            callback.attach(attachment, arguments)
        yield


def _folders(watching: list[MonitorCallback], backup: BackupAndRestore | None) -> list[Path]:
    """Where the status is written to."""
    found = [callback.log_dir for callback in watching if isinstance(callback, TensorBoard)]
    return list({path.absolute(): None for path in [*found, *([backup.directory] if backup else [])]})


@contextmanager
def _told(status: StatusWriter) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        status.end(error)
        raise
    status.end(None)


@contextmanager
def _listening(functions: StepFunctions, clock: StepTimer) -> Iterator[None]:
    before, functions.listener = functions.listener, clock
    try:
        yield
    finally:
        functions.listener = before


class _Marks(keras.callbacks.Callback):
    """Tells the clock what Keras's loop does besides the steps; it has no method for single batches, and no attribute that a checkpoint keeps."""

    def __init__(self, clock: StepTimer, data: KerasInput, status: StatusWriter) -> None:
        super().__init__()
        self._clock, self._data, self._status = clock, data, status

    def on_train_begin(self, logs: Any = None) -> None:
        self._status.start()  # Not before: until here another job may have the folder.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        total = self._clock.course.total if self._clock.has_begun else steps_done(self.model.optimizer)
        epochs, steps = self.params["epochs"], self.params["steps"]
        self._clock.begin_epoch(FitProgress(epoch, epochs, self._data.resumed_steps, steps, total))

    def on_test_begin(self, logs: Any = None) -> None:
        self._clock.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._clock.pause()
        self._clock.enter("callback")

    def on_train_end(self, logs: Any = None) -> None:
        self._clock.enter("end")
