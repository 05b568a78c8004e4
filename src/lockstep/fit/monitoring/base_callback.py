"""Base class of the callbacks that read the step timer of a call of ``fit``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import keras

from lockstep._errors import ScopeError
from lockstep.execution.train_functions import StepHook
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.step_timer import StepTimer

__all__ = ["Attachment", "MonitorCallback"]


@dataclass(frozen=True)
class Attachment:
    """What a monitoring callback may use during a call of ``fit``.

    Args:
        timer: of the call.
        devices: of all processes process_group.
        flop_counter: counts the operations of a step.
        is_resumed: says whether training resumes an earlier run, once the first epoch begins.
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
