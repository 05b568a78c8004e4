"""The state of a run at one step, as a checkpoint holds it: arrays by name, and metadata.

Arrays are stored little-endian. NumPy's files do not know bfloat16 and similar dtypes: those are stored as integers with the same bits,
and the manifest has the name of the dtype.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep._arrays import DTYPES, ML_DTYPES
from lockstep._errors import OptionError

__all__ = ["Snapshot", "check_name", "in_file", "widened"]

_LONGEST_NAME = 65_000  # bytes; a zip file stores the length in two bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a run at one step.

    Args:
        arrays: by name, of any shape and of a dtype in :data:`lockstep._arrays.DTYPES`. They are not copied: a change in
            place before the write changes what is written.
        metadata: values of JSON, NaN and infinity included: None, bool, int, float, str, lists of these, and dicts of these by
            str. They are copied. A value that JSON would change (a tuple, a key that is a number) is refused.

    Raises:
        OptionError: a name, an array or a value of the metadata cannot be stored.

    Example:
        >>> snapshot = Snapshot({"dense/kernel": np.ones((2, 3), np.float32)}, {"epoch": 1, "loss": float("inf")})
        >>> snapshot.nbytes
        24
    """

    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.arrays:
            check_name(name)
        object.__setattr__(self, "arrays", {name: _array(name, value) for name, value in self.arrays.items()})
        metadata = dict(self.metadata)
        _check_json("metadata", metadata)
        object.__setattr__(self, "metadata", json.loads(json.dumps(metadata)))

    @property
    def nbytes(self) -> int:
        """Size of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


def check_name(name: Any) -> None:
    """Raise OptionError if this cannot be the name of an array."""
    if not isinstance(name, str) or "\0" in name:
        raise OptionError(f"Snapshot: arrays: expected names of type str without NUL, got {name!r}.")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise OptionError(f"Snapshot: arrays: the name {name!r} is no Unicode text: {error}.") from None
    if length > _LONGEST_NAME:
        raise OptionError(
            f"Snapshot: arrays: a name of {length} bytes, at most {_LONGEST_NAME} are possible: {name[:60]}…"
        )


def _array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise OptionError(
            f"Snapshot: arrays[{name!r}] cannot be stored: its dtype is {array.dtype}, expected one of {', '.join(DTYPES)}. "
            "Fix: put text and the like into the metadata."
        )
    return array


def _check_json(path: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise OptionError(f"Snapshot: {path}: expected keys of type str, got {key!r}.")
            _check_json(f"{path}[{key!r}]", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_json(f"{path}[{number}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise OptionError(
            f"Snapshot: {path}: expected None, bool, int, float, str, list or dict, as JSON has them, got {value!r} "
            f"({type(value).__name__}). Fix: put numbers of NumPy into the arrays."
        )


def in_file(name: str) -> np.dtype:
    """Return the dtype in the file for a dtype of this name.

    Example:
        >>> in_file("float32"), in_file("bfloat16")
        (dtype('float32'), dtype('uint16'))
    """
    dtype = DTYPES[name]
    return np.dtype(f"<u{dtype.itemsize}" if name in ML_DTYPES else f"<{dtype.str[1:]}")


def widened(array: np.ndarray) -> np.ndarray:
    """Return the same numbers in a dtype that every NumPy knows.

    Example:
        >>> widened(np.ones(2, DTYPES["bfloat16"])), widened(np.ones(2))
        (array([1., 1.], dtype=float32), array([1., 1.]))
    """
    name = array.dtype.name
    if name not in ML_DTYPES:
        return array
    return array.astype(name.rstrip("0123456789") + "8" if "int" in name else "float32")
