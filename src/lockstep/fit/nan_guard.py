"""The NaN guard: the callback with its options, and the hook that checks the training steps of a call of ``fit``.

The host checks step t while the devices already compute step t + 1. If t was not finite, the gate has closed, so t + 1 has changed
nothing either, and the state is still that before t. After the guard's action t + 1 is computed again, with the same batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._errors import NonFiniteError, OptionError, one_of, outside_of_strategy, whole_number
from lockstep._keras import trainer
from lockstep._keras.variable_placement import stored_value
from lockstep.execution.compiled_step import state_lists
from lockstep.execution.nonfinite_gate import GatedStep
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.checkpointing.model_state import KINDS, named_variables
from lockstep.fit.fit_hooks import FitContext, single_callback
from lockstep.fit.nan_diagnosis import Diagnosis, describe_nonfinite, diagnose

ACTIONS = ("stop", "rollback", "skip")
_NO_CHECKPOINT = "There is no checkpoint to go back to yet. Fix: save more often, BackupAndRestore(save_freq=…)."
_CHANGE_RUN = "Fix: lower the learning rate, clip gradients, or remove the rows that have caused it."
_MAX_DIAGNOSES = 5  # of steps that do not end the training: a diagnosis takes long


class NanGuard(keras.callbacks.Callback):
    """Keeps NaN and Inf out of the weights, and reports where they come from.

    A training step whose loss or new state is not finite changes nothing: not the weights, not the optimizer, not the metrics. With
    finite numbers the bits are those of a run without the guard. A non-finite step is run again, replica by replica and layer by layer, to
    name the batch, rows, replica, layer or variable that it comes from. ``docs/nan_guard.md`` has examples and the cost.

    Args:
        action: ``"stop"``: ``fit`` raises :class:`lockstep.NonFiniteError`. ``"skip"``: a line is logged, and training continues with the
            next batch. ``"rollback"``: training continues from the newest checkpoint of the BackupAndRestore among the callbacks.
        max_in_a_row: this number of consecutive non-finite steps stops the training in any case.
        max_rollbacks: a further rollback after this number stops the training, too.

    Attributes:
        skipped: number of skipped steps.
        rollbacks: number of rollbacks.
        in_a_row: number of consecutive non-finite steps up to now.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import lockstep
        >>> guard = lockstep.callbacks.NanGuard("skip", max_in_a_row=3)
        >>> guard.skipped
        0
    """

    def __init__(self, action: str = "stop", *, max_in_a_row: int = 10, max_rollbacks: int = 3) -> None:
        super().__init__()
        self.action = one_of(ACTIONS, "NanGuard: action", action)
        self.max_in_a_row = whole_number("NanGuard: max_in_a_row", max_in_a_row)
        self.max_rollbacks = whole_number("NanGuard: max_rollbacks", max_rollbacks)
        self.skipped = self.rollbacks = self.in_a_row = 0
        self.step_guard: StepGuard | None = None  # during a call of fit

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras.

        Raises:
            ScopeError: the model does not belong to a strategy.
        """
        if self.step_guard is None:
            raise outside_of_strategy(self)
        self.in_a_row = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        if self.step_guard:
            self.step_guard.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        if self.step_guard:
            self.step_guard.step_in_epoch = batch

    def on_test_begin(self, logs: Any = None) -> None:
        """Check the last step before a validation."""
        if self.step_guard:
            self.step_guard.check_last_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check the last step of the epoch."""
        if self.step_guard:
            self.step_guard.check_last_step()


class NanGuardHook:
    """Guards the training steps of a call; it comes after the hook that sets ``context.checkpoint``, which a rollback needs.

    Raises:
        OptionError: there are several NanGuard callbacks; or, on entry, no checkpoints to roll back to.
    """

    def around_fit(self, context: FitContext) -> AbstractContextManager[None]:
        """See :class:`lockstep.fit.fit_hooks.FitHook`."""
        guard = single_callback(context.callbacks, NanGuard)
        return _guarded(guard, context) if guard else nullcontext()


@contextmanager
def _guarded(guard: NanGuard, context: FitContext) -> Iterator[None]:
    if guard.action == "rollback" and context.checkpoint is None:
        raise OptionError(
            'NanGuard("rollback") goes back to the newest checkpoint of a lockstep.callbacks.BackupAndRestore, and there is none among the '
            "callbacks of fit. Fix: add one, or take another action."
        )
    if guard.action == "rollback" and any(map(_swaps_at_epoch_end, context.callbacks)):
        raise OptionError(
            'NanGuard("rollback") goes back to checkpoints, and with SwapEMAWeights(swap_on_epoch=True) those at the end of an epoch hold '
            'the averaged weights. Fix: NanGuard("skip"), or swap_on_epoch=False, which swaps for validations only.'
        )
    guard.step_guard = StepGuard(guard, context)
    try:
        with context.functions.hooked(guard.step_guard):
            yield
    finally:
        guard.step_guard = None


def _swaps_at_epoch_end(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch


def _newest_checkpoint(context: FitContext) -> tuple[int, list[list[Any]]] | None:
    """Return the number of its steps and the values of the variables by kind, all but those of the metrics; None if there is none."""
    if context.checkpoint is None:
        return None
    names = [[*named_variables(context.model, kind)] for kind in KINDS[:-1]]
    found = context.checkpoint.newest(itertools.chain.from_iterable(names))
    return found and (found[0], [[found[1][name] for name in of_kind] for of_kind in names])


@dataclass(frozen=True)
class _PendingStep:
    """A step that was started; its batch is kept until it has been checked. For each of its checked variables and losses, an array on the
    devices says whether it is not finite.
    """

    epoch: int
    step_in_epoch: int
    batch: Any
    checked_names: list[Any]
    is_nonfinite: Any

    def bad(self) -> list[Any]:
        """Wait for the step, and return the names of what is not finite."""
        flags = np.asarray(self.is_nonfinite)
        return [name for name, flag in zip(self.checked_names, flags, strict=True) if flag]


@dataclass(eq=False)
class StepGuard(StepHook):
    """Checks each training step for NaN and Inf, and takes the guard's action; ``step_in_epoch`` is the number of the step that begins next."""

    guard: NanGuard
    context: FitContext
    epoch: int = 0
    step_in_epoch: int = 0
    _pending: _PendingStep | None = None
    _state: Any = None  # after the last step
    _diagnoses: int = 0

    def replaced_step(self, gated_step: Callable[[], GatedStep]) -> Callable[[Any, Any], tuple[Any, Any]]:
        return functools.partial(self.step, gated_step())

    def step(self, gated: GatedStep, state: Any, batch: Any) -> tuple[Any, Any]:
        """Return logs and state of a training step, after the step before it was checked."""
        if self._pending is None:
            gated.gate.open()
        logs, new = gated.step(state, batch)
        restored = self._check_pending(new)
        if restored is not None:
            gated.gate.open()
            logs, new = gated.step(restored, batch)
        flags = gated.gate.nonfinite
        flags.copy_to_host_async()
        self._state = new
        self._pending = _PendingStep(self.epoch, self.step_in_epoch, batch, gated.gate.names, flags)
        self.step_in_epoch += 1
        return logs, new

    def check_last_step(self) -> None:
        """Check the last step, if no step follows at once; after a rollback the model's variables get the restored state."""
        state, self._state = self._state, None
        restored = self._check_pending(state)
        if restored is not None and restored is not state:
            model = self.context.model
            if trainer.is_synced(model):  # Callbacks of the end of the epoch may have set learning rates.
                now = [stored_value(variable) for variable in model.optimizer.variables]
                restored[2] = trainer.keep_learning_rates(model.optimizer, restored[2], now)
            for kind, values in zip(trainer.variables_of(model), restored, strict=True):
                for variable, value in zip(kind, values, strict=True):
                    variable.assign(value)

    def on_validation(self) -> None:
        """See :class:`StepHook`: a rollback sets the variables before a callback, as SwapEMAWeights, exchanges them."""
        self.check_last_step()

    def allows_checkpoint(self) -> bool:
        """See :class:`StepHook`: a checkpoint counts the steps that were skipped, and none that ends the training or is rolled back."""
        if self.guard.action != "rollback":
            self.check_last_step()
        return self._pending is None or not self._pending.bad()

    def _check_pending(self, state: Any) -> Any:
        """Check the pending step.

        Args:
            state: that after the step; if the step was not finite, it is that before it.

        Returns:
            The state to continue from if the step was not finite, else None.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        bad = pending.bad()
        if not bad:
            self.guard.in_a_row = 0
            return None
        self.guard.in_a_row += 1
        self.context.functions.pause()
        return self._act(pending, bad, state)

    def _act(self, step: _PendingStep, bad: list[Any], state: Any) -> Any:
        guard, model = self.guard, self.context.model
        cause = self._diagnosis(step, state)
        text = (
            f"epoch {step.epoch + 1}, step {step.step_in_epoch + 1}: {describe_nonfinite(model, bad)} {cause.sentence}"
        )
        reason, found = self._reason_to_stop(), None
        if guard.action == "rollback" and reason is None:
            found = _newest_checkpoint(self.context)
            reason = None if found else _NO_CHECKPOINT
        if reason is not None:
            raise NonFiniteError(
                f"NanGuard: {text} The variables are those before this step. {reason}",
                *(step.epoch, step.step_in_epoch, cause.replicas, cause.layer, cause.variable, cause.rows),
            )
        if found is None:
            guard.skipped += 1
            self.context.log(f"NanGuard: {text} The step is left out, the {_ordinal(guard.skipped)} so far.")
            return state
        guard.rollbacks += 1
        self.context.log(
            f"NanGuard: {text} Training goes back to the checkpoint of step {found[0]}, and continues with the next batch; this is rollback "
            f"{guard.rollbacks} of at most {guard.max_rollbacks}."
        )
        trainable, non_trainable, optimizer = found[1]
        # Callbacks may have set them since.
        optimizer = trainer.keep_learning_rates(model.optimizer, optimizer, state[2])
        return [trainable, non_trainable, optimizer, list(state[-1])]

    def _diagnosis(self, step: _PendingStep, state: Any) -> Diagnosis:
        if self._diagnoses >= _MAX_DIAGNOSES and self._reason_to_stop() is None:
            return Diagnosis(f"It was not run again to find the cause, as the first {_MAX_DIAGNOSES} were.")
        self._diagnoses += 1
        return diagnose(self.context.functions, state_lists(state), step.batch)

    def _reason_to_stop(self) -> str | None:
        guard = self.guard
        if guard.action == "stop":
            return 'Fix: to continue without such steps, use NanGuard("skip") or NanGuard("rollback").'
        if guard.in_a_row >= guard.max_in_a_row:
            return f"It is the {_ordinal(guard.in_a_row)} such step in a row (max_in_a_row={guard.max_in_a_row}). {_CHANGE_RUN}"
        if guard.action == "rollback" and guard.rollbacks >= guard.max_rollbacks:
            return f"Training has gone back {guard.rollbacks} times already (max_rollbacks={guard.max_rollbacks}). {_CHANGE_RUN}"
        return None


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
