"""What callbacks have in common that look at the clock of a call of ``fit``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import keras

from lockstep._errors import ScopeError
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.step_timer import StepTimer

__all__ = ["Attachment", "MonitorCallback"]


@dataclass(frozen=True)
class Attachment:
    """What a callback has during a call of ``fit``.

    Args:
        clock: of the call.
        devices: of all processes together.
        counting: counts what a step computes.
        resumed: returns whether training resumed from a checkpoint, once the first epoch begins.
        is_chief: whether this process is the one that prints and writes.
        announce: takes a line for the user.
    """

    clock: StepTimer
    devices: tuple[jax.Device, ...]
    counting: FlopCounter
    resumed: Callable[[], bool]
    is_chief: bool
    announce: Callable[[str], None]


class MonitorCallback(keras.callbacks.Callback):
    """A callback that the strategy gives a clock to, around each call of ``fit``. None of them has a method for single batches.

    With such a method Keras would fetch the logs of every step in the thread that trains, which then waits for the devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        """What there is during a call of ``fit``.

        Raises:
            ScopeError: the model is not one of a strategy.
        """
        if self._attachment is None:
            raise ScopeError(
                f"lockstep.callbacks.{type(self).__name__} works for models of a strategy: build, load or compile the model in "
                "lockstep.MirroredStrategy().scope(), and leave fit as Keras has it."
            )
        return self._attachment

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """A call of ``fit`` begins, whose arguments may be changed."""
        self._attachment = attachment

    def detach(self) -> None:
        """It has ended, in whatever way."""
        self._attachment = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras says that training begins.

        Raises:
            ScopeError: the model is not one of a strategy.
        """
        self.attachment  # noqa: B018  # raises
