"""Hooks around a step: what is called before and after each step of a model, and what may replace it.

``StepLoop`` calls them; their order is in ``Strategy._step_hooks`` and in the hooks around ``fit`` (``fit/fit_hooks``), which add some.
"""

from collections.abc import Callable
from typing import Any

import keras

from lockstep.execution.compiled_step import Step
from lockstep.execution.nonfinite_gate import GatedStep


class StepHook:
    """Methods that :class:`StepFunctions` calls around each step of a model, in the thread that starts it. The base class does nothing.

    Methods named ``on_…`` are called in the order of ``StepFunctions.hooks``. Methods that may return a replacement are called in the
    reverse order, as the last hook is nearest to the step, until one does not return None.
    """

    def replayed_logs(self) -> Any:
        """Return the logs of a training step that an earlier process has done, to skip the step; None: do the step.

        Raises:
            StopIteration: the earlier process has found the end of the input here.
        """
        return None

    def on_fetch(self) -> None:
        """Called before the next batch is fetched from the input."""

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """Called before a step of ``kind`` ("train", "test" or "predict") is started, or compiled first."""

    def replaced_step(self, gated_step: Callable[[], GatedStep]) -> Step | None:
        """Return a function that does the next training step in place of the compiled step; None: keep the compiled step.

        Args:
            gated_step: returns the compiled step with a :class:`NonFiniteGate`, and compiles it when it is first called.
        """
        return None

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """Called after a step was started; ``state`` and ``logs`` (or outputs) are its results, which may not be computed yet."""

    def on_pause(self) -> None:
        """Called before other work than a step, which may take as long as compiling does."""

    def on_validation(self) -> None:
        """Called before a validation in ``fit`` with checkpoints, before its callbacks change anything."""

    def allows_checkpoint(self) -> bool:
        """Return whether a checkpoint may be written now."""
        return True

    def newest_state(self) -> Any:
        """Return the newest training state if other processes hold it, else None; called before a checkpoint."""
        return None
