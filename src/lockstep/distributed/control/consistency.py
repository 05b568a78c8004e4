"""Where values that should be equal on all workers differ, as sentences; arithmetic only."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.distributed.control.wait_logger import listed

__all__ = ["Disagreement", "digest", "first_difference", "split"]

_ABSENT = "nothing"
_LONGEST = 200  # Characters of a value in a sentence.


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, str, str] | None:
    """Where two values of JSON differ first, and what stands there on both sides; None where they are equal.

    NaN equals NaN, and 1 differs from 1.0 and from true: the text of both decides.

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
    return path, _short(_text(left)), _short(_text(right))


@dataclass(frozen=True)
class Disagreement:
    """Who differs from whom.

    Args:
        different: workers, at least one.
        usual: one that has what the most have; where no value has a majority, the chief.
        is_majority: whether it has one.
    """

    different: tuple[int, ...]
    usual: int
    is_majority: bool

    @property
    def pair(self) -> tuple[int, int]:
        """Two workers that differ."""
        return self.different[0], self.usual

    def sentence(self, topic: str, values: Sequence[Any], names: Sequence[str]) -> str:
        """What the workers of :attr:`pair` have, for the user.

        Args:
            topic: what the values are of.
            values: by worker; only those of the pair are looked at.
            names: by worker.
        """
        odd, usual = self.pair
        path, here, there = first_difference(values[odd], values[usual]) or ("", "", "")
        several = len(self.different) > 1
        who = f"{listed(names[worker] for worker in self.different)} differ{'' if several else 's'}"
        place = f" in {path!r}" if path else ""
        here = f"{names[odd]} has {here}" if several else f"it has {here}"
        others = "the others have" if self.is_majority else f"{names[usual]} has"
        return f"The workers do not agree on {topic!r}: {who}{place}: {here}, {others} {there}."


def split(values: Sequence[Any]) -> Disagreement | None:
    """Who differs; None where all workers have equal values.

    Args:
        values: of all workers, in order.

    Example:
        >>> from lockstep.distributed.control.consistency import split
        >>> split([1, 2, 1, 1])
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
    """A short text that stands for a value of JSON."""
    return hashlib.blake2b(_text(value).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return _short(_text(values[key])) if key in values else _ABSENT


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
