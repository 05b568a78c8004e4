"""What steps change besides the trained variables, as differences that workers find and the chief adds up.

A metric counts, and a moving average moves by a share of the way to the batch: what two workers have done at the same time is the sum
of both, whoever was first. What draws random numbers is told where to begin by the number of its batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.execution.call_splitter import output_merge
from lockstep.execution.replica import OutputMerge

__all__ = ["DeltaAccumulator", "difference", "differences", "is_sum", "merges"]

_METRIC, _OTHER, _NEW = "metric/", "other/", "new/"

Arrays = Mapping[str, np.ndarray]


def merges(model: keras.Model) -> list[OutputMerge]:
    """How the values of each variable that is not trained meet."""
    return [output_merge(variable) for variable in model.non_trainable_variables]


def difference(new: np.ndarray, old: np.ndarray) -> np.ndarray | None:
    """What must be added to the old value; None where nothing has changed, or nothing can be added."""
    if new.dtype == bool or new.tobytes() == old.tobytes():
        return None
    return np.subtract(new, old, dtype=new.dtype)


def differences(
    others: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    metrics: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    no_sums: frozenset[int],
) -> dict[str, np.ndarray]:
    """What a step has changed, as it travels to the chief.

    Args:
        others: of the variables that are not trained, the values after and before the step.
        metrics: likewise those of the metrics' variables.
        no_sums: numbers of those metrics' variables that do not add up.
    """
    found: dict[str, np.ndarray] = {}
    for number, (new, old) in enumerate(zip(*others, strict=True)):
        changed = difference(new, old)
        if changed is not None:
            found[f"{_OTHER}{number}"] = changed
        elif new.tobytes() != old.tobytes():
            found[f"{_NEW}{number}"] = new
    for number, (new, old) in enumerate(zip(*metrics, strict=True)):
        changed = new if number in no_sums else difference(new, old)
        if changed is not None:
            found[f"{_METRIC}{number}"] = changed
    return found


def is_sum(first: np.ndarray, start: np.ndarray, second: np.ndarray) -> bool:
    """Whether a metric's variable counts: the same step adds the same, wherever it begins.

    Args:
        first: the value after a step from ``start``.
        start: the value before.
        second: the value after the same step from ``first``.
    """
    if first.dtype == bool:
        return first.tobytes() == start.tobytes()
    return np.allclose(
        second.astype("float64") - first, first.astype("float64") - start, rtol=1e-3, atol=1e-5, equal_nan=True
    )


class DeltaAccumulator:
    """The chief's values of what is not trained and of the metrics.

    Args:
        model: is built.

    Attributes:
        others: of the variables that are not trained.
        metrics: of the metrics' variables.
        changing: numbers of those of the first that have ever changed, and are no seeds.
    """

    def __init__(self, model: keras.Model) -> None:
        self._merges = merges(model)
        self.others: list[np.ndarray] = []
        self.metrics: list[np.ndarray] = []
        self.changing: set[int] = set()

    def set(self, others: Sequence[Any], metrics: Sequence[Any]) -> None:
        """Go on from other values."""
        self.others, self.metrics = [np.asarray(x) for x in others], [np.asarray(x) for x in metrics]

    def add(self, parts: Sequence[Arrays], weights: Sequence[float], no_sums: frozenset[int]) -> None:
        """Add what the parts of one batch have changed, in their order.

        Args:
            parts: of each, what :func:`differences` gave.
            weights: numbers of rows.
            no_sums: numbers of the metrics' variables that do not add up: the last value is the one that stays.
        """
        for number, value in enumerate(self.metrics):
            found = [part[f"{_METRIC}{number}"] for part in parts if f"{_METRIC}{number}" in part]
            if found:
                self.metrics[number] = found[-1] if number in no_sums else _sum([value, *found])
        for number, value in enumerate(self.others):
            key = f"{_OTHER}{number}"
            if any(key in part for part in parts):
                own = [part.get(key, np.zeros_like(value)) for part in parts]
                self.others[number] = _sum([value, _met(own, weights, self._merges[number])])
            elif f"{_NEW}{number}" in parts[0]:
                self.others[number] = parts[0][f"{_NEW}{number}"]
            else:
                continue
            if self._merges[number] is not OutputMerge.SEED:
                self.changing.add(number)

    def newest(self) -> dict[str, np.ndarray]:
        """What a worker needs with a piece of work: the values that change."""
        return {f"{_OTHER}{number}": self.others[number] for number in sorted(self.changing)}

    @staticmethod
    def taken_over(others: Sequence[np.ndarray], newest: Arrays) -> list[np.ndarray]:
        """A worker's values with those of :meth:`newest` in their places."""
        return [newest.get(f"{_OTHER}{number}", value) for number, value in enumerate(others)]


def _met(found: Sequence[np.ndarray], weights: Sequence[float], merge: OutputMerge) -> np.ndarray:
    """One change out of those of all parts, as on the replicas of one process."""
    if merge is OutputMerge.SUM:
        return _sum(found)
    if merge is not OutputMerge.MEAN or len(found) == 1:
        return found[0]
    wide = np.promote_types(found[0].dtype, np.float32)
    total = _sum([one.astype(wide) * wide.type(weight) for one, weight in zip(found, weights, strict=True)])
    return (total / wide.type(sum(weights))).astype(found[0].dtype)


def _sum(values: Sequence[np.ndarray]) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = np.add(total, value, dtype=total.dtype)
    return total
