"""BatchNormalization layers of a model: which synchronize over replicas, and traces without statistics of the batch.

That a model with a synchronized one runs on the global batch is decided in ``graph.global_batch_reason``.

Undocumented parts, as of Keras 3.15: ``_flatten_layers``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from lockstep._keras.patches import MOMENTS, SYNCHRONIZED_FLAG, patched, patched_method


def unsynchronized_normalizations(model: keras.Model) -> list[str]:
    """Return the names of the BatchNormalization layers that normalize each replica's rows separately."""
    return [layer.name for layer in normalizations_of(model) if not layer.synchronized]


@contextlib.contextmanager
def clear_synchronized(model: keras.Model) -> Iterator[None]:
    """Clear ``synchronized`` of all BatchNormalization layers during a trace on the global batch, where it changes nothing."""
    layers = [layer for layer in normalizations_of(model) if layer.synchronized]
    with patched(SYNCHRONIZED_FLAG, [(layer, "synchronized", False) for layer in layers]):
        yield


@contextlib.contextmanager
def disable_batch_statistics(model: keras.Model, mark: Callable[[Any], Any]) -> Iterator[list[keras.Layer]]:
    """Make each BatchNormalization use its moving statistics while this context is open, so that it treats each row separately.

    Where it would compute the moments of the batch, it gets ``mark`` of the moving statistics.

    Yields:
        A list to which each layer is added that asks for the moments of the batch.
    """
    called: list[keras.Layer] = []

    def around_moments(layer: Any, method: Any) -> Any:
        def moments(*args: Any, **kwargs: Any) -> Any:
            called.append(layer)
            statistics = layer.moving_mean, layer.moving_variance
            return tuple(mark(keras.ops.convert_to_tensor(one)) for one in statistics)

        return moments

    with patched_method(MOMENTS, normalizations_of(model), around_moments):
        yield called


def normalizations_of(model: keras.Model) -> list[keras.Layer]:
    """Return the BatchNormalization layers of a model at all depths."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
