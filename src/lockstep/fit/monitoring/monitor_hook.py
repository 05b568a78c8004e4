"""The hook that measures steps, and the status file that ``lockstep top`` reads.

Only the chief writes, in a thread, so that the file stays fresh while a step takes long. Each write replaces the whole file. A write
that fails is logged once, and training continues.
"""

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras

from lockstep._atomic_files import replace_file
from lockstep._errors import summary_of
from lockstep._keras.trainer import steps_done
from lockstep.checkpoint.serialization import STATUS
from lockstep.data.fit_wrapper import callbacks_in
from lockstep.data.input_bound import WaitMeter
from lockstep.data.process_group import ProcessGroup
from lockstep.distributed.control.heartbeat import WorkerStatus
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.fit_hooks import FitContext, single_callback
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.step_timer import (
    Attachment,
    FitProgress,
    MonitorCallback,
    StepTimer,
    ThroughputMonitor,
    numbers_of,
)
from lockstep.fit.monitoring.tensorboard import TensorBoard
from lockstep.fit.nan_guard import NanGuard

_INTERVAL, _WINDOW = 1.0, 10  # seconds from write to write; and number of samples for shares of the time
_MAX_WAIT_SECONDS = 5.0  # that the end of fit waits for a write that hangs

# A time, and by worker the seconds that its activities have taken so far.
Sample = tuple[float, Mapping[int, Mapping[str, float]]]


class StatusWriter:
    """Writes the status of one call of ``fit`` from :meth:`start` on, and how it ended when this context closes.

    ``devices`` is the number of devices of all processes.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        timer: StepTimer,
        meter: WaitMeter,
        process_group: ProcessGroup,
        devices: int,
        log: Callable[[str], None],
    ) -> None:
        self._folders, self._timer, self._meter, self._process_group = folders, timer, meter, process_group
        self._devices, self._log, self._begun = devices, log, time.time()
        self._samples: deque[Sample] = deque(maxlen=_WINDOW)
        self._has_ended, self._has_failed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to write, when training begins."""
        if not self._folders:
            return
        self._thread = threading.Thread(target=self._run, name="lockstep-status", daemon=True)
        self._thread.start()

    def __enter__(self) -> "StatusWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._thread is None:  # Training has never begun, and the folder may belong to another job.
            return
        self._has_ended.set()
        self._thread.join(_MAX_WAIT_SECONDS)
        if self._thread.is_alive():
            return
        state = "ended" if error is None else "failed" if isinstance(error, Exception) else "stopped"
        self._write(state, summary_of(error) if error else None)

    def _run(self) -> None:
        self._write("running", None)
        while not self._has_ended.wait(_INTERVAL):
            self._write("running", None)

    def _write(self, state: str, reason: str | None) -> None:
        text = json.dumps(self._status(state, reason), allow_nan=False)
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / STATUS, lambda file: file.write(text.encode()))
            except OSError as error:
                if not self._has_failed:
                    self._log(f"{folder / STATUS} cannot be written, so that lockstep top shows nothing new: {error}")
                self._has_failed = True

    def _status(self, state: str, reason: str | None) -> dict[str, Any]:
        progress, recent = self._timer.progress, numbers_of(self._timer.recent, self._devices)
        rows_per_second, seconds_per_step = recent["throughput/samples_per_sec"], recent["time/step"]
        is_measured = not math.isnan(seconds_per_step)
        return {
            "version": 1,
            "state": state,
            "reason": reason,
            "time": time.time(),
            "begun": self._begun,
            "epoch": progress.epoch + 1,
            "epochs": progress.epochs,
            "step": progress.done,
            "steps": progress.steps,
            "steps_in_all": progress.total,
            "rows_per_second": rows_per_second if is_measured else None,
            "seconds_per_step": seconds_per_step if is_measured else None,
            "devices": self._devices,
            "workers": self._workers(),
        }

    def workers(self) -> list[tuple[dict[str, Any], Mapping[str, float]]]:
        """Return for each worker what it does, and the seconds that its activities have taken so far."""
        now, statuses = time.monotonic(), self._process_group.worker_statuses()
        alone = {"waited": self._meter.waited, "read": self._meter.read}
        return [(_row(status, now), status.metadata) for status in statuses] or [(self._single_process(), alone)]

    def _workers(self) -> list[dict[str, Any]]:
        now, workers = time.monotonic(), self.workers()
        seconds = {row["worker"]: numbers for row, numbers in workers}
        if self._samples and _has_fallen(self._samples[-1][1], seconds):
            self._samples.clear()  # The last heartbeat of a worker was sent in another call of fit.
        self._samples.append((now, seconds))
        return [row | shares(self._samples, row["worker"]) for row, _ in workers]

    def _single_process(self) -> dict[str, Any]:
        phase, seconds = self._timer.phase[0], self._timer.seconds_in_phase()
        process = {"worker": 0, "host": socket.gethostname(), "pid": os.getpid()}
        return process | {
            "step": self._timer.progress.total,
            "phase": phase,
            "seconds": seconds,
            "silent": 0.0,
            "left": False,
        }


