"""Numbers and arrays that layers keep in their attributes: what a call has changed, and how they get their values back.

Undocumented parts, as of Keras 3.15: ``_flatten_layers``.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)
_LEAVES = (*_NUMBERS, jax.Array)
AttributeLeaf = tuple[Any, str, int]  # a layer, the name of its attribute, and the number of the leaf in that tree


def attribute_arrays(layer: keras.Layer) -> dict[AttributeLeaf, jax.Array]:
    """Return the arrays that a layer or model and the layers in it hold in attributes, alone or in lists, tuples and dicts."""
    return _attribute_leaves(layer._flatten_layers(), (jax.Array,))


def attribute_numbers(layer: keras.Layer) -> dict[AttributeLeaf, Any]:
    """Return the numbers of Python and NumPy, and NumPy's arrays, that a layer or model and the layers in it hold in attributes."""
    return _attribute_leaves(layer._flatten_layers(), _NUMBERS)


def _attribute_leaves(layers: Iterable[keras.Layer], kinds: tuple[type, ...]) -> dict[AttributeLeaf, Any]:
    return {
        (layer, name, number): leaf
        for layer in layers
        for name, value in vars(layer).items()
        if isinstance(value, (*kinds, list, tuple, dict))
        for number, leaf in enumerate(_leaves(value))
        if isinstance(leaf, kinds)
    }


def _leaves(value: Any) -> list[Any]:
    # Most attributes are no trees, and there are thousands of them.
    return keras.tree.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]


def changed_numbers(before: dict[AttributeLeaf, Any], after: dict[AttributeLeaf, Any]) -> dict[AttributeLeaf, Any]:
    """Return the numbers of ``after`` that ``before`` does not have, or not with this value.

    Layers that were made or built meanwhile are left out: that happens once, and what they hold now stays.
    """
    known = {layer for layer, _, _ in before}
    built = {
        place[0] for place, is_built in after.items() if place[1] == "built" and is_built and not before.get(place)
    }
    kept = {place: value for place, value in after.items() if place[0] in known - built}
    return {place: value for place, value in kept.items() if not is_equal_number(before.get(place), value)}


@contextlib.contextmanager
def attributes_kept(model: keras.Layer) -> Iterator[None]:
    """Undo what calls of a model in a context change in attributes of its layers: numbers and arrays, also where there was None before.

    Layers that are built meanwhile keep theirs: that happens once.
    """
    before = [
        (layer, name, value, _leaves(value), layer.built)
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if value is None or isinstance(value, (*_LEAVES, list, tuple, dict))
    ]
    try:
        yield
    finally:
        for layer, name, value, leaves, was_built in before:
            if layer.built == was_built and name in vars(layer):
                _restore(layer, name, value, leaves)


def _restore(layer: keras.Layer, name: str, value: Any, leaves: list[Any]) -> None:
    """Give an attribute its earlier ``value``, or a tree of the same size its earlier ``leaves``, if it has other numbers or arrays."""
    now = vars(layer)[name]
    found = _leaves(now)
    changed = [isinstance(new, _LEAVES) and new is not old for new, old in zip(found, leaves, strict=False)]
    if not any(changed):
        return
    if isinstance(value, (list, tuple, dict)):
        if len(found) == len(leaves):
            mixed = [old if is_new else new for new, old, is_new in zip(found, leaves, changed, strict=True)]
            layer.__dict__[name] = keras.tree.pack_sequence_as(now, mixed)
    else:
        layer.__dict__[name] = value


def is_equal_number(one: Any, other: Any) -> bool:
    """Return whether two numbers or arrays of NumPy are equal; NaN equals NaN, and other objects only themselves."""
    if one is other or type(one) is not type(other):
        return one is other
    has_nan = np.issubdtype(np.asarray(one).dtype, np.inexact)
    return np.asarray(one).dtype != object and bool(np.array_equal(one, other, equal_nan=has_nan))


def set_attribute_leaves(leaves: list[AttributeLeaf], arrays: list[Any]) -> None:
    """Put arrays, or numbers, into the attributes that :func:`attribute_arrays` or :func:`attribute_numbers` found."""
    for (layer, name, number), array in zip(leaves, arrays, strict=True):
        values = keras.tree.flatten(vars(layer)[name])
        values[number] = array
        layer.__dict__[name] = keras.tree.pack_sequence_as(vars(layer)[name], values)
