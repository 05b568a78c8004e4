"""What is saved of a run at one step: arrays by name, and facts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep._errors import OptionError
from lockstep.checkpoint.dtypes import DTYPES

__all__ = ["Snapshot", "check_name"]

_LONGEST_NAME = 65_000  # bytes; a zip file has two for the length.


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a run at one step.

    Args:
        arrays: by name, of any shape and of a dtype in :data:`lockstep.checkpoint.dtypes.DTYPES`. They are not copied: who
            changes one in place before it is written changes what is written.
        facts: the rest, of JSON, NaN and infinity included: None, bool, int, float, str, lists of these, and dicts of these by
            str. They are copied. What JSON would give back as something else (a tuple, a key that is a number) is refused.

    Raises:
        OptionError: a name, an array or a fact cannot be stored.

    Example:
        >>> snapshot = Snapshot({"dense/kernel": np.ones((2, 3), np.float32)}, {"epoch": 1, "loss": float("inf")})
        >>> snapshot.nbytes
        24
    """

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.arrays:
            check_name(name)
        object.__setattr__(self, "arrays", {name: _array(name, value) for name, value in self.arrays.items()})
        facts = dict(self.facts)
        _check_fact("facts", facts)
        object.__setattr__(self, "facts", json.loads(json.dumps(facts)))

    @property
    def nbytes(self) -> int:
        """What the arrays take, in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of an array."""
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
            "Text and the like belong to the facts."
        )
    return array


def _check_fact(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise OptionError(f"Snapshot: {where}: expected keys of type str, got {key!r}.")
            _check_fact(f"{where}[{key!r}]", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_fact(f"{where}[{number}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise OptionError(
            f"Snapshot: {where}: expected None, bool, int, float, str, list or dict, as JSON has them, got {value!r} "
            f"({type(value).__name__}). Numbers of NumPy belong to the arrays."
        )
