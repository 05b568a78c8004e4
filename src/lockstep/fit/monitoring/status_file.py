"""The status file of a run, which ``lockstep top`` reads: written about once a second to the run's folder.

Only the chief writes, in a thread, so that the file stays fresh while a step takes long. Each write replaces the whole file. A write
that fails is logged once, and training continues.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint.format import STATUS
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.wait_meter import WaitMeter
from lockstep.distributed.control.failure_detector import WorkerStatus
from lockstep.distributed.control.failures import summary_of
from lockstep.fit.monitoring.step_timer import StepTimer
from lockstep.fit.monitoring.throughput import numbers_of

__all__ = ["StatusWriter", "shares"]

_INTERVAL, _WINDOW = 1.0, 10  # seconds from write to write; and number of samples for shares of the time
_LONGEST_WAIT = 5.0  # seconds that the end of fit waits for a write that hangs

Sample = tuple[
    float, Mapping[int, Mapping[str, float]]
]  # a time, and by worker the seconds that its activities have taken so far


class StatusWriter:
    """Writes the status of one call of ``fit``.

    Args:
        folders: to write to.
        timer: of the call.
        meter: of its input.
        process_group: all processes.
        devices: number of devices of all processes process_group.
        log: takes a line for the user.
        now: gives the seconds since 1970.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        timer: StepTimer,
        meter: WaitMeter,
        process_group: ProcessGroup,
        devices: int,
        log: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folders, self._timer, self._meter, self._process_group = folders, timer, meter, process_group
        self._devices, self._log, self._now = devices, log, now
        self._begun = now()
        self._samples: deque[Sample] = deque(maxlen=_WINDOW)
        self._has_ended, self._has_failed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to write, when training begins."""
        if not self._folders:
            return
        self._thread = threading.Thread(target=self._run, name="lockstep-status", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Write that training has ended, or which exception ended it."""
        if self._thread is None:  # Training has never begun, and the folder may belong to another job.
            return
        self._has_ended.set()
        self._thread.join(_LONGEST_WAIT)
        if self._thread.is_alive():
            return
        state = "ended" if error is None else "failed" if isinstance(error, Exception) else "stopped"
        self._write(state, summary_of(error) if error else None)

    def _run(self) -> None:
        while True:
            self._write("running", None)
            if self._has_ended.wait(_INTERVAL):
                return

    def _write(self, state: str, reason: str | None) -> None:
        text = json.dumps(self._status(state, reason), allow_nan=False)
        for folder in self._folders:
            temporary = folder / f".{STATUS}.{os.getpid()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                temporary.write_text(text)
                os.replace(temporary, folder / STATUS)
            except OSError as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                if not self._has_failed:
                    self._log(f"{folder / STATUS} cannot be written, so that lockstep top shows nothing new: {error}")
                self._has_failed = True

    def _status(self, state: str, reason: str | None) -> dict[str, Any]:
        progress, recent = self._timer.progress, numbers_of(self._timer.recent, self._devices)
        rows_per_second, seconds_per_step = recent["throughput/samples_per_sec"], recent["time/step"]
        is_measured = seconds_per_step == seconds_per_step  # else NaN
        return {
            "version": 1,
            "state": state,
            "reason": reason,
            "time": self._now(),
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

    def _workers(self) -> list[dict[str, Any]]:
        now, statuses = time.monotonic(), self._process_group.worker_statuses()
        rows = [_row(status, now) for status in statuses] or [self._single_process()]
        seconds = {status.peer.index: status.metadata for status in statuses} or {
            0: {"waited": self._meter.waited, "read": self._meter.read}
        }
        if self._samples and _has_fallen(self._samples[-1][1], seconds):
            self._samples.clear()  # The last heartbeat of a worker was sent in another call of fit.
        self._samples.append((now, seconds))
        return [row | shares(self._samples, row["worker"]) for row in rows]

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
