"""What a scheduled function has returned, as it travels: numbers, texts and arrays in dicts, lists and tuples, and nothing else.

The structure is JSON in an array of bytes, so that it may be as large as arrays may be.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep.checkpoint.snapshot import DTYPES

__all__ = ["VALUE", "decoded", "encoded"]

VALUE = "value/"  # Names of such arrays begin so.


def encoded(value: Any, whose: str) -> dict[str, np.ndarray]:
    """A value as arrays.

    Args:
        value: a number, a text, None, an array, or dicts, lists and tuples of such.
        whose: it is, for errors.

    Raises:
        OptionError: it is something else.

    Example:
        >>> decoded(encoded({"loss": 0.5, "rows": (np.arange(2), [True, None])}, "step"))
        {'loss': 0.5, 'rows': (array([0, 1]), [True, None])}
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_described(value, arrays, whose))
    return {VALUE: np.frombuffer(text.encode(), np.uint8), **arrays}


def decoded(arrays: Mapping[str, np.ndarray]) -> Any:
    """What :func:`encoded` was given; arrays of JAX are NumPy's."""
    return _restored(json.loads(arrays[VALUE].tobytes()), arrays)


def _described(value: Any, arrays: dict[str, np.ndarray], whose: str) -> Any:
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case dict():
            return {"dict": [[_key(key, whose), _described(each, arrays, whose)] for key, each in value.items()]}
        case list() | tuple() if type(value) in (list, tuple):
            return {type(value).__name__: [_described(each, arrays, whose) for each in value]}
        case np.ndarray() | np.generic() | jax.Array() | keras.Variable():
            array = np.asarray(value.value if isinstance(value, keras.Variable) else value)
            if array.dtype.name in DTYPES:
                name = f"{VALUE}{len(arrays)}"
                arrays[name] = array
                return {"number" if isinstance(value, np.generic) else "array": name}
    raise OptionError(
        f"{whose} returned {_kind_of(value)}. What a scheduled function returns travels to the chief, so it may be None, numbers, "
        "texts and arrays, in dicts, lists and tuples."
    )


def _key(key: Any, whose: str) -> str | int:
    if type(key) in (str, int):
        return key
    raise OptionError(f"{whose} returned a dict with the key {key!r}: only texts and whole numbers can be keys there.")


def _kind_of(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _restored(described: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, inside),) = described.items()
    if kind in ("array", "number"):
        return arrays[inside] if kind == "array" else arrays[inside][()]
    if kind == "dict":
        return {key: _restored(each, arrays) for key, each in inside}
    found = [_restored(each, arrays) for each in inside]
    return tuple(found) if kind == "tuple" else found
