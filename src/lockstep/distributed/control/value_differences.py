"""What differs between values that should be equal on all workers, and how a message shows it."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep._errors import shortened
from lockstep._logging import listed

_ABSENT = "nothing"


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, str, str] | None:
    """Return the path at which two values of JSON first differ, and what both have there; None if they are equal.

    Their JSON texts are compared: NaN equals NaN, and 1 differs from 1.0 and from true.

    Example:
        >>> first_difference({"jax": "0.10.2", "options": {"rows": 64}}, {"jax": "0.10.2", "options": {"rows": 32}})
        ('options.rows', '64', '32')
    """
    if _text(left) == _text(right):
        return None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            inner = f"{path}.{key}" if path else str(key)
            if key not in left or key not in right:
                return inner, _shown(left, key), _shown(right, key)
            if found := first_difference(left[key], right[key], inner):
                return found
    return path, shortened(_text(left)), shortened(_text(right))


@dataclass(frozen=True)
class Disagreement:
    """The workers whose value differs.

    Args:
        different: those workers, at least one.
        usual: a worker with the value of the majority; if there is none, the chief.
        is_majority: whether there is a majority.
    """

    different: tuple[int, ...]
    usual: int
    is_majority: bool

    @property
    def pair(self) -> tuple[int, int]:
        """Two workers whose values differ."""
        return self.different[0], self.usual

    def sentence(self, topic: str, values: Sequence[Any], names: Sequence[str]) -> str:
        """Describe the difference in ``topic`` between the workers of :attr:`pair` for the user; only their values and names are used."""
        odd, usual = self.pair
        path, here, there = first_difference(values[odd], values[usual]) or ("", "", "")
        several = len(self.different) > 1
        who = f"{listed(names[worker] for worker in self.different)} differ{'' if several else 's'}"
        place = f" in {path!r}" if path else ""
        here = f"{names[odd]} has {here}" if several else f"it has {here}"
        others = "the others have" if self.is_majority else f"{names[usual]} has"
        return f"The workers do not agree on {topic!r}: {who}{place}: {here}, {others} {there}."


def find_disagreement(values: Sequence[Any]) -> Disagreement | None:
    """Return which workers differ, given the values of all in order; None if all have equal values.

    Example:
        >>> from lockstep.distributed.control.value_differences import find_disagreement
        >>> find_disagreement([1, 2, 1, 1])
        Disagreement(different=(1,), usual=0, is_majority=True)
    """
    texts = [_text(value) for value in values]
    most, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return None
    is_majority = 2 * count > len(texts)
    usual = texts.index(most) if is_majority else 0
    return Disagreement(tuple(n for n, text in enumerate(texts) if text != texts[usual]), usual, is_majority)


def digest(value: Any) -> str:
    """Return a hash of a value of JSON."""
    return hashlib.blake2b(_text(value).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return shortened(_text(values[key])) if key in values else _ABSENT
