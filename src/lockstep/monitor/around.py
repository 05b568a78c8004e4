"""What surrounds a call of ``fit``: where a callback or a folder wants to know how it goes, its steps are measured."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np

from lockstep.data.calls import Together
from lockstep.data.inputs import Input
from lockstep.data.placement import Placement
from lockstep.monitor.clock import Course, StepClock
from lockstep.monitor.flops import Counting
from lockstep.monitor.throughput import ThroughputMonitor
from lockstep.monitor.watching import Attachment, Watching
from lockstep.step.functions import StepFunctions

__all__ = ["monitored"]

_WINDOW = 100


@contextmanager
def monitored(
    arguments: dict[str, Any],
    functions: StepFunctions,
    placement: Placement,
    together: Together,
    announce: Callable[[str], None],
) -> Iterator[None]:
    """Is open during a call of ``fit``, whose arguments may be changed.

    Args:
        arguments: of the call; x is an :class:`Input`.
        functions: of the model.
        placement: devices and number of replicas.
        together: the processes.
        announce: takes a line for the user.
    """
    given = arguments.get("callbacks")
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    watching = [callback for callback in callbacks if isinstance(callback, Watching)]
    if not watching:
        yield
        return
    data: Input = arguments["x"]
    window = max((found.window for found in watching if isinstance(found, ThroughputMonitor)), default=_WINDOW)
    clock, counting = StepClock(functions.listener, lambda: data.meter.waited, window), Counting()
    clock.followers.append(counting)
    is_chief = together.process == 0
    attachment = Attachment(clock, placement.devices, counting, lambda: data.goes_on, is_chief, announce)
    first = [
        callback for callback in watching if isinstance(callback, ThroughputMonitor)
    ]  # The others see what these add.
    arguments["callbacks"] = [_Marks(clock, data), *first, *(other for other in callbacks if other not in first)]
    with _listening(functions, clock), ExitStack() as stack:
        for callback in watching:
            stack.callback(callback.detach)
            callback.attach(attachment, arguments)
        yield


@contextmanager
def _listening(functions: StepFunctions, clock: StepClock) -> Iterator[None]:
    before, functions.listener = functions.listener, clock
    try:
        yield
    finally:
        functions.listener = before


class _Marks(keras.callbacks.Callback):
    """Tells the clock what Keras's loop does besides the steps; it has no method for single batches, and no attribute that a checkpoint keeps."""

    def __init__(self, clock: StepClock, data: Input) -> None:
        super().__init__()
        self._clock, self._data = clock, data

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        total = self._clock.course.total if self._clock.has_begun else steps_done(self.model.optimizer)
        epochs, steps = self.params["epochs"], self.params["steps"]
        self._clock.begin_epoch(Course(epoch, epochs, self._data.done_before, steps, total))

    def on_test_begin(self, logs: Any = None) -> None:
        self._clock.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._clock.pause()
        self._clock.enter("callback")

    def on_train_end(self, logs: Any = None) -> None:
        self._clock.enter("end")


def steps_done(optimizer: Any) -> int:
    """Number of training steps that an optimizer has seen; those that it accumulates count, too."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    updates = int(np.asarray(keras.ops.convert_to_numpy(inner.iterations)))
    return updates * (inner.gradient_accumulation_steps or 1)
