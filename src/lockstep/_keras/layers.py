"""The seam's second half: what is called within one forward pass of a model, for whoever looks at values on their way.

What is used, seen in Keras 3.15: ``_flatten_layers``; that a layer's and an operation's ``__call__`` looks ``call`` up on the instance, and
that ``train_step`` so looks up ``stateless_call`` and ``compute_loss``; the masks that Keras hangs on tensors.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from lockstep._keras.trainer import get_keras_mask, set_keras_mask

__all__ = [
    "attribute_arrays",
    "copy_keras_mask",
    "disable_batch_statistics",
    "nested_models",
    "operations_of",
    "patched_methods",
    "patched_stateless_call",
    "set_attribute_arrays",
]

Place = tuple[Any, str, int]  # a layer, the name of its attribute, and the number of the leaf in the tree that it holds


def attribute_arrays(model: keras.Model) -> dict[Place, jax.Array]:
    """The arrays that a model and its layers hold in attributes, alone or in lists, tuples and dicts."""
    return {
        (layer, name, number): leaf
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if isinstance(value, (jax.Array, list, tuple, dict))
        for number, leaf in enumerate(keras.tree.flatten(value))
        if isinstance(leaf, jax.Array)
    }


def set_attribute_arrays(places: list[Place], arrays: list[Any]) -> None:
    """Put arrays into attributes that hold others."""
    for (layer, name, number), array in zip(places, arrays, strict=True):
        leaves = keras.tree.flatten(vars(layer)[name])
        leaves[number] = array
        layer.__dict__[name] = keras.tree.pack_sequence_as(vars(layer)[name], leaves)


def nested_models(model: keras.Model) -> list[keras.Model]:
    """The model, and those among its layers at all depths."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def operations_of(model: keras.Model) -> list[Any]:
    """The model, its layers at all depths, and the operations of functional models that are no layers."""
    found = {id(layer): layer for layer in model._flatten_layers()}
    for layer in list(found.values()):
        if isinstance(layer, (keras.Sequential, keras.models.Model)) and "_operations" in vars(layer):
            found |= {id(operation): operation for operation in layer.operations}
    return list(found.values())


@contextlib.contextmanager
def patched_methods(owners: list[Any], name: str, around: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Have the method ``name`` of each owner be ``around(owner, method)`` for a while."""
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        vars(owner)[name] = around(owner, getattr(owner, name))
    try:
        yield
    finally:
        for owner, own in before:
            vars(owner).pop(name, None)
            if own is not None:
                vars(owner)[name] = own


@contextlib.contextmanager
def disable_batch_statistics(model: keras.Model) -> Iterator[list[keras.Layer]]:
    """Have each BatchNormalization use its moving statistics for a while, so that it treats each row by itself.

    Gives a list in which those will be that are called in training.
    """
    asked: list[keras.Layer] = []
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]

    def around(layer: Any, method: Any) -> Any:
        signature = inspect.signature(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("training"):
                asked.append(layer)
            given.arguments["training"] = False
            return method(*given.args, **given.kwargs)

        return call if "training" in signature.parameters else method

    with patched_methods(layers, "call", around):
        yield asked


def copy_keras_mask(original: Any, value: jax.Array) -> jax.Array:
    """``value`` with the mask that Keras has hung on ``original``, if any."""
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value


@contextlib.contextmanager
def patched_stateless_call(model: keras.Model, call: Callable[..., Any]) -> Iterator[None]:
    """Have ``model.stateless_call`` be ``call`` for the length of one trace."""
    before = model.__dict__.pop("stateless_call", None)
    model.__dict__["stateless_call"] = call
    try:
        yield
    finally:
        model.__dict__.pop("stateless_call")
        model.__dict__.update({"stateless_call": before} if before else {})
