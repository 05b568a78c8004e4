"""Times the training steps of one call of ``fit``: their time, their rows, and the wait for data; and the callbacks that read the timer.

Steps run on the devices while the host starts the next ones, so the host cannot time a single step. It measures spans: from the first
fetch after a pause to the next pause, when the devices have done all steps that were started. Validation, callbacks at the end of an
epoch and steps that are compiled are pauses. Within a span nothing waits for the devices.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from lockstep._errors import ScopeError
from lockstep.data.device_placement import PlacedRows
from lockstep.execution.train_functions import StepHook
from lockstep.fit.monitoring.flops import FlopCounter

__all__ = ["Attachment", "FitProgress", "MonitorCallback", "StepTimer", "TimerReading"]

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
    total: int = 0  # steps since the optimizer was made


class StepTimer(StepHook):
    """Timer of one call of ``fit``. It is called around each step, and may be read from any thread.

    Args:
        waited: gives the total seconds in which no step could run for lack of data.
        window: number of steps that :attr:`recent` looks back.
        clock: gives seconds.

    Attributes:
        progress: of the call.
        has_begun: whether an epoch has begun.
        phase: what the training thread does, and since when.
        logs: of the newest step, on the devices.
    """

    def __init__(
        self, waited: Callable[[], float], window: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._waited, self._clock = waited, clock
        self.progress, self.phase, self.has_begun = FitProgress(), ("start", clock()), False
        self.logs: Any = None
        self._counts: dict[Any, int] = {}
        self._rows, self._is_compiling = 0, False
        self._done = TimerReading()  # in spans that have ended
        self._opened: tuple[float, float, int] | None = None  # time, waits and steps at the begin of the span
        self._steps = self._rows_done = 0
        self._recent: deque[TimerReading] = deque(maxlen=window + 1)
        self._epoch_began = TimerReading()

    # Steps and Keras's loop.

    def on_fetch(self) -> None:
        """See :class:`StepHook`."""
        self.enter("data")
        if self._opened is None:
            self._open()

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        if kind != "train":
            self.pause()
            self.enter(_OTHERS[kind])
            return
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch, is_leaf=_is_rows))
        count = self._counts.get(shapes, 0)
        self._rows, self._is_compiling = shapes[0][0] if shapes and shapes[0] else 0, count < _COMPILED
        if self._is_compiling:
            self._counts[shapes] = count + 1
            self.pause()
        self.enter("compiling" if count == 0 else "step")

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
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
            self._done = self.reading
            self._recent.append(self._done)
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


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PlacedRows)


@dataclass(frozen=True)
class Attachment:
    """What a monitoring callback may use during a call of ``fit``.

    Args:
        timer: of the call.
        devices: of all processes process_group.
        flop_counter: counts the operations of a step.
        is_resumed: returns whether training resumes an earlier run, once the first epoch begins.
        is_chief: whether this process prints and writes.
        log: takes a line for the user.
        add_step_hook: adds a hook until the call ends.
    """

    timer: StepTimer
    devices: tuple[jax.Device, ...]
    flop_counter: FlopCounter
    is_resumed: Callable[[], bool]
    is_chief: bool
    log: Callable[[str], None]
    add_step_hook: Callable[[StepHook], None]


class MonitorCallback(keras.callbacks.Callback):
    """A callback that ``MonitorHook`` attaches to the step timer around each call of ``fit``.

    A subclass has no method for single batches: with one, Keras would fetch the logs of every step in the training thread, which then
    waits for the devices.
    """

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
            raise ScopeError(
                f"lockstep.callbacks.{type(self).__name__} works for models of a strategy: build, load or compile the model in "
                "lockstep.MirroredStrategy().scope(), and leave fit as Keras has it."
            )
        return self._attachment

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """Start a call of ``fit``, whose arguments may be changed."""
        self._attachment = attachment

    def detach(self) -> None:
        """End the call, also after an exception."""
        self._attachment = None

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        self.attachment  # noqa: B018  # raises
