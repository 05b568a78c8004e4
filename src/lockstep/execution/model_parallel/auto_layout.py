"""Choice of the axes along which variables are sharded, from the traced forward pass instead of names or kinds of layers.

Axes that the program uses together are one logical axis (``logical_axes.py``): the hidden units between two matrix multiplications, the
heads of an attention, a vocabulary, experts, channels. Sharding one shards an axis of each variable in it, and needs certain collectives.
Those are chosen that move the fewest bytes for each byte of variables and would not shard an array twice. If two matrix multiplications
follow each other, this gives Megatron's layout (Shoeybi et al., 2019): the first is sharded by columns, the second by rows, and one
all-reduce follows the second.

A large variable stays whole if its collectives would move more than ``MAX_MOVED`` times its bytes in a forward pass, or would gather the
variable itself, which saves no arithmetic.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from lockstep.devices.placement import SHARD_FROM, is_large
from lockstep.execution.model_parallel.axis_rules import read_program
from lockstep.execution.model_parallel.logical_axes import ArrayNode, AxisCollective, AxisKey, LogicalAxes

MAX_MOVED = 16  # bytes that the collectives of a forward pass may move for each byte of the variables that they shard


@dataclass(frozen=True)
class AxisChoice:
    """How one variable is sharded.

    Attributes:
        axis: along which it is sharded; None: it is whole on each device.
        reason: one sentence.
        collectives: what follows in a forward pass, for all variables that are sharded along the same logical axis.
    """

    axis: int | None
    reason: str
    collectives: tuple[str, ...] = ()


def choose_axes(
    program: ClosedJaxpr, variables: Sequence[tuple[str, Any]], row_axes: Sequence[int | None], num_shards: int
) -> list[AxisChoice]:
    """Return for each variable the axis along which it is sharded.

    Args:
        program: the forward pass. Its inputs are the variables, then the arrays of the batch. What it returns may stay sharded.
        variables: path and value (or shape and dtype) of each variable.
        row_axes: the axis of the rows of each array of the batch; None: it has no rows.
        num_shards: number of devices of the mesh axis.
    """
    if num_shards == 1:
        return [AxisChoice(None, "the axis has one device") for _ in variables]
    search = _AxisSearch(read_program(program, num_shards), len(variables), row_axes)
    paths = {array.number: path for array, (path, _) in zip(search.variables, variables, strict=True)}
    chosen = search.best()
    found = {number: one for one in chosen for number in one.axes}
    return [
        _explain_sharded(array, found[array.number], search, paths)
        if array.number in found
        else _explain_whole(array, search, chosen, paths, num_shards)
        for array in search.variables
    ]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Variables that are sharded together.

    Attributes:
        axes: for the number of each variable its axis.
        arrays: for the number of each array that is then sharded its axis.
        collectives: what follows in a forward pass.
        moved: bytes that the collectives and the loss move.
        bytes: size of all its variables.
        large: bytes of each of its large variables.
        is_alone: whether other variables along the same logical axis are not sharded along it.
    """

    axes: dict[int, int]
    arrays: dict[int, int]
    collectives: list[AxisCollective]
    moved: int
    bytes: int
    large: dict[int, int]
    is_alone: bool

    @property
    def sort_key(self) -> tuple[float, bool, int]:
        return self.moved / self.bytes, self.is_alone, min(self.axes)

    @property
    def moved_per_large_byte(self) -> float:
        return self.moved / sum(self.large.values())

    @property
    def is_expensive(self) -> bool:
        return self.moved_per_large_byte > MAX_MOVED


