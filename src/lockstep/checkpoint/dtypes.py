"""Which kinds of numbers a checkpoint holds, under which names, and as which bytes: little-endian, whatever they were.

NumPy's files know nothing of bfloat16 and its like. Those are stored as the integers of their bits; the manifest has their name.
"""

import ml_dtypes
import numpy as np

__all__ = ["DTYPES", "in_file", "widened"]

_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_BITS = (
    *("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int2", "int4", "uint2", "uint4"),
)

DTYPES = {name: np.dtype(name) for name in _PLAIN} | {name: np.dtype(vars(ml_dtypes)[name]) for name in _BITS}


def in_file(name: str) -> np.dtype:
    """What NumPy finds in the file for numbers of this name.

    Example:
        >>> in_file("float32"), in_file("bfloat16")
        (dtype('float32'), dtype('uint16'))
    """
    dtype = DTYPES[name]
    return np.dtype(f"<u{dtype.itemsize}" if name in _BITS else f"<{dtype.str[1:]}")


def widened(array: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype that every NumPy knows.

    Example:
        >>> widened(np.ones(2, DTYPES["bfloat16"])), widened(np.ones(2))
        (array([1., 1.], dtype=float32), array([1., 1.]))
    """
    name = array.dtype.name
    if name not in _BITS:
        return array
    return array.astype(name.rstrip("0123456789") + "8" if "int" in name else "float32")
