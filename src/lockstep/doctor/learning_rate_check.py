"""Whether the learning rate follows where the global batch has changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._keras.graph import is_keras_class
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import ROWS, FitCall

__all__ = ["FitRecord", "about_changed_batch", "fitted", "rate_of"]

_FACTOR = 2  # of the batch; less is lost among other noise
_CHANGING = (  # callbacks that may set the rate
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.LambdaCallback,
)


@dataclass(frozen=True)
class FitRecord:
    """How a model was trained.

    Args:
        rows: of a global batch.
        rate: of learning.
    """

    rows: int
    rate: float


def fitted(program: FitCall, rate: float | None) -> FitRecord | None:
    """How it will be trained; None where the batch is not known, or the rate changes by itself."""
    if program.rows is None or rate is None:
        return None
    meant = program.arguments.get("batch_size") or ROWS  # also where there are fewer rows in all
    return FitRecord(program.rows if program.is_read else meant, rate)


def rate_of(program: FitCall) -> float | None:
    """The rate of learning; None where it may change by itself. To be asked before steps run, when variables have no values."""
    optimizer = program.model.optimizer
    if optimizer is None or _may_change(program.arguments.get("callbacks")):
        return None
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if isinstance(inner, keras.optimizers.MultiOptimizer) or not isinstance(inner.learning_rate, keras.Variable):
        return None  # Several rates, or a schedule.
    return float(np.asarray(inner.learning_rate))


def about_changed_batch(
    now: FitRecord | None, earlier: FitRecord | None, where: str, since: str = "the last fit"
) -> Iterator[Finding]:
    """About a model that goes on with another batch at the same rate.

    Args:
        now: how it is trained.
        earlier: how it was trained before, if it was.
        where: for the message.
        since: when that was.
    """
    if earlier is None or now is None or now.rate != earlier.rate:
        return
    if max(now.rows, earlier.rows) >= _FACTOR * min(now.rows, earlier.rows):
        factor = now.rows / earlier.rows
        yield Finding(
            "batch-without-rate",
            f"the global batch has {now.rows} rows, {earlier.rows} in {since}, and the learning rate is {now.rate:g} as before",
            where,
            f"a step now stands for {factor:g} times as many rows: with the same rate it learns another amount from each of them (Goyal et al., "
            "Accurate, Large Minibatch SGD, 2017)",
            f"With SGD take {now.rate * factor:g}, with Adam about {now.rate * factor**0.5:.3g}, as lockstep.callbacks."
            f"LearningRateScaling(base_batch={earlier.rows}) does step by step; or say the old batch",
        )


def _may_change(callbacks: Any) -> bool:
    """Whether a callback may set the rate: one of Keras's that does so, or somebody's own."""
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    return any(isinstance(one, _CHANGING) or not _is_known(type(one)) for one in given)


def _is_known(kind: type) -> bool:
    is_ours = kind.__module__.startswith("lockstep.") and not kind.__module__.startswith("lockstep.tuning.")
    return is_keras_class(kind) or is_ours
