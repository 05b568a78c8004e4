"""BatchNormalization layers of a model: which synchronize over replicas, and traces without statistics of the batch, or with those of some
rows.

That a model with a synchronized one runs on the global batch is decided in ``graph.global_batch_reason``.

Undocumented parts, as of Keras 3.15: ``_flatten_layers``, ``BatchNormalization._moments`` and ``_reduction_axes``.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

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


def disable_batch_statistics(
    model: keras.Model, mark: Callable[..., Any]
) -> contextlib.AbstractContextManager[list[keras.Layer]]:
    """Make each BatchNormalization use its moving statistics while this context is open, so that it treats each row separately.

    Where it would compute the moments of its inputs, it gets ``mark`` of the moving statistics, the inputs and the mask, if there is one.

    Yields:
        A list to which each layer is added that asks for the moments of the batch.
    """

    def moments(layer: Any, _: Any, inputs: Any, mask: Any) -> Any:
        of = [inputs] if mask is None else [inputs, mask]
        return tuple(mark(ops.convert_to_tensor(one), *of) for one in (layer.moving_mean, layer.moving_variance))

    return _moments_by(moments, model)


def observe_moments(model: keras.Model) -> contextlib.AbstractContextManager[list[keras.Layer]]:
    """Yield a list to which each BatchNormalization is added that computes the moments of a batch while this context is open."""
    return _moments_by(lambda _, method, inputs, mask: method(inputs, mask), model)


def moments_of_first_rows(
    model: keras.Model, rows: int, used: Any
) -> contextlib.AbstractContextManager[list[keras.Layer]]:
    """Make each BatchNormalization compute the moments of the first ``used`` of ``rows`` rows while this context is open.

    Args:
        model: a model that is called on ``rows`` rows.
        rows: their number. The first axis of what is normalized has equally many entries of each row, in their order.
        used: a number or a scalar array; the rows that follow are padding. If all are, the moments are those of all: nothing that is
            computed on padding is read, but it should be finite, as its gradient is a product with zero.
    """
    used = ops.where(used == 0, rows, used)

    def moments(layer: Any, method: Any, inputs: Any, mask: Any) -> Any:
        entries = len(inputs)
        is_used = ops.arange(entries) < used * (entries // rows)
        if mask is not None:
            return method(inputs, ops.logical_and(mask, _along_first_axis(is_used, mask)))
        axes = layer._reduction_axes
        wide = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        is_used = _along_first_axis(is_used, wide)
        other = math.prod(inputs.shape[axis] for axis in axes if axis != 0)
        count = ops.cast(used * (entries // rows), wide.dtype) * other

        def mean(values: Any) -> Any:
            return ops.sum(ops.where(is_used, values, 0), axes, keepdims=True) / count

        center = mean(wide)
        found = center, mean(ops.square(wide - center))
        return tuple(ops.cast(ops.squeeze(one, axes), inputs.dtype) for one in found)

    return _moments_by(moments, model)


@contextlib.contextmanager
def _moments_by(moments: Callable[..., Any], model: keras.Model) -> Iterator[list[keras.Layer]]:
    """Have ``moments(layer, method, inputs, mask)`` compute the moments of each BatchNormalization; yield those that ask for them."""
    called: list[keras.Layer] = []

    def around(layer: Any, method: Any) -> Any:
        def replacement(inputs: Any, mask: Any = None) -> Any:
            called.append(layer)
            return moments(layer, method, inputs, mask)

        return replacement

    with patched_method(MOMENTS, normalizations_of(model), around):
        yield called


def _along_first_axis(values: Any, like: Any) -> Any:
    return ops.reshape(values, (-1, *[1] * (len(like.shape) - 1)))


def normalizations_of(model: keras.Model) -> list[keras.Layer]:
    """Return the BatchNormalization layers of a model at all depths."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