def _row(status: WorkerStatus, now: float) -> dict[str, Any]:
    process = {"worker": status.peer.index, "host": status.peer.host, "pid": status.peer.pid}
    ages = {"seconds": max(0.0, now - status.since), "silent": max(0.0, now - status.heard)}
    return process | ages | {"step": status.step, "phase": status.activity, "left": status.left}


def _has_fallen(before: Mapping[int, Mapping[str, float]], now: Mapping[int, Mapping[str, float]]) -> bool:
    pairs = ((values, now.get(worker, {})) for worker, values in before.items())
    return any(new.get(name, value) < value for values, new in pairs for name, value in values.items())


def shares(samples: Sequence[Sample], worker: int) -> dict[str, float]:
    """Return which share of the time each activity of a worker has taken between the first and the last sample.

    Example:
        >>> shares([(10.0, {0: {"waited": 3.0}}), (14.0, {0: {"waited": 4.0}})], 0)
        {'waited': 0.25}
    """
    (begun, first), (now, last) = samples[0], samples[-1]
    before, after = first.get(worker, {}), last.get(worker, {})
    seconds = max(now - begun, 1e-9)
    return {name: min(1.0, max(0.0, value - before.get(name, 0.0)) / seconds) for name, value in after.items()}


_THROUGHPUT_WINDOW = 100


class MonitorHook:
    """Attaches monitoring callbacks to a :class:`StepTimer`, and writes the status file to the folders of checkpoints and TensorBoard."""

    def __init__(self) -> None:
        self._counters: WeakKeyDictionary[keras.Model, _StepCounter] = WeakKeyDictionary()
        # By training function, without and with a NanGuard, which has it compile another program.
        self._compiled: WeakKeyDictionary[Any, tuple[dict[Any, int], dict[Any, int]]] = WeakKeyDictionary()

    def around_fit(self, context: FitContext) -> AbstractContextManager[None]:
        """See :class:`lockstep.fit.fit_hooks.FitHook`."""
        monitors = [callback for callback in context.callbacks if isinstance(callback, MonitorCallback)]
        folders = _status_folders(monitors, single_callback(context.callbacks, BackupAndRestore))
        if context.process_group.process:
            folders = []
        return self._counted(context, monitors, folders) if monitors or folders else nullcontext()

    @contextmanager
    def _counted(self, context: FitContext, monitors: list[MonitorCallback], folders: list[Path]) -> Iterator[None]:
        """Continue the count of steps where the last monitored call of the model, or the run that is resumed, has ended."""
        model, backup = context.model, single_callback(context.callbacks, BackupAndRestore)
        counter = self._counters.setdefault(model, _StepCounter())
        before = counter.count(model.optimizer)  # Now, as a resumed run will restore the optimizer's count.
        run = backup and backup.directory.absolute()
        is_guarded = single_callback(context.callbacks, NanGuard) is not None
        windows = (monitor.window for monitor in monitors if isinstance(monitor, ThroughputMonitor))
        timer = StepTimer(
            lambda: context.data.meter.waited,
            max(windows, default=_THROUGHPUT_WINDOW),
            compiled=lambda model: self._compiled.setdefault(model.train_function, ({}, {}))[is_guarded],
        )
        with _monitored(context, monitors, folders, timer, partial(counter.count_from, run, before)):
            yield
        counter.steps, counter.updates = timer.progress.total, steps_done(model.optimizer)


