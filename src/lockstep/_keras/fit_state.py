"""The seam for the state of a running ``fit``: like ``_keras.py``, what Keras does not document.

What is used, all seen in Keras 3.15: ``_jax_state``, the values that ``jax_state_sync`` writes back into variables,
``_jax_state_synced``, which says that this is done, and the count of an optimizer, ``_iterations``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

__all__ = ["refresh_before_sync", "steps_done"]

_KINDS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


@contextlib.contextmanager
def refresh_before_sync(model: keras.Model, settle: Callable[[], Any]) -> Iterator[None]:
    """Ask for the newest values whenever Keras, or a callback by ``self.model``, is about to write them into the variables.

    Args:
        model: the model, in ``fit``.
        settle: gives the values of a training step's state, which are elsewhere until then; None where there are no newer ones.
    """
    original = model.jax_state_sync

    def jax_state_sync() -> None:
        state = vars(model).get("_jax_state") or {}
        is_training = _KINDS[2] in state  # and no evaluation within fit
        if is_training and not model._jax_state_synced:
            newest = settle()
            if newest is not None:
                model._jax_state = dict(zip(_KINDS, newest, strict=True))
        original()

    model.__dict__["jax_state_sync"] = jax_state_sync
    try:
        yield
    finally:
        del model.__dict__["jax_state_sync"]


def steps_done(optimizer: Any) -> int:
    """Number of training steps that an optimizer has seen; ``iterations`` leaves out those since the last update, where it accumulates."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    return int(np.asarray(keras.ops.convert_to_numpy(inner._iterations)))
