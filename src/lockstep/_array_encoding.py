"""Arrays and trees of arrays as JSON and bytes, for messages between processes and for files: the one encoder of this package.

Arrays travel as the little-endian bytes of their numbers, rows first, beside a JSON description of name, dtype, shape and length. A
receiver can check the description before it takes memory. Nothing that is decoded is executed.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_MAX_AXES = 32
_NUMPY_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
ML_DTYPES = (
    *("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int2", "int4", "uint2", "uint4"),
)

DTYPES = {name: np.dtype(name) for name in _NUMPY_DTYPES} | {
    name: np.dtype(vars(ml_dtypes)[name]) for name in ML_DTYPES
}


@dataclass(frozen=True)
class ArraySpec:
    """Name, shape and dtype, such as ``"float32"``, of an array or variable; the name is unique in its message or model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def describe_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Return JSON that describes arrays: for each its name, dtype, shape and number of bytes."""
    return [[name, array.dtype.name, list(array.shape), array.nbytes] for name, array in arrays.items()]


def parse_description(described: Any) -> tuple[ArraySpec, ...]:
    """Return what :func:`describe_arrays` described; ValueError if it describes no arrays."""
    if not isinstance(described, list):
        raise ValueError("it does not say which arrays follow")
    specs = tuple(_parse_array(item) for item in described)
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("two arrays have one name")
    return specs


def _parse_array(described: Any) -> ArraySpec:
    match described:
        case [str(name), str(dtype), list(shape), int(length)] if dtype in DTYPES and len(shape) <= _MAX_AXES:
            if all(type(size) is int and size >= 0 for size in shape):
                spec = ArraySpec(name, tuple(shape), dtype)
                if spec.nbytes == length:
                    return spec
    raise ValueError(f"{str(described)[:80]} describes no array")


def array_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array, little-endian; without a copy if it is contiguous and they are so."""
    return np.ascontiguousarray(_little_endian(array)).reshape(-1).view(np.uint8).data


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def arrays_from_bytes(specs: Iterable[ArraySpec], data: Any) -> dict[str, np.ndarray]:
    """Return the arrays whose bytes follow each other in ``data``, a buffer that they share."""
    found, start = {}, 0
    for spec in specs:
        dtype = DTYPES[spec.dtype]
        found[spec.name] = np.frombuffer(data, dtype, math.prod(spec.shape), start).reshape(spec.shape)
        start += spec.nbytes
    return found


def encode_tree(
    value: Any, name: str, arrays: dict[str, np.ndarray], as_array: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Return a tree as JSON; its arrays are added to ``arrays``.

    Args:
        value: None, a number, a text, an array, or dicts, lists and tuples of such.
        name: begins the names of its arrays.
        arrays: to which they are added.
        as_array: turns leaves of other types into NumPy's arrays, if it knows them.

    Raises:
        TypeError: it holds something else; the message is a phrase such as ``"a set"``.

    Example:
        >>> arrays = {}
        >>> tree = encode_tree({"loss": 0.5, "rows": (np.arange(2), [True, None])}, "value/", arrays)
        >>> decode_tree(tree, arrays)
        {'loss': 0.5, 'rows': (array([0, 1]), [True, None])}
    """
    if type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_check_key(key), encode_tree(each, name, arrays, as_array)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode_tree(each, name, arrays, as_array) for each in value]}
    array = as_array(value)
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f"a {type(value).__name__}")
    if array.dtype.name not in DTYPES:
        raise TypeError(f"an array of {array.dtype}")
    own = f"{name}{len(arrays)}"
    arrays[own] = _little_endian(np.asarray(array))
    return {"number" if isinstance(array, np.generic) else "array": own}


def _check_key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"a dict with the key {key!r}, but only texts and whole numbers can be keys")
    return key


def decode_tree(encoded: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the tree that :func:`encode_tree` encoded; arrays of JAX and variables of Keras become NumPy's."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, inside),) = encoded.items()
    if kind in ("array", "number"):
        return arrays[inside] if kind == "array" else arrays[inside][()]
    if kind == "dict":
        return {key: decode_tree(each, arrays) for key, each in inside}
    found = [decode_tree(each, arrays) for each in inside]
    return tuple(found) if kind == "tuple" else found
