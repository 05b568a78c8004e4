"""Checks of the data of a fit: finite inputs, rows for each replica, BatchNormalization, and a changed batch size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._keras.graph import is_keras_class, outputs_of
from lockstep._keras.layers import layers_of, operations_of, unsynchronized_normalizations
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import ROWS, FitCall, array_in_memory, sample_rows

__all__ = [
    "FitRecord",
    "check_changed_batch",
    "check_few_rows",
    "check_finite_inputs",
    "check_normalization",
    "count_bad_rows",
    "fit_record",
    "learning_rate_of",
]

FEW = 8  # rows; below, the error of ResNet-50 on ImageNet rises: figure 1 of Wu & He, "Group Normalization" (2018)
_FACTOR = 2  # between the batch sizes; a smaller change is not worth a finding
_CHANGING = (  # callbacks that may set the rate
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.LambdaCallback,
)
# Layers that may handle NaN or skip rows.
_NAN_HANDLING = (keras.layers.Lambda, keras.layers.Masking, keras.layers.Discretization)


def check_finite_inputs(call: FitCall) -> Iterator[Finding]:
    """Find NaN and Inf among the inputs of a model without layers that handle them."""
    if not _propagates_nan(call.model):
        return
    for path, leaf in keras.tree.flatten_with_path(call.x):
        array = array_in_memory(leaf)
        if array is None or array.dtype.kind != "f" or not np.ndim(array):
            continue
        inputs, which_rows = sample_rows(array, call.max_values)
        if not np.isfinite(inputs).all():
            yield Finding(
                "inputs-not-finite",
                f"inputs that are NaN or Inf, in {count_bad_rows(~np.isfinite(inputs))} of {which_rows}",
                f"x{''.join(f'[{key!r}]' for key in path)}, {call.at_fit}",
                "one of them makes the loss of its batch NaN, and then all weights",
                "Leave these rows out or replace the values; lockstep.callbacks.NanGuard names such rows while training runs",
            )


def count_bad_rows(bad: np.ndarray) -> int:
    """Return the number of rows with a bad value."""
    return int(bad.reshape(len(bad), -1).any(-1).sum())


def _propagates_nan(model: keras.Model) -> bool:
    """Whether the model consists of Keras layers that propagate NaN."""
    outputs = outputs_of(model)
    return outputs is not None and all(
        is_keras_class(type(layer)) and isinstance(layer, keras.layers.Layer) and not isinstance(layer, _NAN_HANDLING)
        for layer in operations_of(model)
    )


def check_few_rows(call: FitCall) -> Iterator[Finding]:
    """Find a batch with fewer rows than there are replicas."""
    rows, replicas = call.rows, call.settings.replicas
    if rows is not None and rows < replicas:
        yield Finding(
            "fewer-rows-than-replicas",
            f"a batch of {rows} row{'s' * (rows != 1)} leaves {replicas - rows} of {replicas} replicas idle",
            call.at_fit,
            "the batch size is that of the global batch, which the replicas share",
            f"Use a batch of {replicas} rows or more",
        )


def check_normalization(call: FitCall) -> Iterator[Finding]:
    """Find a BatchNormalization that computes its mean and variance from few rows."""
    rows, replicas = call.rows, call.settings.replicas
    alone = set(unsynchronized_normalizations(call.model))
    layers = [x for x in layers_of(call.model) if isinstance(x, keras.layers.BatchNormalization) and x.trainable]
    names = [layer.name for layer in layers if layer.name in alone]
    if rows is None or rows < replicas or not names or rows // replicas >= FEW:
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    synchronized = "" if replicas == 1 else "Use BatchNormalization(synchronized=True) in the scope, or "
    yield Finding(
        "normalization-of-few-rows",
        f"BatchNormalization over {rows // replicas} rows, a replica's share of a batch of {rows}",
        f"layer {names[0]!r}{others}, {call.at_fit}",
        f"with less than {FEW} rows mean and variance are so uncertain that accuracy falls (Wu & He, Group Normalization, 2018)",
        f"{synchronized or 'Use '}a larger batch, or GroupNormalization",
    )


@dataclass(frozen=True)
class FitRecord:
    """Batch size and learning rate of a call of ``fit``.

    Args:
        rows: of a global batch.
        rate: the learning rate.
    """

    rows: int
    rate: float


def fit_record(call: FitCall, rate: float | None) -> FitRecord | None:
    """Return the record of a call; None if the batch size is unknown or the learning rate changes during training."""
    if call.rows is None or rate is None:
        return None
    batch_size = call.arguments.get("batch_size") or ROWS  # also if there are fewer rows in all
    return FitRecord(call.rows if call.is_read else batch_size, rate)


def learning_rate_of(call: FitCall) -> float | None:
    """Return the learning rate; None if it may change during training. Call it before steps run: then variables have no values."""
    optimizer = call.model.optimizer
    if optimizer is None or _may_change(call.arguments.get("callbacks")):
        return None
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if isinstance(inner, keras.optimizers.MultiOptimizer) or not isinstance(inner.learning_rate, keras.Variable):
        return None  # Several rates, or a schedule.
    return float(np.asarray(inner.learning_rate))


def check_changed_batch(
    now: FitRecord | None, earlier: FitRecord | None, where: str, since: str = "the last fit"
) -> Iterator[Finding]:
    """Find training that continues with another batch size at the same learning rate.

    Args:
        now: record of this call; None: unknown.
        earlier: record of an earlier call; None: there is none.
        where: location for the message.
        since: name of the earlier call for the message.
    """
    if earlier is None or now is None or now.rate != earlier.rate:
        return
    if max(now.rows, earlier.rows) >= _FACTOR * min(now.rows, earlier.rows):
        factor = now.rows / earlier.rows
        yield Finding(
            "batch-without-rate",
            f"the global batch has {now.rows} rows, {earlier.rows} in {since}, and the learning rate is {now.rate:g} as before",
            where,
            f"a step now averages over {factor:g} times as many rows: with the same rate, each row has another weight in training (Goyal et al., "
            "Accurate, Large Minibatch SGD, 2017)",
            f"Use {now.rate * factor:g} with SGD, about {now.rate * factor**0.5:.3g} with Adam, as lockstep.callbacks."
            f"LearningRateScaling(base_batch={earlier.rows}) does gradually; or use the old batch size",
        )


def _may_change(callbacks: Any) -> bool:
    """Whether a callback may set the learning rate: one of Keras that does so, or a user-defined one."""
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    return any(isinstance(one, _CHANGING) or not _is_known(type(one)) for one in given)


def _is_known(kind: type) -> bool:
    is_ours = kind.__module__.startswith("lockstep.") and not kind.__module__.startswith("lockstep.tuning.")
    return is_keras_class(kind) or is_ours
