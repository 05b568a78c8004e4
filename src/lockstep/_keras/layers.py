"""Layers, variables and tensors of a model, and changes of what layers compute during one trace.

Undocumented parts, as of Keras 3.15: ``_flatten_layers``; that ``__call__`` of a layer or an operation looks ``call`` up on the
instance, and that ``train_step`` so looks up ``stateless_call`` and ``compute_loss``; the masks that Keras attaches to tensors;
the names of seed generators' variables; ``_operations`` and ``_non_trainable_variables``.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import keras
from keras.src.backend import get_keras_mask, set_keras_mask

from lockstep._keras.patches import LAYER_CALL, SYNCHRONIZED_FLAG, patched, patched_method

__all__ = [
    "attribute_arrays",
    "clear_synchronized",
    "copy_keras_mask",
    "disable_batch_statistics",
    "get_keras_mask",
    "global_batch_reason",
    "is_seed",
    "lacks_aggregation",
    "layers_of",
    "nested_models",
    "operations_of",
    "set_attribute_arrays",
    "set_keras_mask",
    "unsynchronized_normalizations",
]

AttributeLeaf = tuple[Any, str, int]  # a layer, the name of its attribute, and the number of the leaf in that tree


# --- layers and operations ---------------------------------------------------------------------------------------


def layers_of(model: keras.Model) -> list[Any]:
    """Return the layers at all depths, without the models that hold them."""
    return [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Model)]


def nested_models(model: keras.Model) -> list[keras.Model]:
    """Return the model, and the models among its layers at all depths."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def operations_of(model: keras.Model) -> list[Any]:
    """Return the model, its layers at all depths, and the operations of functional models that are not layers."""
    found = {id(layer): layer for layer in model._flatten_layers()}
    for layer in list(found.values()):
        if isinstance(layer, (keras.Sequential, keras.models.Model)) and "_operations" in vars(layer):
            found |= {id(operation): operation for operation in layer.operations}
    return list(found.values())


def global_batch_reason(model: keras.Model) -> str | None:
    """Return why a model must compute on the global batch at once, or None if it can compute by replicas."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            return f"layer {layer.name!r} normalizes over all replicas (synchronized=True)"
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            return f"layer {layer.name!r} keeps a state for each row of the batch (stateful=True)"
    for variable in model.trainable_variables:
        if variable.overwrite_with_gradient:  # Its gradient is a new value, the scale of float8.
            return f"variable {variable.path!r} takes its gradient as its new value (float8)"
    return None


# --- batch normalization -----------------------------------------------------------------------------------------


def unsynchronized_normalizations(model: keras.Model) -> list[str]:
    """Return the names of the BatchNormalization layers that normalize each replica's rows separately."""
    return [layer.name for layer in _normalizations(model) if not layer.synchronized]


@contextlib.contextmanager
def clear_synchronized(model: keras.Model) -> Iterator[None]:
    """Clear ``synchronized`` of all BatchNormalization layers during a trace on the global batch, where it changes nothing."""
    layers = [layer for layer in _normalizations(model) if layer.synchronized]
    with patched(SYNCHRONIZED_FLAG, [(layer, "synchronized", False) for layer in layers]):
        yield


@contextlib.contextmanager
def disable_batch_statistics(model: keras.Model) -> Iterator[list[keras.Layer]]:
    """Make each BatchNormalization use its moving statistics while this context is open, so that it treats each row separately.

    Yields:
        A list to which each layer is added that is called with ``training=True``.
    """
    called: list[keras.Layer] = []

    def around(layer: Any, method: Any) -> Any:
        signature = inspect.signature(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if bound.arguments.get("training"):
                called.append(layer)
            bound.arguments["training"] = False
            return method(*bound.args, **bound.kwargs)

        return call if "training" in signature.parameters else method

    with patched_method(LAYER_CALL, _normalizations(model), around):
        yield called


def _normalizations(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


# --- variables and tensors ---------------------------------------------------------------------------------------


def is_seed(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def lacks_aggregation(model: keras.Model, variable: keras.Variable) -> bool:
    """Return whether a variable of a user's layer does not state how the values of replicas are aggregated.

    Keras's own layers do not state it either; for those that change in a forward pass the mean by rows is right.
    """
    if variable.aggregation in ("mean", "sum", "only_first_replica") or is_seed(variable):
        return False
    owners = [
        layer for layer in model._flatten_layers() if any(variable is own for own in layer._non_trainable_variables)
    ]
    return any(not type(owner).__module__.startswith("keras.") for owner in owners)


def attribute_arrays(model: keras.Model) -> dict[AttributeLeaf, jax.Array]:
    """Return the arrays that a model and its layers hold in attributes, alone or in lists, tuples and dicts."""
    return {
        (layer, name, number): leaf
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if isinstance(value, (jax.Array, list, tuple, dict))
        for number, leaf in enumerate(keras.tree.flatten(value))
        if isinstance(leaf, jax.Array)
    }


def set_attribute_arrays(leaves: list[AttributeLeaf], arrays: list[Any]) -> None:
    """Put arrays into the attributes that :func:`attribute_arrays` found."""
    for (layer, name, number), array in zip(leaves, arrays, strict=True):
        values = keras.tree.flatten(vars(layer)[name])
        values[number] = array
        layer.__dict__[name] = keras.tree.pack_sequence_as(vars(layer)[name], values)


def copy_keras_mask(original: Any, value: jax.Array) -> jax.Array:
    """Attach the mask that Keras has attached to ``original``, if any, to ``value``, and return it."""
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value