class _AxisSearch:
    """The candidates of a program, and the choice among them."""

    def __init__(self, axes: LogicalAxes, count: int, row_axes: Sequence[int | None]) -> None:
        self.axes = axes
        self.variables = axes.inputs[:count]
        self.large = {array.number: array.bytes for array in self.variables if is_large(array.shape)}
        batch = zip(axes.inputs[count:], row_axes, strict=True)
        self.rows = {axes.group(array, axis) for array, axis in batch if axis is not None}
        found = [*self._candidates_of_logical_axes(), *self._candidates_of_single_variables()]
        self.expensive = [one for one in found if one.is_expensive]
        self.candidates = sorted((one for one in found if not one.is_expensive), key=lambda one: one.sort_key)
        self._conflicts = _conflicts(self.candidates)

    def _candidates_of_logical_axes(self) -> Iterator[_Candidate]:
        """Yield the logical axes that contain an axis of a large variable, gather none, and are not the rows of the batch."""
        groups: dict[AxisKey, dict[int, int]] = defaultdict(dict)
        for array in self.variables:
            for axis, length in enumerate(array.shape):
                if self.axes.is_divisible(length):
                    groups[self.axes.group(array, axis)][array.number] = axis
        loss = self._loss_bytes()
        for key, axes in groups.items():
            large = [array for array in self.variables if array.number in axes and array.number in self.large]
            is_gathered = any(self.axes.is_gathered(array, axes[array.number]) for array in large)
            if large and key not in self.rows and not is_gathered:
                some = large[0], axes[large[0].number]
                arrays, collectives = self.axes.members(*some), self.axes.collectives(*some)
                yield self._candidate(axes, arrays, collectives, loss.get(key, 0))

    def _loss_bytes(self) -> dict[AxisKey, int]:
        """Return the bytes that a loss moves that sums over an axis of a result: an all-reduce of what is left of it."""
        found: dict[AxisKey, int] = defaultdict(int)
        for array in self.axes.results:
            for axis, length in enumerate(array.shape):
                if self.axes.is_divisible(length):
                    found[self.axes.group(array, axis)] += 2 * array.bytes // length
        return found

    def _candidates_of_single_variables(self) -> Iterator[_Candidate]:
        """Yield axes of single variables; the other variables along the same logical axis may be sharded along another one.

        The partitioner continues a sharding through all arrays of a logical axis. So these are only logical axes that need no other
        collective than those for the sums over the variable.
        """
        views = {array.number: self.axes.views(array) for array in self.variables}
        every = set().union(*views.values())
        for array in (one for one in self.variables if one.number in self.large):
            for axis in range(len(array.shape)):
                is_row = self.axes.group(array, axis) in self.rows
                if not is_row and self.axes.is_only_summed(array, axis):
                    others = every - views[array.number]
                    members = self.axes.members(array, axis).items()
                    arrays = {number: its for number, its in members if number not in others}
                    sums = self.axes.sums_over(array, axis)
                    yield self._candidate({array.number: axis}, arrays, sums, 0, is_alone=True)

    def _candidate(
        self,
        axes: dict[int, int],
        arrays: dict[int, int],
        collectives: list[AxisCollective],
        loss: int,
        is_alone: bool = False,
    ) -> _Candidate:
        moved = sum(one.moved for one in collectives) + loss
        size = sum(array.bytes for array in self.variables if array.number in axes)
        large = {number: self.large[number] for number in axes if number in self.large}
        return _Candidate(axes, arrays, collectives, moved, size, large, is_alone)

    def best(self) -> list[_Candidate]:
        """Return candidates without a conflict: the cheapest first, then exchanged if the same variables cost less with others."""
        best, is_better = self._filled([]), True
        while is_better:
            is_better = False
            for number in range(len(self.candidates)):
                if number not in best:
                    kept = [one for one in best if one not in self._conflicts[number]]
                    trial = self._filled([*kept, number])
                    if self._is_cheaper(trial, best):
                        best, is_better = trial, True
        return [self.candidates[number] for number in sorted(best)]

    def _filled(self, chosen: list[int]) -> list[int]:
        """Return a choice with each further candidate that has no conflict, in their order."""
        blocked = set(chosen).union(*(self._conflicts[number] for number in chosen))
        chosen = list(chosen)
        for number in range(len(self.candidates)):
            if number not in blocked:
                chosen.append(number)
                blocked |= {number, *self._conflicts[number]}
        return chosen

    def _is_cheaper(self, one: list[int], other: list[int]) -> bool:
        """Return whether a choice moves fewer bytes than another one, and shards its large variables, too."""
        return self._moved(one) < self._moved(other) and self._large_in(one) >= self._large_in(other)

    def _moved(self, choice: list[int]) -> int:
        return sum(self.candidates[number].moved for number in choice)

    def _large_in(self, choice: list[int]) -> set[int]:
        return {variable for number in choice for variable in self.candidates[number].large}


