"""Time of steps and its parts, throughput, and model FLOPs utilization, whose operations ``flops.py`` counts.

Steps run on the devices while the host starts the next ones, so the host cannot time a single step. It measures spans: from the first
fetch after a pause to the next pause, when the devices have done all steps that were started. Validation, callbacks at the end of an
epoch and steps that are compiled are pauses. Within a span nothing waits for the devices.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from lockstep._errors import outside_of_strategy, real_number, whole_number
from lockstep.devices.placement import is_rows
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.monitoring.flops import FlopCounter, peak_of

_COMPILED = 2  # so many steps of a shape are compiled: the second gets its state from the first, in another form
_OTHERS = {"test": "validation", "predict": "prediction"}


class TimerReading(NamedTuple):
    """Sums over measured steps: of a whole call, or between two times."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds in which no step could run for lack of data

    def since(self, earlier: "TimerReading") -> "TimerReading":
        """Return the difference to an earlier reading."""
        steps, rows, seconds, waited = earlier
        return TimerReading(self.steps - steps, self.rows - rows, self.seconds - seconds, self.waited - waited)


class FitProgress(NamedTuple):
    """Progress of a call of ``fit``, to be displayed."""

    epoch: int = 0  # from 0
    epochs: int = 1
    done: int = 0  # steps of this epoch
    steps: int | None = None  # of each epoch, if known
    total: int = 0  # steps of the model, those of earlier calls and of a resumed run included


class StepTimer(StepHook):
    """Timer of one call of ``fit``. It is called around each step, and may be read from any thread.

    Args:
        waited: gives the total seconds in which no step could run for lack of data.
        window: number of steps that :attr:`recent` looks back.
        clock: gives seconds.
        compiled: for shapes of a batch the number of steps that were made with them; of an earlier call with the same programs.

    Attributes:
        progress: progress of the call.
        has_begun: whether an epoch has begun.
        phase: what the training thread does, and since when.
        logs: logs of the newest step, on the devices.
    """

    def __init__(
        self,
        waited: Callable[[], float],
        window: int,
        clock: Callable[[], float] = time.perf_counter,
        compiled: Callable[[keras.Model], dict[Any, int]] | None = None,
    ) -> None:
        self._waited, self._clock = waited, clock
        self.progress, self.phase, self.has_begun = FitProgress(), ("start", clock()), False
        self.logs: Any = None
        counts: dict[Any, int] = {}
        self._compiled = compiled or (lambda model: counts)
        self._rows, self._is_compiling = 0, False
        self._done = TimerReading()  # in spans that have ended
        self._opened: tuple[float, float, int] | None = None  # time, waits and steps at the beginning of the span
        self._steps = self._rows_done = 0
        self._recent: deque[TimerReading] = deque(maxlen=window + 1)
        self._epoch_began = TimerReading()

    # Steps and Keras's loop.

    def on_fetch(self) -> None:
        self.enter("data")
        if self._opened is None:
            self._open()

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        if kind != "train":
            self.pause()
            self.enter(_OTHERS[kind])
            return
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_rows))
        counts = self._compiled(model)
        count = counts.get(shapes, 0)
        self._rows, self._is_compiling = shapes[0][0] if shapes and shapes[0] else 0, count < _COMPILED
        if self._is_compiling:
            counts[shapes] = count + 1
            self.pause()
        self.enter("compiling" if count == 0 else "step")

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        if kind != "train":
            return
        self.logs = logs
        self.progress = self.progress._replace(done=self.progress.done + 1, total=self.progress.total + 1)
        self.enter("step")
        if self._is_compiling:
            jax.block_until_ready(logs)  # What follows is measured without it.
        else:
            self._steps += 1
            self._rows_done += self._rows
            self._recent.append(self.reading)

    def begin_epoch(self, progress: FitProgress) -> None:
        """Start to measure an epoch."""
        self.progress, self.has_begun = progress, True
        self._epoch_began = self.reading

    def pause(self) -> None:
        """End the span, as something else than training follows."""
        if self._opened is not None and self._steps > self._opened[2]:
            jax.block_until_ready(self.logs)
            self._done = self._recent[-1] = self.reading  # The newest step ends here.
        self._opened = None

    def enter(self, phase: str) -> None:
        """Set what the training thread does from now on."""
        self.phase = (phase, self._clock())

    # Readings.

    @property
    def reading(self) -> TimerReading:
        """All steps measured so far."""
        opened, seconds, waited = self._opened, self._done.seconds, self._done.waited
        if opened is not None:
            seconds, waited = seconds + self._clock() - opened[0], waited + self._waited() - opened[1]
        return TimerReading(self._steps, self._rows_done, seconds, waited)

    @property
    def newest(self) -> TimerReading:
        """All steps up to the newest measured one. Unlike :attr:`reading`, it never falls if another thread reads it."""
        try:
            return self._recent[-1]
        except IndexError:
            return TimerReading()

    @property
    def recent(self) -> TimerReading:
        """The last steps, at most ``window``."""
        try:
            return self._recent[-1].since(self._recent[0])
        except IndexError:
            return TimerReading()

    @property
    def of_epoch(self) -> TimerReading:
        """The epoch so far."""
        return self.reading.since(self._epoch_began)

    def seconds_in_phase(self) -> float:
        """How long the current phase has lasted."""
        return self._clock() - self.phase[1]

    def _open(self) -> None:
        self._opened = (self._clock(), self._waited(), self._steps)
        if not self._recent:
            self._recent.append(self._done)


