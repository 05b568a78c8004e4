"""A profile of some training steps, made by JAX, where TensorBoard looks for it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras

from lockstep.execution.train_functions import StepListener

__all__ = ["StepProfiler"]


class StepProfiler(StepListener):
    """Records from the begin of one training step to the end of another.

    Args:
        first: number of the first step, counted from 1 in a call of ``fit``.
        last: of the last one.
        folder: of the run.
        announce: takes a line for the user.
    """

    def __init__(self, first: int, last: int, folder: Path, announce: Callable[[str], None]) -> None:
        self._first, self._last, self._folder, self._announce = first, last, folder, announce
        self._step, self._is_running = 0, False
        self._newest: Any = None

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepListener`."""
        self._step += 1
        if self._step == self._first:
            jax.block_until_ready(self._newest)  # What was started before is not part of it.
            self._start()

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepListener`."""
        self._newest = logs
        if self._step == self._last:
            self.stop()

    def stop(self) -> None:
        """Write what was recorded, if it still runs."""
        if not self._is_running:
            return
        self._is_running = False
        with contextlib.suppress(
            RuntimeError
        ):  # A step that fails on its devices is told by whoever needs what it gives.
            jax.block_until_ready(self._newest)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._announce(f"TensorBoard: no profile was written: {error}")
            return
        where = self._folder / "plugins" / "profile"
        self._announce(
            f"TensorBoard: profile of steps {self._first} to {min(self._step, self._last)}: {where}; tensorboard shows it with the "
            "package tensorboard-plugin-profile"
        )

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(self._folder)
            self._is_running = True
        except (OSError, RuntimeError) as error:  # Somebody else's is running, say.
            self._announce(f"TensorBoard: no profile of steps {self._first} to {self._last}: {error}")
