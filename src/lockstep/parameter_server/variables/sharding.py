"""Which server holds which rows of which variable, and how a whole value becomes shards and back."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._errors import OptionError

__all__ = ["Shard", "ShardingPlan", "VariableSpec", "cut", "plan", "whole_name"]

PartitionFunction = Callable[[Sequence[int], str], Sequence[int]]


VariableSpec = ArraySpec  # A variable, or what one server holds of it, without its value.


@dataclass(frozen=True)
class Shard:
    """Rows of a variable that one server holds.

    Args:
        variable: which.
        begin: the first row.
        end: the row after the last.
        server: number of the server.
        is_whole: whether this is all of the variable, which may have no rows then: a number.
    """

    variable: VariableSpec
    begin: int
    end: int
    server: int
    is_whole: bool

    @property
    def spec(self) -> VariableSpec:
        """What the server holds."""
        if self.is_whole:
            return self.variable
        shape = (self.end - self.begin, *self.variable.shape[1:])
        return VariableSpec(f"{self.variable.name}[{self.begin}:{self.end}]", shape, self.variable.dtype)

    def of(self, value: np.ndarray) -> np.ndarray:
        """This shard of the variable's value; a view."""
        return value if self.is_whole else value[self.begin : self.end]

    def are_here(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows of the variable are in this shard, as a mask."""
        return (rows >= self.begin) & (rows < self.end)

    def rows_here(self, rows: np.ndarray) -> np.ndarray:
        """The rows of the variable that are in this shard, as the shard counts them."""
        return rows if self.is_whole else rows[self.are_here(rows)] - self.begin


@dataclass(frozen=True)
class ShardingPlan:
    """Where all variables are.

    Args:
        variables: in the order in which they were made.
        shards: of each variable by name, in the order of their rows.
        servers: number of servers.
    """

    variables: tuple[VariableSpec, ...]
    shards: Mapping[str, tuple[Shard, ...]]
    servers: int

    def at(self, server: int) -> tuple[Shard, ...]:
        """The shards that one server holds, in the order of the variables."""
        return tuple(shard for shards in self.shards.values() for shard in shards if shard.server == server)

    def specs_at(self, server: int) -> tuple[VariableSpec, ...]:
        """What one server holds."""
        return tuple(shard.spec for shard in self.at(server))

    def identity_of(self, server: int) -> dict[str, Any]:
        """What a worker and a server must have in common: the variables, and which of the servers it is."""
        said = repr((self.variables, self.shards)).encode()
        return {"number": server, "of": self.servers, "variables": hashlib.sha256(said).hexdigest()[:16]}

    def split(self, values: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """For each server the values of its shards, by name."""
        return [
            {shard.spec.name: shard.of(values[shard.variable.name]) for shard in self.at(n)}
            for n in range(self.servers)
        ]


def plan(variables: Iterable[VariableSpec], servers: int, partitioner: PartitionFunction | None = None) -> ShardingPlan:
    """Give each variable to servers, one shard after the other to one server after the other, as ``tf.distribute`` does.

    Args:
        variables: in the order in which they were made.
        servers: number of servers.
        partitioner: into how many shards a variable is cut; None: none is.

    Raises:
        OptionError: the partitioner cuts along another axis than the first, or two variables have one name.

    Example:
        >>> from lockstep.parameter_server.variables.size_partitioners import FixedShardsPartitioner
        >>> from lockstep.parameter_server.variables.sharding import VariableSpec, plan
        >>> table = VariableSpec("table", (5, 2), "float32")
        >>> [shard.spec.shape for shard in plan([table], 2, FixedShardsPartitioner(2)).shards["table"]]
        [(3, 2), (2, 2)]
    """
    variables = tuple(variables)
    turn = itertools.cycle(range(servers))
    shards: dict[str, tuple[Shard, ...]] = {}
    for variable in variables:
        if variable.name in shards:
            raise OptionError(f"Two variables have the name {variable.name!r}: give one of their layers another one.")
        shards[variable.name] = tuple(_shards(variable, _count(variable, partitioner), turn))
    return ShardingPlan(variables, shards, servers)


def whole_name(spec: VariableSpec) -> str:
    """The name of the variable that this is, or of which it is a shard.

    Example:
        >>> whole_name(VariableSpec("net/table[3:5]", (2, 4), "float32"))
        'net/table'
    """
    return re.sub(r"\[\d+:\d+\]$", "", spec.name)


def cut(rows: int, count: int) -> list[int]:
    """The bounds of ``count`` shards of ``rows`` rows: the first ``rows % count`` have one row more.

    Example:
        >>> cut(8, 3)
        [0, 3, 6, 8]
    """
    base, extra = divmod(rows, count)
    return [number * base + min(number, extra) for number in range(count + 1)]


def _shards(variable: VariableSpec, count: int, turn: Iterable[int]) -> Iterable[Shard]:
    bounds = cut(variable.shape[0], count) if variable.shape else [0, 0]
    for (begin, end), server in zip(itertools.pairwise(bounds), turn, strict=False):
        yield Shard(variable, begin, end, server, is_whole=count == 1)


def _count(variable: VariableSpec, partitioner: PartitionFunction | None) -> int:
    if partitioner is None or not variable.shape:
        return 1
    given = partitioner(variable.shape, variable.dtype)
    partitions = list(given) if isinstance(given, Iterable) else []
    if len(partitions) != len(variable.shape) or partitions[0] < 1 or any(count != 1 for count in partitions[1:]):
        raise OptionError(
            f"variable_partitioner: {variable.name} of shape {variable.shape}: expected {len(variable.shape)} numbers, the first of at "
            f"least 1 and all others 1, as only the first axis can be cut; got {given!r}."
        )
    return max(1, min(partitions[0], variable.shape[0]))
