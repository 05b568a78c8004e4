"""A progress display of training in a terminal: step, speed, wait for data, and the newest logs."""

import math
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.execution.step_hooks import StepHook
from lockstep.fit.monitoring.step_timer import NAMES, Attachment, FitProgress, MonitorCallback, StepTimer, TimerReading

_PER_SECOND = 4  # refreshes; each fetches some numbers from a device
_WIDTH = 30  # of the bar, in characters


class RichProgress(MonitorCallback):
    """Shows epoch, step, rows a second, the share of the time spent waiting for data, the time left and the logs, in place of Keras's bar.

    The chief shows one display for all workers, and counts the rows of the global batch. A thread fetches the logs a few times a second, so no
    step waits for them. If the output is not a terminal, or is a notebook, Keras's own bar stays.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> progress = lockstep.callbacks.RichProgress()
        >>> history = model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[progress])
    """

    _recorder: "_Display | None" = None

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        super().attach(attachment, arguments)
        console = Console()
        is_shown = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
        if attachment.is_chief and is_shown:
            arguments["verbose"] = 0
            self._recorder = _Display(attachment.timer, console)
            attachment.add_step_hook(self._recorder)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._recorder:
            self._recorder.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._recorder:
            self._recorder.end_epoch(logs or {})


class _Display(StepHook):
    """The line of the running epoch, which a thread draws, and the lines of the epochs before."""

    def __init__(self, timer: StepTimer, console: Console) -> None:
        self._timer, self._console = timer, console
        self._before: Any = None  # logs of the step before the newest step; the devices have most likely computed them
        self._newest: Any = None
        self._began = time.monotonic()
        self._live: Live | None = None

    def on_step_end(self, model: Any, kind: str, state: Any, logs: Any) -> None:
        if kind == "train":
            self._before, self._newest = self._newest, logs

    def begin_epoch(self) -> None:
        """Show the line of a new epoch."""
        self.stop()
        self._before, self._began = None, time.monotonic()
        self._live = Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=_PER_SECOND, transient=True
        )
        self._live.start()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Print the epoch's line with its last logs."""
        self.stop()
        seconds = time.monotonic() - self._began
        shown = {name: value for name, value in logs.items() if name not in NAMES}
        self._console.out(_line(self._timer.progress, self._timer.of_epoch, _clock_time(seconds), shown).plain)

    def stop(self) -> None:
        """Remove the line."""
        live, self._live = self._live, None
        if live:
            live.stop()

    def _drawn(self) -> RenderableType:
        progress, recent, before, phase = self._timer.progress, self._timer.recent, self._before, self._timer.phase[0]
        logs = jax.device_get(before) if isinstance(before, dict) else {}
        timing = phase if phase in ("compiling", "validation", "prediction") else f"ETA {_time_left(progress, recent)}"
        table = Table.grid(padding=(0, 1))
        table.add_row(
            ProgressBar(total=progress.steps, completed=progress.done, width=_WIDTH, pulse=progress.steps is None),
            _line(progress, recent, timing, logs),
        )
        return table


def _line(progress: FitProgress, reading: TimerReading, timing: str, logs: Mapping[str, Any]) -> Text:
    parts = [f"epoch {progress.epoch + 1}/{progress.epochs}", f"step {progress.done}/{progress.steps or '?'}"]
    if reading.steps and reading.seconds > 0:
        parts += [f"{reading.rows / reading.seconds:,.0f} rows/s", f"waits {reading.waited / reading.seconds:.0%}"]
    values = ((name, value) for name, value in logs.items() if not isinstance(value, dict) and np.size(value) == 1)
    items = ((name, np.asarray(value).item()) for name, value in values)
    numbers = [f"{name} {item:.4g}" for name, item in items if isinstance(item, Real)]
    return Text(" · ".join([*parts, timing, *numbers]))


def _time_left(progress: FitProgress, reading: TimerReading) -> str:
    if progress.steps is None or not reading.steps:
        return "-"
    return _clock_time(math.ceil((progress.steps - progress.done) * reading.seconds / reading.steps))


def _clock_time(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    Example:
        >>> _clock_time(3725.2)
        '1:02:05'
    """
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
