"""Results of scheduled functions as arrays: numbers, texts and arrays in dicts, lists and tuples, and nothing else.

The structure is JSON in an array of bytes, so that it may be as large as arrays may be.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from lockstep._arrays import decode_tree, encode_tree
from lockstep._errors import OptionError

__all__ = ["VALUE", "decode", "encode"]

VALUE = "value/"  # Begins the names of such arrays.


def encode(value: Any, source: str) -> dict[str, np.ndarray]:
    """Return a value as arrays.

    Args:
        value: a number, a text, None, an array, or dicts, lists and tuples of such.
        source: the function that returned it, for errors.

    Raises:
        OptionError: it holds something else.

    Example:
        >>> decode(encode({"loss": 0.5, "rows": (np.arange(2), [True, None])}, "step"))
        {'loss': 0.5, 'rows': (array([0, 1]), [True, None])}
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        text = json.dumps(encode_tree(value, VALUE, arrays, _as_array))
    except TypeError as error:
        raise OptionError(
            f"{source} returned {error}. What a scheduled function returns travels to the chief, so it may be None, numbers, "
            "texts and arrays, in dicts, lists and tuples."
        ) from None
    return {VALUE: np.frombuffer(text.encode(), np.uint8), **arrays}


def decode(arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the value that :func:`encode` was given; arrays of JAX and variables become NumPy's arrays."""
    return decode_tree(json.loads(arrays[VALUE].tobytes()), arrays)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, (jax.Array, keras.Variable)):
        return np.asarray(leaf.value if isinstance(leaf, keras.Variable) else leaf)
    return leaf
