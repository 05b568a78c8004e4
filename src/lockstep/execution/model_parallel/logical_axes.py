"""Logical axes of a traced program: which axes of its arrays are sharded together, and which collectives that needs.

Each equation links the axes of its operands and results that correspond. Linked axes are one logical axis: either all of them are
sharded or none is. Where an equation needs the other entries along an axis, it needs a collective instead: an all-reduce if it
sums over the axis, an all-gather otherwise. An array that is whole on each device becomes a shard without a collective, so only
the way from shards to a whole array costs anything.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn

from lockstep.devices.host_memory import size_text
from lockstep.execution.jaxpr_utils import source_location

AxisKey = tuple[int, int]  # number of an array, and an axis


@dataclass(frozen=True)
class ArrayNode:
    """An array of the program, numbered in program order, and the bytes of the whole array; each call of a function has its own."""

    number: int
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class AxisCollective:
    """A collective that follows if an axis is sharded.

    Attributes:
        kind: "all-reduce" or "all-gather".
        array: number of the array that it makes whole.
        bytes: size of that array.
        count: how often it runs in a forward pass.
        calls: the equation that needs it, after the calls that contain it.
    """

    kind: str
    array: int
    bytes: int
    count: int
    calls: tuple[JaxprEqn, ...]

    @property
    def moved(self) -> int:
        """Bytes that each device sends in a ring of many: an all-reduce is a reduce-scatter and an all-gather."""
        return self.bytes * self.count * (2 if self.kind == "all-reduce" else 1)

    @property
    def place(self) -> str:
        """The layer that needs it, or the line of the user's program, or the operation."""
        found = [source_location(call) for call in self.calls]
        layer = next((layer for layer, _ in found if layer), "")
        line = next((line for _, line in found if line), "")
        layer = layer.partition("->")[0].rpartition("/")[0] if "->" in layer else layer  # an einsum names itself
        return repr(layer) if layer else line or self.calls[-1].primitive.name

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.kind} of {size_text(self.bytes)} in {self.place}{times}"


class _UnionFind:
    """Groups of axes, none of which contains two axes of one array."""

    def __init__(self) -> None:
        self._root: dict[AxisKey, AxisKey] = {}
        self._members: dict[AxisKey, dict[int, int]] = {}

    def find(self, key: AxisKey) -> AxisKey:
        """Return the key that stands for the group of an axis."""
        root = key
        while (above := self._root.get(root, root)) != root:
            root = above
        while key != root:
            self._root[key], key = root, self._root[key]
        return root

    def members(self, key: AxisKey) -> dict[int, int]:
        """Return the arrays of the group of an axis, each with its axis in the group."""
        return self._members.get(self.find(key), {key[0]: key[1]})

    def join(self, one: AxisKey, other: AxisKey) -> bool:
        """Join the groups of two axes; return False if an array would then be in the group with two axes."""
        one, other = self.find(one), self.find(other)
        if one == other:
            return True
        large, small = self.members(one), self.members(other)
        if len(large) < len(small):
            one, other, large, small = other, one, small, large
        if any(large.get(array, axis) != axis for array, axis in small.items()):
            return False
        self._root[other] = one
        self._members[one] = large
        large.update(small)
        self._members.pop(other, None)
        return True


