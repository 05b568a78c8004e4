"""A global batch in parts, for synchronous training on servers: which rows each part has, and whether parts can mean the same."""

from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep.data.device_placement import PlacedRows
from lockstep.devices.layout import rows_of_replicas
from lockstep.fit.checkpointing.model_state import variables_of

__all__ = ["busy_parts", "count_batch_rows", "part_of", "refuse_all_but_means"]

_TOLERANCE = 1e-4  # Of a loss in float32, added up in another order.


def count_batch_rows(batch: Any) -> int:
    """Number of rows of a batch, on the host or placed."""
    first = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))[0]
    return int(first.shape[0])


def busy_parts(rows: int, parts: int) -> int:
    """How many of the parts have rows.

    Example:
        >>> busy_parts(6, 4), busy_parts(7, 2)
        (3, 2)
    """
    return sum(count > 0 for count in rows_of_replicas(rows, parts))


def part_of(batch: Any, part: int, parts: int) -> Any:
    """The rows of one part: those that a replica of that number would have.

    Example:
        >>> part_of((np.arange(7),), 1, 2)
        (array([4, 5, 6]),)
    """
    sizes = rows_of_replicas(count_batch_rows(batch), parts)
    start = sum(sizes[:part])
    return jax.tree.map(lambda leaf: leaf[start : start + sizes[part]], batch)


def refuse_all_but_means(model: keras.Model, batch: Any, parts: int) -> None:
    """Refuse a model whose loss of a batch is not the mean of the losses of its rows, as parts would be another training then.

    Args:
        model: is built and compiled.
        batch: on the host.
        parts: how many it is cut into.

    Raises:
        ModelError: it is such a one.
    """
    trainable, others, _, metrics = [[variable.value for variable in kind] for kind in variables_of(model)]

    def loss_of(rows: Any) -> float | None:
        logs, _ = model.test_step((trainable, others, metrics), rows)
        return float(np.asarray(logs["loss"])) if "loss" in logs else None

    whole = loss_of(batch)
    if whole is None:
        return
    busy = [part_of(batch, part, parts) for part in range(busy_parts(count_batch_rows(batch), parts))]
    met = sum((loss_of(one) or 0.0) * count_batch_rows(one) for one in busy) / count_batch_rows(batch)
    if abs(met - whole) > _TOLERANCE * max(1.0, abs(whole)):
        raise ModelError(
            f"Model {model.name!r}: the loss of a batch is {whole:.6g}, and the mean of the losses of its {len(busy)} parts, by rows, {met:.6g}. "
            "With max_staleness=0 each worker computes the gradient of a part, which is the gradient of the batch only where the loss is a mean "
            "over rows: no mask, no reduction='sum', no loss that compares rows. Use MultiWorkerMirroredStrategy, or another max_staleness."
        )