@dataclass(frozen=True)
class Attachment:
    """What a monitoring callback may use during a call of ``fit``.

    Args:
        timer: timer of the call.
        devices: devices of all processes.
        flop_counter: counts the operations of a step.
        is_resumed: returns whether training resumes an earlier run, once the first epoch begins.
        is_validation_cut: returns whether a preemption cuts the running validation short; a resumed run validates again.
        is_chief: whether this process prints and writes.
        log: takes a line for the user.
        add_step_hook: adds a hook until the call ends.
        workers: returns for each worker what it does, and the seconds that it has waited for data and read data.
    """

    timer: StepTimer
    devices: tuple[jax.Device, ...]
    flop_counter: FlopCounter
    is_resumed: Callable[[], bool]
    is_validation_cut: Callable[[], bool]
    is_chief: bool
    log: Callable[[str], None]
    add_step_hook: Callable[[StepHook], None]
    workers: Callable[[], list[tuple[dict[str, Any], Mapping[str, float]]]]

    def numbers_of(self, reading: TimerReading) -> dict[str, float]:
        """Return a reading by the names of the logs, with the utilization if it is known."""
        numbers, counter = numbers_of(reading, len(self.devices)), self.flop_counter
        if counter.peak and counter.per_row:
            numbers["mfu"] = counter.per_row * numbers["throughput/device/samples_per_sec"] / counter.peak
        return numbers


class MonitorCallback(keras.callbacks.Callback):
    """A callback that ``MonitorHook`` attaches to the step timer around each call of ``fit``.

    A subclass has no method for single batches: with one, Keras would fetch the logs of every step in the training thread, which then
    waits for the devices.
    """

    _recorder: Any = None  # what works for the callback during a call of fit; it is stopped when the call ends

    def __init__(self) -> None:
        super().__init__()
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        """The attachment to the running call of ``fit``.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        if self._attachment is None:
            raise outside_of_strategy(self)
        return self._attachment

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """Start a call of ``fit``, whose arguments may be changed."""
        self._attachment = attachment

    def detach(self) -> None:
        """End the call, also after an exception."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
        self._attachment = None

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        self.attachment  # noqa: B018  # raises


NAMES = (
    "throughput/samples_per_sec",
    "throughput/device/samples_per_sec",
    "time/step",
    "time/data_wait",
    "mfu",
)


def numbers_of(reading: TimerReading, devices: int) -> dict[str, float]:
    """Return a reading by the names of the logs; NaN if no step was measured.

    Example:
        >>> numbers_of(TimerReading(steps=10, rows=640, seconds=2.0, waited=0.5), devices=2)["time/step"]
        0.2
    """
    steps, rows, seconds, waited = reading
    if not steps or seconds <= 0:
        return dict.fromkeys(NAMES[:4], float("nan"))
    values = (rows / seconds, rows / seconds / devices, seconds / steps, waited / steps)
    return dict(zip(NAMES[:4], values, strict=True))


_MAX_WINDOW = 1_000_000  # steps; each is kept


class ThroughputMonitor(MonitorCallback):
    """Adds throughput, step time and the wait for data to the logs of each epoch.

    The logs, and with them the history and callbacks that write the logs (``keras.callbacks.CSVLogger``), get

    - ``throughput/samples_per_sec``: rows of the global batch a second; ``throughput/device/samples_per_sec``: for each device;
    - ``time/step``: seconds from step to step; ``time/data_wait``: seconds of that in which no step could run for lack of data;
    - ``mfu``: model FLOPs utilization, the operations of the step as a share of the peak of the devices, if both are known.

    All steps of the epoch count, except those that were compiled; validation does not. The values are NaN in an epoch without such steps. Each
    worker measures its own steps. No step waits for the devices, and the order of the callbacks does not matter.

    Args:
        window: number of steps that :attr:`last` looks back.
        peak_flops: floating-point operations a second that *one* device can do at most; by default those of the data sheet at 16 bits, for
            known accelerators.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> speed = lockstep.callbacks.ThroughputMonitor(peak_flops=1e12)
        >>> history = model.fit(np.ones((40, 3)), np.ones((40, 1)), batch_size=8, verbose=0, callbacks=[speed])
        >>> sorted(history.history)  # doctest: +NORMALIZE_WHITESPACE
        ['loss', 'mfu', 'throughput/device/samples_per_sec', 'throughput/samples_per_sec', 'time/data_wait', 'time/step']
        >>> 0 < speed.last["time/step"] < 60
        True
    """

    def __init__(self, window: int = 100, peak_flops: float | None = None) -> None:
        super().__init__()
        self.window = whole_number("ThroughputMonitor: window", window, maximum=_MAX_WINDOW)
        what = "operations a second of one device, such as 312e12"
        self.peak_flops = (
            None if peak_flops is None else real_number("ThroughputMonitor: peak_flops", peak_flops, above=0, what=what)
        )
        self._last: dict[str, float] = {}

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last ``window`` steps by the names of the logs; may be read at any time, also after ``fit``."""
        if self._attachment is not None:
            self._last = self._attachment.numbers_of(self._attachment.timer.recent)
        return dict(self._last)

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        super().attach(attachment, arguments)
        counter = attachment.flop_counter
        counter.peak = self.peak_flops or counter.peak or peak_of(attachment.devices[0].device_kind)
        counter.is_wanted |= counter.peak is not None

    def detach(self) -> None:
        self._last = dict(self.last)
        super().detach()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the numbers to the logs."""
        if logs is not None:
            logs.update(self.attachment.numbers_of(self.attachment.timer.of_epoch))