class LogicalAxes:
    """The logical axes of a program, as its reader records them.

    Args:
        num_shards: number of shards; axes that it does not divide are in no logical axis.

    Attributes:
        inputs: the arrays that the program is given.
        results: the arrays that it returns.
        calls: the equation that is being read, after the calls that contain it.
        repeats: how often it runs in a forward pass.
    """

    def __init__(self, num_shards: int) -> None:
        self.inputs: list[ArrayNode] = []
        self.results: list[ArrayNode] = []
        self.calls: tuple[JaxprEqn, ...] = ()
        self.repeats = 1
        self._num_shards = num_shards
        self._arrays = 0
        self._joined = _UnionFind()
        self._views = _UnionFind()
        self._flows: set[AxisKey] = set()  # axes that a result of an operation other than a view continues
        self._collectives: defaultdict[AxisKey, dict[tuple[str, int], AxisCollective]] = defaultdict(dict)

    def new_array(self, aval: Any) -> ArrayNode:
        """Return a new array of the shape and dtype of an abstract value."""
        shape = tuple(getattr(aval, "shape", ()))  # a token has none
        self._arrays += 1
        size = prod(shape) * aval.dtype.itemsize if shape else 0
        return ArrayNode(self._arrays, shape, size)

    def is_divisible(self, size: int) -> bool:
        """Return whether an axis of this length can be sharded."""
        return size > 0 and size % self._num_shards == 0

    def group(self, array: ArrayNode, axis: int) -> AxisKey:
        """Return the key of the logical axis that an axis belongs to."""
        return self._joined.find((array.number, axis))

    def members(self, array: ArrayNode, axis: int) -> dict[int, int]:
        """Return all arrays along the logical axis of an axis, by number, each with its axis."""
        return self._joined.members((array.number, axis))

    def collectives(self, array: ArrayNode, axis: int) -> list[AxisCollective]:
        """Return the collectives of a forward pass if the logical axis of an axis is sharded."""
        return self._collectives_of(self.members(array, axis).items())

    def views(self, array: ArrayNode) -> set[int]:
        """Return the numbers of an array and of those that are it in another type or shape."""
        keys = ((array.number, axis) for axis in range(len(array.shape)))
        return {array.number}.union(*(self._views.members(key) for key in keys))

    def sums_over(self, array: ArrayNode, axis: int) -> list[AxisCollective]:
        """Return the all-reduces of the operations that sum over an axis of an array itself."""
        found = self._collectives_of(self._views.members((array.number, axis)).items())
        return [one for one in found if one.kind == "all-reduce"]

    def is_gathered(self, array: ArrayNode, axis: int) -> bool:
        """Return whether an operation gathers an array itself if an axis of it is sharded."""
        found = self._collectives_of(self._views.members((array.number, axis)).items())
        return any(one.kind == "all-gather" for one in found)

    def is_only_summed(self, array: ArrayNode, axis: int) -> bool:
        """Return whether each use of an array sums over an axis, and nothing else along its logical axis needs a collective."""
        views, needed = self._views.members((array.number, axis)), self.collectives(array, axis)
        is_used = bool(needed) and self._flows.isdisjoint(views.items())
        return is_used and self.sums_over(array, axis) == needed

    def _collectives_of(self, keys: Iterable[AxisKey]) -> list[AxisCollective]:
        found: dict[tuple[str, int], AxisCollective] = {}
        for key in keys:
            found.update(self._collectives.get(key, {}))
        return sorted(found.values(), key=lambda one: one.array)

    # --- what the rules record ----------------------------------------------------------------------------------------

    def link(
        self, one: ArrayNode | None, axis: int, other: ArrayNode | None, other_axis: int, is_view: bool = False
    ) -> None:
        """Link an axis of an operand with one of a result, or gather the operand if they cannot be sharded together."""
        if one is None or other is None or not self.is_divisible(one.shape[axis]):
            return
        key, target = (one.number, axis), (other.number, other_axis)
        if not self.is_divisible(other.shape[other_axis]) or not self._joined.join(key, target):
            self.need("all-gather", one, axis, one)
        elif is_view:
            self._views.join(key, target)
        else:
            self._flows.add(key)

    def link_operands(self, one: ArrayNode | None, axis: int, other: ArrayNode | None, other_axis: int) -> None:
        """Link axes of two operands that an operation sums over together."""
        if one is None or other is None or not self.is_divisible(one.shape[axis]):
            return
        if not self._joined.join((one.number, axis), (other.number, other_axis)):
            self.need("all-gather", other, other_axis, other)

    def need(self, kind: str, one: ArrayNode | None, axis: int, whole: ArrayNode) -> None:
        """Record that a collective makes an array whole if an axis of another one, or of its own, is sharded."""
        if one is not None and self.is_divisible(one.shape[axis]):
            collective = AxisCollective(kind, whole.number, whole.bytes, self.repeats, self.calls)
            self._collectives[one.number, axis].setdefault((kind, whole.number), collective)
