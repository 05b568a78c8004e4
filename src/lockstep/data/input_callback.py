"""Callbacks that want to know the input of their call of ``fit``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.data.keras_adapter import KerasInput

__all__ = ["InputListener", "listening"]


class InputListener(keras.callbacks.Callback):
    """A callback that knows the input.

    Attributes:
        data: the input during a call of ``fit`` of a strategy's model, else None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data: KerasInput | None = None


@contextmanager
def listening(arguments: dict[str, Any]) -> Iterator[None]:
    """Is open during a call of ``fit`` with these arguments, of which x is an :class:`KerasInput`."""
    callbacks = arguments.get("callbacks")
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    found = [callback for callback in given if isinstance(callback, InputListener)]
    for listener in found:
        listener.data = arguments["x"]
    try:
        yield
    finally:
        for listener in found:
            listener.data = None
