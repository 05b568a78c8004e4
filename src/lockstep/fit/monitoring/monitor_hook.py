"""The hook that times the steps of a call of ``fit`` for its monitoring callbacks and for the status file."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras

from lockstep._keras.trainer import steps_done
from lockstep.data.keras_adapter import KerasInput
from lockstep.execution.train_functions import StepHook
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.hooks import FitContext, callbacks_in, single_callback
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.status_file import StatusWriter
from lockstep.fit.monitoring.step_timer import Attachment, FitProgress, MonitorCallback, StepTimer
from lockstep.fit.monitoring.tensorboard import TensorBoard
from lockstep.fit.monitoring.throughput import ThroughputMonitor

__all__ = ["MonitorHook"]

_WINDOW = 100


class MonitorHook:
    """Attaches monitoring callbacks to a :class:`StepTimer`, and writes the status file to the folders of checkpoints and TensorBoard."""

    def around_fit(self, context: FitContext) -> AbstractContextManager[None]:
        """See :class:`lockstep.fit.hooks.FitHook`."""
        monitors = [callback for callback in context.callbacks if isinstance(callback, MonitorCallback)]
        folders = _status_folders(monitors, single_callback(context.callbacks, BackupAndRestore))
        if context.process_group.process:
            folders = []
        return _monitored(context, monitors, folders) if monitors or folders else nullcontext()


def _status_folders(monitors: list[MonitorCallback], backup: BackupAndRestore | None) -> list[Path]:
    found = [callback.log_dir for callback in monitors if isinstance(callback, TensorBoard)]
    return list({path.absolute(): None for path in [*found, *([backup.directory] if backup else [])]})


@contextmanager
def _monitored(context: FitContext, monitors: list[MonitorCallback], folders: list[Path]) -> Iterator[None]:
    data, functions, devices = context.data, context.functions, context.placement.devices
    window = max((monitor.window for monitor in monitors if isinstance(monitor, ThroughputMonitor)), default=_WINDOW)
    timer = StepTimer(lambda: data.meter.waited, window)
    status = StatusWriter(folders, timer, data.meter, context.process_group, len(devices), context.log)
    # ThroughputMonitor comes first, as the other callbacks see what it adds to the logs.
    first = [callback for callback in monitors if isinstance(callback, ThroughputMonitor)]
    others = [callback for callback in callbacks_in(context.arguments) if callback not in first]
    context.arguments["callbacks"] = [_TimerCallback(timer, data, status), *first, *others]
    with functions.hooked(timer), _ended(status), ExitStack() as stack:

        def add_step_hook(hook: StepHook) -> None:
            stack.enter_context(functions.hooked(hook))

        counter, is_chief = FlopCounter(), context.process_group.process == 0
        add_step_hook(counter)
        attachment = Attachment(timer, devices, counter, lambda: data.resumed, is_chief, context.log, add_step_hook)
        for monitor in monitors:
            stack.callback(monitor.detach)
            monitor.attach(attachment, context.arguments)
        yield


@contextmanager
def _ended(status: StatusWriter) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        status.end(error)
        raise
    status.end(None)


class _TimerCallback(keras.callbacks.Callback):
    """Reports to the timer what Keras's loop does besides the steps; it has no method for single batches, and no attribute that a checkpoint keeps."""

    def __init__(self, timer: StepTimer, data: KerasInput, status: StatusWriter) -> None:
        super().__init__()
        self._timer, self._data, self._status = timer, data, status

    def on_train_begin(self, logs: Any = None) -> None:
        self._status.start()  # Not before: until here another job may write to the folder.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        total = self._timer.progress.total if self._timer.has_begun else steps_done(self.model.optimizer)
        epochs, steps = self.params["epochs"], self.params["steps"]
        self._timer.begin_epoch(FitProgress(epoch, epochs, self._data.resumed_steps, steps, total))

    def on_test_begin(self, logs: Any = None) -> None:
        self._timer.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._timer.pause()
        self._timer.enter("callback")

    def on_train_end(self, logs: Any = None) -> None:
        self._timer.enter("end")
