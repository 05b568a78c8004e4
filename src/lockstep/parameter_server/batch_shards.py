"""Parts of a global batch for synchronous training on servers: the rows of each part, and a check that the loss is a mean over rows."""

from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep.data.device_placement import PlacedRows
from lockstep.devices.batch_split import rows_of_replicas
from lockstep.fit.checkpointing.model_state import variables_of

__all__ = ["check_mean_loss", "count_batch_rows", "nonempty_parts", "part_of"]

_TOLERANCE = 1e-4  # Of a loss in float32, added up in another order.


def count_batch_rows(batch: Any) -> int:
    """Return the number of rows of a batch, on the host or on devices."""
    first = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))[0]
    return int(first.shape[0])


def nonempty_parts(rows: int, parts: int) -> int:
    """Return how many of the parts have rows.

    Example:
        >>> nonempty_parts(6, 4), nonempty_parts(7, 2)
        (3, 2)
    """
    return sum(count > 0 for count in rows_of_replicas(rows, parts))


def part_of(batch: Any, part: int, parts: int) -> Any:
    """Return the rows of one part: those that the replica of that number would have.

    Example:
        >>> part_of((np.arange(7),), 1, 2)
        (array([4, 5, 6]),)
    """
    sizes = rows_of_replicas(count_batch_rows(batch), parts)
    start = sum(sizes[:part])
    return jax.tree.map(lambda leaf: leaf[start : start + sizes[part]], batch)


def check_mean_loss(model: keras.Model, batch: Any, parts: int) -> None:
    """Refuse a model whose loss of a batch is not the mean of the losses of its rows, because parts would change the gradient.

    Args:
        model: is built and compiled.
        batch: on the host.
        parts: number of parts of the batch.

    Raises:
        ModelError: the loss of the batch is not the mean of the losses of its parts.
    """
    trainable, non_trainable, _, metrics = [[variable.value for variable in kind] for kind in variables_of(model)]

    def loss_of(rows: Any) -> float | None:
        logs, _ = model.test_step((trainable, non_trainable, metrics), rows)
        return float(np.asarray(logs["loss"])) if "loss" in logs else None

    whole = loss_of(batch)
    if whole is None:
        return
    nonempty = [part_of(batch, part, parts) for part in range(nonempty_parts(count_batch_rows(batch), parts))]
    mean = sum((loss_of(one) or 0.0) * count_batch_rows(one) for one in nonempty) / count_batch_rows(batch)
    if abs(mean - whole) > _TOLERANCE * max(1.0, abs(whole)):
        raise ModelError(
            f"Model {model.name!r}: the loss of a batch is {whole:.6g}, and the mean of the losses of its {len(nonempty)} parts, by rows, {mean:.6g}. "
            "With max_staleness=0 each worker computes the gradient of a part, which is the gradient of the batch only if the loss is a mean "
            "over rows: no mask, no reduction='sum', no loss that compares rows. Use MultiWorkerMirroredStrategy, or another max_staleness."
        )
