"""Where values that should be equal on all workers differ, as sentences; arithmetic only."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.cluster.waiting import listed

__all__ = ["disagreement", "first_difference"]

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


def disagreement(topic: str, values: Sequence[Any], names: Sequence[str]) -> str | None:
    """One sentence about who differs from the others in what; None where all values are equal.

    The others are the most; where no value has a majority, the chief's is taken for right.

    Args:
        topic: what the values are of.
        values: of all workers, in order.
        names: of all workers, in order.
    """
    texts = [_text(value) for value in values]
    most, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return None
    usual = texts.index(most) if 2 * count > len(texts) else 0
    different = [worker for worker, text in enumerate(texts) if text != texts[usual]]
    path, here, there = first_difference(values[different[0]], values[usual]) or ("", "", "")
    who = f"{listed(names[worker] for worker in different)} differ{'' if different[1:] else 's'}"
    others = "the others have" if 2 * count > len(texts) else f"{names[usual]} has"
    place = f" in {path!r}" if path else ""
    here = f"{names[different[0]]} has {here}" if different[1:] else f"it has {here}"
    return f"The workers do not agree on {topic!r}: {who}{place}: {here}, {others} {there}."


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return _short(_text(values[key])) if key in values else _ABSENT


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
