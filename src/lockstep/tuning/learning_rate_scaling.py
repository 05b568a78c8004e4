"""The callback that scales the learning rate with the batch size.

It sets the rate as Keras's callbacks do, before a step. During an epoch, Keras then writes the training state into the model's
variables and reads it back, so the rate is set only while it changes. The state for a resumed run is the attribute ``progress``,
which ``BackupAndRestore`` saves with the variables.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from lockstep._errors import OptionError, ScopeError, one_of, whole_number
from lockstep._keras import trainer
from lockstep._logging import counted, log_info
from lockstep.data.keras_adapter import KerasInput
from lockstep.fit.fit_hooks import FitContext
from lockstep.strategies.parameter_server import ParameterServerStrategy

# Functions of the ratio of the batch sizes.
RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}

_SCHEDULE = (
    "LearningRateScaling needs an optimizer with one learning rate that is a number; a LearningRateSchedule is compiled into the step and counts "
    "steps, of which a larger batch has fewer. Fix: change the schedule: multiply its rates by the ratio of the batch sizes (or its root), divide "
    "its steps by that ratio, and let it warm up (CosineDecay has warmup_target and warmup_steps). For a MultiOptimizer, scale the rates of "
    "its optimizers when they are made."
)


@dataclass(frozen=True)
class WarmUp:
    """A linear change from the rate ``base`` to ``scaled`` over a number of steps; 0: ``scaled`` from the first step on."""

    base: float
    scaled: float
    steps: int

    def rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        return self.scaled if self.is_over(step) else self.base + (self.scaled - self.base) * step / self.steps

    def is_over(self, step: int) -> bool:
        """Whether the rate is constant from this step on."""
        return step >= self.steps


class LearningRateScaling(keras.callbacks.Callback):
    """Scales the learning rate by the ratio of the global batch size to the one that the rate was tuned for.

    Training begins with the optimizer's rate, which rises linearly to the scaled rate over the steps of the first epochs. If the
    scaled rate is smaller, it is set at the first step. Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), for
    ``"linear"`` and the warm-up; Krizhevsky, "One weird trick" (2014), and Hoffer et al., "Train longer, generalize better" (2017), for ``"sqrt"``.

    Under a strategy the global batch is that of ``fit``, times the optimizer's ``gradient_accumulation_steps``. After the warm-up the
    callback sets nothing, so that ``ReduceLROnPlateau`` and ``LearningRateScheduler`` start from the scaled rate; if another callback sets
    the rate between two epochs of the warm-up, the warm-up ends and a line is logged. A further ``fit`` with the same
    callback continues from the first one; a new callback would scale the rate that it finds. See ``docs/batch_size.md``.

    Args:
        base_batch: rows of the batch that the optimizer's rate was tuned for.
        rule: ``"linear"``: multiply by the ratio of the batch sizes, for SGD; ``"sqrt"``: by its root, for Adam and similar optimizers.
        warmup_epochs: length of the warm-up; 0: none.
        global_batch: rows of the global batch; required in plain Keras, in which callbacks cannot read it.

    Attributes:
        factor: ratio of the scaled to the optimizer's rate; None before the first step.

    Raises:
        OptionError: an argument is out of its range; from ``fit``: the rate is a schedule, or the length of an epoch is unknown.
        ScopeError: from ``fit``: the global batch is unknown, or parameter servers keep the variables.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.01), "mse")
        >>> scaling = lockstep.callbacks.LearningRateScaling(base_batch=64, warmup_epochs=1)
        >>> history = model.fit(np.ones((512, 4)), np.ones((512, 1)), batch_size=256, epochs=2, verbose=0, callbacks=[scaling])
        >>> scaling.factor, round(float(model.optimizer.learning_rate), 4)
        (4.0, 0.04)
    """

    def __init__(
        self, base_batch: int, rule: str = "linear", warmup_epochs: int = 5, *, global_batch: int | None = None
    ) -> None:
        super().__init__()
        self._rule = one_of(RULES, "LearningRateScaling: rule", rule)
        self._base_batch = whole_number("LearningRateScaling: base_batch", base_batch)
        self._epochs = whole_number("LearningRateScaling: warmup_epochs", warmup_epochs, minimum=0)
        self._given_batch = (
            None if global_batch is None else whole_number("LearningRateScaling: global_batch", global_batch)
        )
        self._optimizer: Any = None
        self._is_first = False  # whether the next step is the first of this call of fit or of this epoch
        self._warm_up: WarmUp | None = None  # None until this call's first step
        self.progress: dict[str, Any] = {}
        self.data: KerasInput | None = None  # during a call of fit of a strategy's model

    @contextmanager
    def around_fit(self, context: FitContext) -> Iterator[None]:
        """Keep the input of the call, which has the global batch; see :class:`lockstep.fit.fit_hooks.FitHook`."""
        self.data = context.data
        try:
            yield
        finally:
            self.data = None

    @property
    def factor(self) -> float | None:
        """See the class."""
        batch = self.progress.get("batch")
        return None if batch is None else RULES[self._rule](batch / self._base_batch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the rate can be scaled.

        Raises:
            OptionError: see the class.
            ScopeError: see the class.
        """
        model = self.model
        self._check_supported(trainer.strategy_of(model), model.optimizer)
        if model.optimizer is not self._optimizer:
            self._optimizer, self.progress = model.optimizer, {}
        self._each, self._warm_up = model.steps_per_execution, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the number of steps before the epoch."""
        self._is_first = True
        self.progress = {**self.progress, "before": self.progress.get("steps", 0)}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step, or of the steps of one execution."""
        step = self.progress["before"] + batch
        if self._warm_up is None:
            self._warm_up = self._start_warm_up(batch)
        self._apply_rate(step, self._warm_up, is_between_epochs=self._is_first)
        self._is_first = False
        self.progress = {**self.progress, "steps": step + self._each}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the scaled rate after the last epoch of the warm-up, before other callbacks read it."""
        if self._steps is None or self._warm_up is None:
            return
        most = self.progress["before"] + self._steps  # The last execution may have had fewer steps.
        steps = min(self.progress["steps"], most)
        self.progress = {**self.progress, "steps": steps}
        if self._warm_up.is_over(steps):
            self._apply_rate(steps, self._warm_up, is_between_epochs=True)

    def _apply_rate(self, step: int, warm_up: WarmUp, *, is_between_epochs: bool) -> None:
        if self.progress["is_over"]:
            return
        is_over = warm_up.is_over(step)
        if is_between_epochs and self._was_set_by_another():
            is_over = True
            self._log_end_by_another()
        elif warm_up.rate(step) != self.progress.get("set"):
            self._set(warm_up.rate(step))
        self.progress = {**self.progress, "is_over": is_over}

    def _start_warm_up(self, batch: int) -> WarmUp:
        """Return the warm-up of this call of ``fit``, at its first step or at the step at which it resumes."""
        before = self.factor
        # At a resumed step the batch may be the smaller one that ends a pass.
        if before is None or (batch == 0 and not (self.data and self.data.is_mid_pass)):
            self.progress = {**self.progress, "batch": self._rows() * trainer.batches_per_update(self._optimizer)}
        factor = self.factor or 1.0
        if before is None:
            self.progress |= {"base": self._rate, "is_over": False}
        elif factor != before and self.progress["is_over"]:  # Changes of the rate by other callbacks are kept.
            self._set(self._rate * factor / before)
        base, is_rising = self.progress["base"], factor > 1 and self._epochs > 0
        return WarmUp(base, base * factor, self._epochs * (self._steps or 0) if is_rising else 0)

    @property
    def _steps(self) -> int | None:
        """Steps of an epoch: ``steps_per_epoch``, and then as many as whole executions have; None if unknown."""
        if self.data is not None:
            return self.data.steps
        steps: int | None = self.params.get("steps")
        return steps

    def _rows(self) -> int:
        rows = self.data.first_rows() if self._given_batch is None and self.data else self._given_batch
        if rows is None:
            raise OptionError(
                "LearningRateScaling: the rows of a batch are unknown, as the input has none. Fix: use "
                "LearningRateScaling(…, global_batch=512)."
            )
        return rows

    @property
    def _rate(self) -> float:
        """The current rate; reading ``self.model`` makes Keras update the variables, which have no values during an epoch."""
        return float(self.model.optimizer.learning_rate)

    def _set(self, rate: float) -> None:
        self.model.optimizer.learning_rate = rate
        self.progress = {**self.progress, "set": rate}

    def _was_set_by_another(self) -> bool:
        if "set" not in self.progress:
            return False
        return self._rate != float(keras.ops.cast(self.progress["set"], self._optimizer.learning_rate.dtype))

    def _log_end_by_another(self) -> None:
        owner = trainer.strategy_of(self.model)
        (owner._log if owner else log_info)(
            f"LearningRateScaling: the warm-up ends after {self.progress['steps']} steps, as something else has set the learning rate to "
            f"{self._rate:.6g}. To use both, do not set the rate elsewhere in the first {counted(self._epochs, 'epoch')}."
        )

    def _check_supported(self, owner: Any, optimizer: Any) -> None:
        if isinstance(owner, ParameterServerStrategy):
            raise ScopeError(
                "LearningRateScaling sets the rate before each step, for which all workers of a ParameterServerStrategy would have to wait. Fix: use "
                "a schedule: keras.optimizers.schedules.CosineDecay has warmup_target and warmup_steps."
            )
        if self.data is None and self._given_batch is None:
            raise ScopeError(
                "LearningRateScaling cannot see the global batch in plain Keras. Fix: use LearningRateScaling(…, global_batch=512), or make the "
                "model in lockstep.MirroredStrategy().scope() without overriding fit."
            )
        if trainer.adjustable_learning_rate(optimizer) is None:
            raise OptionError(_SCHEDULE)
        if self._epochs and self._steps is None:
            raise OptionError(
                f"LearningRateScaling: the warm-up lasts {counted(self._epochs, 'epoch')}, and this input does not say how many batches an epoch has. Fix: pass "
                "steps_per_epoch to fit, or warmup_epochs=0."
            )
