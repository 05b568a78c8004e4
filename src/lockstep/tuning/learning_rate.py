"""The callback that scales the learning rate with the batch.

It sets the rate as Keras's own callbacks do, before a step. Within an epoch that has Keras write the state of training into the
model's variables and take it out again, so it happens only while the rate changes. What it needs to go on after a crash is numbers in
one attribute, ``progress``, which ``BackupAndRestore`` keeps with the variables.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep._errors import OptionError, ScopeError, whole_number
from lockstep._keras import trainer
from lockstep._logging import log_info
from lockstep.data.keras_adapter import KerasInput
from lockstep.fit.hooks import FitContext
from lockstep.strategies.parameter_server import ParameterServerStrategy
from lockstep.tuning.lr_warmup import RULES, WarmUp

__all__ = ["LearningRateScaling"]

_SCHEDULE = (
    "LearningRateScaling needs an optimizer with one learning rate that is a number; a LearningRateSchedule is compiled into the step, and counts "
    "steps, of which a larger batch has fewer, so it has to be written anew in any case: multiply its rates by the ratio of the batches (or "
    "its root), divide its steps by that ratio, and let it warm up itself (CosineDecay has warmup_target and warmup_steps). Of a "
    "MultiOptimizer scale the rates where its optimizers are made."
)


class LearningRateScaling(keras.callbacks.Callback):
    """Multiplies the learning rate by how many times larger the global batch is than the one that the rate was found for.

    Training begins with the rate that the optimizer has, and comes to the scaled one in a straight line over the steps of the first
    epochs. Where the rate becomes smaller, it is so from the first step on. Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), for
    ``"linear"`` and the warm-up; Krizhevsky, "One weird trick" (2014), and Hoffer et al., "Train longer, generalize better" (2017), for ``"sqrt"``.

    Under a strategy the global batch is that of ``fit``, times the optimizer's ``gradient_accumulation_steps``. After the warm-up the
    callback sets nothing, so that ``ReduceLROnPlateau`` and ``LearningRateScheduler`` go on from the scaled rate; one that sets another rate between
    two epochs of the warm-up ends it, and a line says so. A further ``fit`` goes on where the first has ended, and does not scale
    again. ``docs/batch_size.md`` says what to expect.

    Args:
        base_batch: rows of the batch that the optimizer's rate is right for.
        rule: ``"linear"``: times the ratio of the batches, for SGD; ``"sqrt"``: times its root, for Adam and its like.
        warmup_epochs: length of the warm-up; 0: none.
        global_batch: rows of the global batch; needed in plain Keras, where a callback cannot see it.

    Attributes:
        factor: what the rate is multiplied by in the end; None before the first step.

    Raises:
        OptionError: an argument is out of its range; from ``fit``: the rate is a schedule, or nobody knows how long an epoch is.
        ScopeError: from ``fit``: the global batch cannot be seen, or servers keep the variables.

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
        if rule not in RULES:
            raise OptionError(f"LearningRateScaling: rule: expected one of {', '.join(RULES)}, got {rule!r}.")
        self._rule = rule
        self._base_batch = whole_number("LearningRateScaling: base_batch", base_batch)
        self._epochs = whole_number("LearningRateScaling: warmup_epochs", warmup_epochs, least=0)
        self._given_batch = (
            None if global_batch is None else whole_number("LearningRateScaling: global_batch", global_batch)
        )
        self._optimizer: Any = None
        self._is_first = False  # whether the next step is the first that this call of fit, or this epoch, hears of
        self._warm_up: WarmUp | None = None  # None until this call's first step
        self.progress: dict[str, Any] = {}
        self.data: KerasInput | None = None  # during a call of fit of a strategy's model

    @contextmanager
    def around_fit(self, context: FitContext) -> Iterator[None]:
        """See :class:`lockstep.fit.hooks.FitHook`: the input of the call shows the global batch."""
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
        """Keras says that training begins.

        Raises:
            OptionError: see the class.
            ScopeError: see the class.
        """
        model = self.model
        self._refuse_where_it_cannot_work(trainer.strategy_of(model), model.optimizer)
        if model.optimizer is not self._optimizer:
            self._optimizer, self.progress = model.optimizer, {}
        self._each, self._warm_up = model.steps_per_execution, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch begins."""
        self._is_first = True
        self.progress = {**self.progress, "before": self.progress.get("steps", 0)}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras says that a step begins, or the first of several."""
        step = self.progress["before"] + batch
        if self._warm_up is None:
            self._warm_up = self._begun(batch)
        self._come_to(step, self._warm_up, is_between_epochs=self._is_first)
        self._is_first = False
        self.progress = {**self.progress, "steps": step + self._each}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch ends: where it is the last of the warm-up, others find the scaled rate from here on."""
        if self.params.get("steps") is None or self._warm_up is None:
            return
        most = self.progress["before"] + self.params["steps"]  # The last call may have had fewer steps than the others.
        steps = min(self.progress["steps"], most)
        self.progress = {**self.progress, "steps": steps}
        if self._warm_up.is_over(steps):
            self._come_to(steps, self._warm_up, is_between_epochs=True)

    def _come_to(self, step: int, warm_up: WarmUp, *, is_between_epochs: bool) -> None:
        if self.progress["is_over"]:
            return
        is_over = warm_up.is_over(step)
        if is_between_epochs and self._was_set_by_another():
            is_over = True
            self._tell_of_another()
        elif warm_up.rate(step) != self.progress.get("set"):
            self._set(warm_up.rate(step))
        self.progress = {**self.progress, "is_over": is_over}

    def _begun(self, batch: int) -> WarmUp:
        """What this call of ``fit`` is to do, seen from the first of its steps, or from that at which it goes on."""
        before = self.factor
        if batch == 0 or before is None:  # Elsewhere the batch may be the smaller one that ends an epoch.
            self.progress = {**self.progress, "batch": self._rows() * _accumulated(self._optimizer)}
        factor = self.factor or 1.0
        if before is None:
            self.progress |= {"base": self._rate, "is_over": False}
        elif factor != before and self.progress["is_over"]:  # What others have made of the rate meanwhile stays in it.
            self._set(self._rate * factor / before)
        base, is_rising = self.progress["base"], factor > 1 and self._epochs > 0
        return WarmUp(base, base * factor, self._epochs * self.params["steps"] if is_rising else 0)

    def _rows(self) -> int:
        rows = self.data.first_rows() if self._given_batch is None and self.data else self._given_batch
        if rows is None:
            raise OptionError(
                "LearningRateScaling: the rows of a batch cannot be counted, as the input gives none. Say "
                "LearningRateScaling(…, global_batch=512)."
            )
        return rows

    @property
    def _rate(self) -> float:
        """The rate as it is now: with ``self.model`` Keras brings the variables up to date, which have no values within an epoch."""
        return float(self.model.optimizer.learning_rate)

    def _set(self, rate: float) -> None:
        self.model.optimizer.learning_rate = rate
        self.progress = {**self.progress, "set": rate}

    def _was_set_by_another(self) -> bool:
        if "set" not in self.progress:
            return False
        return self._rate != float(keras.ops.cast(self.progress["set"], self._optimizer.learning_rate.dtype))

    def _tell_of_another(self) -> None:
        owner = trainer.strategy_of(self.model)
        (owner._log if owner else log_info)(
            f"LearningRateScaling: the warm-up ends after {self.progress['steps']} steps, as something else has set the learning rate to "
            f"{self._rate:.6g}. To have both, let that leave the rate alone in the first {self._epochs} epochs."
        )

    def _refuse_where_it_cannot_work(self, owner: Any, optimizer: Any) -> None:
        if isinstance(owner, ParameterServerStrategy):
            raise ScopeError(
                "LearningRateScaling sets the rate before each step, for which all workers of a ParameterServerStrategy would have to wait. Give "
                "the optimizer a schedule: keras.optimizers.schedules.CosineDecay has warmup_target and warmup_steps."
            )
        if self.data is None and self._given_batch is None:
            raise ScopeError(
                "LearningRateScaling cannot see the global batch in plain Keras: say LearningRateScaling(…, global_batch=512), or make the model "
                "in lockstep.MirroredStrategy().scope() and leave fit as Keras has it."
            )
        if isinstance(optimizer, keras.optimizers.MultiOptimizer) or not isinstance(
            optimizer.learning_rate, keras.Variable
        ):
            raise OptionError(_SCHEDULE)
        if self._epochs and self.params.get("steps") is None:
            raise OptionError(
                f"LearningRateScaling: the warm-up lasts {self._epochs} epochs, and this input does not say how many batches an epoch has. Give "
                "steps_per_epoch to fit, or warmup_epochs=0."
            )


def _accumulated(optimizer: Any) -> int:
    """Number of batches whose gradients make one update."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    return inner.gradient_accumulation_steps or 1
