"""Attributes of callbacks as facts and arrays, and back: what is neither is left alone.

Functions of ``keras.ops`` are kept by their names, because callbacks that monitor a metric have one, and where they find it for
themselves they change their other attributes, too.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
import keras
import numpy as np

from lockstep.checkpoint.dtypes import DTYPES

__all__ = ["packed_attributes", "unpacked_attributes"]

_LEFT_OUT = ("model", "_model", "params", "validation_data")


class _NoValueError(Exception):
    """Something that is neither numbers, text nor arrays."""


def packed_attributes(
    owner: Any, name: str, arrays: dict[str, np.ndarray] | None, begun_with: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The attributes of an object that are values, as JSON.

    Args:
        owner: a callback.
        name: begins the names of its arrays.
        arrays: to which its arrays are added; None: attributes with arrays are left out.
        begun_with: what this gave before; what has not changed since is left out, so that another run may choose it anew.
    """
    found = {}
    for attribute, value in vars(owner).items():
        own: dict[str, np.ndarray] = {}
        if attribute in _LEFT_OUT:
            continue
        try:
            packed = _packed(value, f"{name}/{attribute}", own)
        except _NoValueError:
            continue
        if own and arrays is not None:
            arrays |= own
        elif own or (begun_with is not None and attribute in begun_with and begun_with[attribute] == packed):
            continue
        found[attribute] = packed
    return found


def unpacked_attributes(
    owner: Any, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], begun_with: Mapping[str, Any] | None = None
) -> None:
    """Set the attributes that :func:`packed_attributes` gave.

    Args:
        owner: a callback.
        facts: what was given.
        arrays: by name.
        begun_with: what stands for values that are absent, as they had not changed; an epoch that is begun anew may have changed them.
    """
    now = packed_attributes(owner, "", None)
    unchanged = {attribute: fact for attribute, fact in (begun_with or {}).items() if attribute in now}
    for attribute, fact in (unchanged | dict(facts)).items():
        vars(owner)[attribute] = _unpacked(fact, arrays)


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value) in (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise _NoValueError
        arrays[name] = array.copy()
        return {"array": name, "scalar": isinstance(value, np.generic)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, f"{name}/{n}", arrays) for n, item in enumerate(value)]}
    if type(value) is dict:
        pairs = enumerate(value.items())  # Numbers make the names, as keys may look alike: 1 and "1".
        return {
            "dict": [[_packed(key, name, arrays), _packed(item, f"{name}/{n}", arrays)] for n, (key, item) in pairs]
        }
    if isinstance(value, FunctionType) and vars(keras.ops).get(value.__name__) is value:
        return {"keras.ops": value.__name__}
    raise _NoValueError


def _unpacked(fact: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(fact, dict):
        return fact
    if "array" in fact:
        array = arrays[fact["array"]]
        return array[()] if fact["scalar"] else array.copy()
    if "dict" in fact:
        return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in fact["dict"]}
    if "keras.ops" in fact:
        return vars(keras.ops)[fact["keras.ops"]]
    ((kind, packed),) = fact.items()
    items = [_unpacked(item, arrays) for item in packed]
    return tuple(items) if kind == "tuple" else items