@dataclass
class _StepCounter:
    """Counts the steps of a model. The optimizer's count alone has no skipped steps, and custom training steps count as they like.

    Args:
        steps: number at the end of the last monitored call of ``fit``.
        updates: the optimizer's count then.
        before_runs: by the directory of its checkpoints, the number of steps before a run.
    """

    steps: int = 0
    updates: int = 0
    before_runs: dict[Path | None, int] = field(default_factory=dict)

    def count(self, optimizer: Any) -> int:
        """Return the number now: calls of ``fit`` that were not monitored, or a file, may have added some."""
        return self.steps + max(0, steps_done(optimizer) - self.updates)

    def count_from(self, run: Path | None, before: int, resumed: int) -> int:
        """Return the number at the first step of a call.

        Args:
            run: the directory of its checkpoints.
            before: the number before the call.
            resumed: number of steps of the run that were done before, in this process or another one; 0: it begins.
        """
        if not resumed:
            self.before_runs[run] = before
        return self.before_runs.setdefault(run, before) + resumed


def _status_folders(monitors: list[MonitorCallback], backup: BackupAndRestore | None) -> list[Path]:
    found = [callback.log_dir for callback in monitors if isinstance(callback, TensorBoard)]
    return list({path.absolute(): None for path in [*found, *([backup.directory] if backup else [])]})


@contextmanager
def _monitored(
    context: FitContext,
    monitors: list[MonitorCallback],
    folders: list[Path],
    timer: StepTimer,
    count_from: Callable[[int], int],
) -> Iterator[None]:
    data, functions, devices = context.data, context.functions, context.placement.devices
    status = StatusWriter(folders, timer, data.meter, context.process_group, len(devices), context.log)
    # ThroughputMonitor comes first, as the other callbacks see what it adds to the logs.
    first = [callback for callback in monitors if isinstance(callback, ThroughputMonitor)]
    others = [callback for callback in callbacks_in(context.arguments) if callback not in first]
    context.arguments["callbacks"] = [_TimerCallback(timer, status, context, count_from), *first, *others]
    with functions.hooked(timer), status, ExitStack() as stack:

        def add_step_hook(hook: StepHook) -> None:
            stack.enter_context(functions.hooked(hook))

        counter, is_chief = FlopCounter(), context.process_group.process == 0
        add_step_hook(counter)
        attachment = Attachment(
            timer,
            devices,
            counter,
            is_resumed=lambda: data.resumed,
            is_validation_cut=lambda: context.checkpoint is not None and context.checkpoint.is_validation_cut,
            is_chief=is_chief,
            log=context.log,
            add_step_hook=add_step_hook,
            workers=status.workers,
        )
        with context.process_group.saving():  # A resumed run reads its files of TensorBoard, which may be long.
            for monitor in monitors:
                stack.callback(monitor.detach)
                monitor.attach(attachment, context.arguments)
        yield


class _TimerCallback(keras.callbacks.Callback):
    """Reports to the timer what Keras's loop does besides the steps; it has no method for single batches, and no attribute that a checkpoint keeps."""

    def __init__(
        self, timer: StepTimer, status: StatusWriter, context: FitContext, count_from: Callable[[int], int]
    ) -> None:
        super().__init__()
        self._timer, self._status, self._context, self._count_from = timer, status, context, count_from

    def on_train_begin(self, logs: Any = None) -> None:
        self._status.start()  # Not before: until here another job may write to the folder.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        data, checkpoint = self._context.data, self._context.checkpoint
        resumed = checkpoint.resumed.position.step if checkpoint else 0
        total = self._timer.progress.total if self._timer.has_begun else self._count_from(resumed)
        self._timer.begin_epoch(FitProgress(epoch, self.params["epochs"], data.resumed_steps, data.steps, total))

    def on_test_begin(self, logs: Any = None) -> None:
        self._timer.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._timer.pause()
        self._timer.enter("callback")

    def on_train_end(self, logs: Any = None) -> None:
        self._timer.enter("end")
