"""What a run says of itself in its folder, about once a second: a small file that others look at.

The chief alone writes, in a thread, so that the file stays fresh while a step takes long. It is replaced as a whole. Where it cannot be
written, that is said once, and training goes on.
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

from lockstep.checkpoint.paths import STATUS
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.wait_meter import WaitMeter
from lockstep.distributed.control.failure_detector import WorkerStatus
from lockstep.distributed.control.failures import summary_of
from lockstep.fit.monitoring.step_timer import StepTimer
from lockstep.fit.monitoring.throughput import numbers_of

__all__ = ["StatusWriter", "shares"]

_EVERY, _LOOK_BACK = 1.0, 10  # seconds; and so many looks for shares of the time
_LONGEST_WAIT = 5.0  # seconds that an end waits for a write that hangs

Sample = tuple[float, Mapping[int, Mapping[str, float]]]  # a time, and by worker the seconds that something has taken


class StatusWriter:
    """Writes the status of one call of ``fit``.

    Args:
        folders: where it is written to.
        clock: of the call.
        meter: of its input.
        process_group: the processes.
        devices: number of devices of all processes together.
        announce: takes a line for the user.
        now: gives the seconds since 1970.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        clock: StepTimer,
        meter: WaitMeter,
        process_group: ProcessGroup,
        devices: int,
        announce: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folders, self._clock, self._meter, self._process_group = folders, clock, meter, process_group
        self._devices, self._announce, self._now = devices, announce, now
        self._begun = now()
        self._samples: deque[Sample] = deque(maxlen=_LOOK_BACK)
        self._is_over, self._has_failed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Training begins."""
        if not self._folders:
            return
        self._thread = threading.Thread(target=self._run, name="lockstep-status", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """It has ended, in order or by an exception."""
        if self._thread is None:  # It has never begun, and the folder may be that of another job.
            return
        self._is_over.set()
        self._thread.join(_LONGEST_WAIT)
        if self._thread.is_alive():
            return
        state = "ended" if error is None else "failed" if isinstance(error, Exception) else "stopped"
        self._write(state, summary_of(error) if error else None)

    def _run(self) -> None:
        while True:
            self._write("running", None)
            if self._is_over.wait(_EVERY):
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
                    self._announce(
                        f"{folder / STATUS} cannot be written, so that lockstep top shows nothing new: {error}"
                    )
                self._has_failed = True

    def _status(self, state: str, reason: str | None) -> dict[str, Any]:
        course, recent = self._clock.course, numbers_of(self._clock.recent, self._devices)
        rows_per_second, seconds_per_step = recent["throughput/samples_per_sec"], recent["time/step"]
        is_measured = seconds_per_step == seconds_per_step  # else NaN
        return {
            "version": 1,
            "state": state,
            "reason": reason,
            "time": self._now(),
            "begun": self._begun,
            "epoch": course.epoch + 1,
            "epochs": course.epochs,
            "step": course.done,
            "steps": course.steps,
            "steps_in_all": course.total,
            "rows_per_second": rows_per_second if is_measured else None,
            "seconds_per_step": seconds_per_step if is_measured else None,
            "devices": self._devices,
            "workers": self._workers(),
        }

    def _workers(self) -> list[dict[str, Any]]:
        now, beats = time.monotonic(), self._process_group.worker_statuses()
        rows = [_row(beat, now) for beat in beats] or [self._alone()]
        facts = {beat.peer.index: beat.facts for beat in beats} or {
            0: {"waited": self._meter.waited, "read": self._meter.read}
        }
        if self._samples and _has_fallen(self._samples[-1][1], facts):
            self._samples.clear()  # What was last heard of a worker was of another call of fit.
        self._samples.append((now, facts))
        return [row | shares(self._samples, row["worker"]) for row in rows]

    def _alone(self) -> dict[str, Any]:
        phase, seconds = self._clock.phase[0], self._clock.seconds_in_phase()
        who = {"worker": 0, "host": socket.gethostname(), "pid": os.getpid()}
        return who | {
            "step": self._clock.course.total,
            "phase": phase,
            "seconds": seconds,
            "silent": 0.0,
            "left": False,
        }


def _row(beat: WorkerStatus, now: float) -> dict[str, Any]:
    who = {"worker": beat.peer.index, "host": beat.peer.host, "pid": beat.peer.pid}
    ages = {"seconds": max(0.0, now - beat.since), "silent": max(0.0, now - beat.heard)}
    return who | ages | {"step": beat.step, "phase": beat.activity, "left": beat.left}


def _has_fallen(before: Mapping[int, Mapping[str, float]], now: Mapping[int, Mapping[str, float]]) -> bool:
    pairs = ((values, now.get(worker, {})) for worker, values in before.items())
    return any(new.get(name, value) < value for values, new in pairs for name, value in values.items())


def shares(samples: Sequence[Sample], worker: int) -> dict[str, float]:
    """Which share of the time something has taken between the first and the last sample.

    Example:
        >>> shares([(10.0, {0: {"waited": 3.0}}), (14.0, {0: {"waited": 4.0}})], 0)
        {'waited': 0.25}
    """
    (begun, earlier), (now, facts) = samples[0], samples[-1]
    before, after = earlier.get(worker, {}), facts.get(worker, {})
    seconds = max(now - begun, 1e-9)
    return {name: min(1.0, max(0.0, value - before.get(name, 0.0)) / seconds) for name, value in after.items()}