def _conflicts(candidates: Sequence[_Candidate]) -> list[set[int]]:
    """Return for each candidate those with a variable of it, or with another axis of an array of it."""
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, one in enumerate(candidates):
        for array, axis in one.arrays.items():
            users[array].append((number, axis))
    found: list[set[int]] = []
    for number, one in enumerate(candidates):
        others = {
            other
            for array, axis in one.arrays.items()
            for other, its in users[array]
            if its != axis or array in one.axes
        }
        found.append(others - {number})
    return found


# --- reasons -------------------------------------------------------------------------------------------------------------------


def _explain_sharded(array: ArrayNode, one: _Candidate, search: _AxisSearch, paths: dict[int, str]) -> AxisChoice:
    collectives = tuple(map(str, one.collectives))
    closing = collectives[0] if len(collectives) == 1 else f"{len(collectives) or 'no'} collectives"
    others = [number for number in one.axes if number != array.number]
    others = [number for number in others if number in one.large] or others
    if one.is_alone:
        shared = "alone, by rows"
    elif others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        shared = f"with axis {one.axes[others[0]]} of {paths[others[0]]!r}{more}{_columns_and_rows(one, search)}"
    else:
        shared = "by rows" if search.axes.sums_over(array, one.axes[array.number]) else "by columns"
    return AxisChoice(one.axes[array.number], f"{shared}; {closing}", collectives)


def _columns_and_rows(one: _Candidate, search: _AxisSearch) -> str:
    large = [array for array in search.variables if array.number in one.large]
    kinds = {bool(search.axes.sums_over(array, one.axes[array.number])) for array in large}
    return " (columns, then rows)" if len(kinds) > 1 else ""


def _explain_whole(
    array: ArrayNode, search: _AxisSearch, chosen: Sequence[_Candidate], paths: dict[int, str], num_shards: int
) -> AxisChoice:
    if array.number not in search.large:
        return AxisChoice(None, f"fewer than {SHARD_FROM:,} numbers")
    fitting = [axis for axis, length in enumerate(array.shape) if search.axes.is_divisible(length)]
    if not fitting:
        return AxisChoice(None, f"no axis that {num_shards} divides: {array.shape}")
    reasons = [f"axis {axis} ({array.shape[axis]}) {_why_not(array, axis, search, chosen, paths)}" for axis in fitting]
    odd = dict.fromkeys(length for length in array.shape if length > 1 and not search.axes.is_divisible(length))
    reasons += [f"{num_shards} does not divide {', '.join(map(str, odd))}"] if odd else []
    return AxisChoice(None, "; ".join(reasons))


def _why_not(
    array: ArrayNode, axis: int, search: _AxisSearch, chosen: Sequence[_Candidate], paths: dict[int, str]
) -> str:
    if search.axes.group(array, axis) in search.rows:
        return "is the axis of the rows"
    if search.axes.is_gathered(array, axis):
        return "is used in a way that gathers the variable"
    arrays = search.axes.members(array, axis)
    for one in chosen:
        if any(arrays.get(number, its) != its for number, its in one.arrays.items()):
            first = next(iter(one.large))
            return f"would shard an array a second time, besides axis {one.axes[first]} of {paths[first]!r}"
    costs = [one.moved_per_large_byte for one in search.expensive if one.axes.get(array.number) == axis]
    if costs:
        return f"would move {min(costs):.0f} times the bytes of its variables, more than {MAX_MOVED}"
    large = [one for one in search.variables if one.number in search.large and one.number in arrays]
    gathered = next((one for one in large if search.axes.is_gathered(one, arrays[one.number])), None)
    if gathered is not None:
        return f"is shared with {paths[gathered.number]!r}, which is gathered along it"
    return "is shared with a variable that is sharded alone"
