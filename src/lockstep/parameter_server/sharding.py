"""Sharding plan: which server holds which rows of which variable, and the partitioners that choose the number of shards.

A partitioner is any function ``(shape, dtype) -> [shards along each axis]``; only the first axis may be cut. The classes here are those of
``tf.distribute.experimental.partitioners``.
"""

import abc
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._errors import OptionError, whole_number

PartitionFunction = Callable[[Sequence[int], str], Sequence[int]]


@dataclass(frozen=True)
class Shard:
    """Rows of a variable that one server holds.

    Args:
        variable: the whole variable.
        begin: the first row.
        end: the row after the last.
        server: number of the server.
        is_whole: whether the shard is the whole variable, which may then be a scalar without rows.
    """

    variable: ArraySpec
    begin: int
    end: int
    server: int
    is_whole: bool

    @property
    def spec(self) -> ArraySpec:
        """Name, shape and dtype of the shard."""
        if self.is_whole:
            return self.variable
        shape = (self.end - self.begin, *self.variable.shape[1:])
        return ArraySpec(f"{self.variable.name}[{self.begin}:{self.end}]", shape, self.variable.dtype)

    def slice(self, value: np.ndarray) -> np.ndarray:
        """Return a view of the shard's rows of the variable's value."""
        return value if self.is_whole else value[self.begin : self.end]

    def mask(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask of those row numbers of the variable that are in this shard."""
        return (rows >= self.begin) & (rows < self.end)

    def local_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return those of the variable's row numbers that are in this shard, counted from its first row."""
        return rows if self.is_whole else rows[self.mask(rows)] - self.begin


@dataclass(frozen=True)
class ShardingPlan:
    """Assignment of all variables to servers.

    Args:
        variables: in the order in which they were made.
        shards: shards of each variable by name, in the order of their rows.
        servers: number of servers.
    """

    variables: tuple[ArraySpec, ...]
    shards: Mapping[str, tuple[Shard, ...]]
    servers: int

    def shards_at(self, server: int) -> tuple[Shard, ...]:
        """Return the shards that one server holds, in the order of the variables."""
        return tuple(shard for shards in self.shards.values() for shard in shards if shard.server == server)

    def specs_at(self, server: int) -> tuple[ArraySpec, ...]:
        """Return the specs of the shards that one server holds."""
        return tuple(shard.spec for shard in self.shards_at(server))

    def identity_of(self, server: int) -> dict[str, int | str]:
        """Return what a worker and a server must have in common: a digest of the plan, and the number of the server."""
        digest = hashlib.sha256(repr((self.variables, self.shards)).encode()).hexdigest()[:16]
        return {"number": server, "of": self.servers, "digest of names and shapes of variables": digest}

    def split(self, values: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return for each server the values of its shards, by name."""
        return [
            {shard.spec.name: shard.slice(values[shard.variable.name]) for shard in self.shards_at(number)}
            for number in range(self.servers)
        ]


def plan_shards(
    variables: Iterable[ArraySpec], servers: int, partitioner: PartitionFunction | None = None
) -> ShardingPlan:
    """Assign shards to servers in turn, as ``tf.distribute`` does; without a partitioner each variable is one shard.

    Raises:
        OptionError: the partitioner cuts along another axis than the first, or two variables have one name.

    Example:
        >>> from lockstep._array_encoding import ArraySpec
        >>> from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
        >>> table = ArraySpec("table", (5, 2), "float32")
        >>> [shard.spec.shape for shard in plan_shards([table], 2, FixedShardsPartitioner(2)).shards["table"]]
        [(3, 2), (2, 2)]
    """
    variables = tuple(variables)
    turn = itertools.cycle(range(servers))
    shards: dict[str, tuple[Shard, ...]] = {}
    for variable in variables:
        if variable.name in shards:
            raise OptionError(
                f"Two variables have the name {variable.name!r}. Fix: give one of their layers another name."
            )
        shards[variable.name] = tuple(_shards(variable, _shard_count(variable, partitioner), turn))
    return ShardingPlan(variables, shards, servers)


def variable_name(spec: ArraySpec) -> str:
    """Return the name of the whole variable of a spec, which may be that of a shard.

    Example:
        >>> variable_name(ArraySpec("net/table[3:5]", (2, 4), "float32"))
        'net/table'
    """
    return re.sub(r"\[\d+:\d+\]$", "", spec.name)


def shard_bounds(rows: int, count: int) -> list[int]:
    """Return the bounds of ``count`` shards of ``rows`` rows: the first ``rows % count`` have one row more.

    Example:
        >>> shard_bounds(8, 3)
        [0, 3, 6, 8]
    """
    base, extra = divmod(rows, count)
    return [number * base + min(number, extra) for number in range(count + 1)]


def _shards(variable: ArraySpec, count: int, turn: Iterable[int]) -> Iterable[Shard]:
    bounds = shard_bounds(variable.shape[0], count) if variable.shape else [0, 0]
    for (begin, end), server in zip(itertools.pairwise(bounds), turn, strict=False):
        yield Shard(variable, begin, end, server, is_whole=count == 1)


def _shard_count(variable: ArraySpec, partitioner: PartitionFunction | None) -> int:
    if partitioner is None or not variable.shape:
        return 1
    given = partitioner(variable.shape, variable.dtype)
    partitions = list(given) if isinstance(given, Iterable) else []
    are_counts = len(partitions) == len(variable.shape) and all(isinstance(one, Integral) for one in partitions)
    if not are_counts or partitions[0] < 1 or any(count != 1 for count in partitions[1:]):
        raise OptionError(
            f"variable_partitioner: {variable.name} of shape {variable.shape}: expected {len(variable.shape)} numbers, the first of at "
            f"least 1 and all others 1, as only the first axis can be cut; got {given!r}. Fix: return a list such as {[2] + [1] * (len(variable.shape) - 1)}."
        )
    return max(1, min(partitions[0], variable.shape[0]))


class Partitioner(abc.ABC):
    """Base class of partitioners: chooses how many shards a variable has along each axis.

    Example:
        >>> from lockstep.partitioners import Partitioner
        >>> class OneForEachRow(Partitioner):
        ...     def shards(self, rows, row_bytes):
        ...         return rows
        >>> OneForEachRow()((6, 2), "float32"), OneForEachRow().shards(6, 8)
        ([6, 1], 6)
    """

    def __call__(self, shape: Sequence[int], dtype: str, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis: 1, except along ``axis``.

        Args:
            shape: shape of the variable, with at least one axis.
            dtype: dtype of the variable, by name.
            axis: to cut along.

        Returns:
            One number for each axis.

        Raises:
            OptionError: there is no such axis.
        """
        if not 0 <= axis < len(shape):
            raise OptionError(
                f"{type(self).__name__}: axis: expected one of the {len(shape)} of {shape}, got {axis}. Fix: count axes from 0."
            )
        partitions = [1] * len(shape)
        rows = shape[axis]
        row_bytes = math.prod(shape) // max(1, rows) * np.dtype(dtype).itemsize
        partitions[axis] = max(1, min(rows, self.shards(rows, row_bytes)))
        return partitions

    @abc.abstractmethod
    def shards(self, rows: int, row_bytes: int) -> int:
        """Return the number of shards of a variable.

        Args:
            rows: along the axis that is cut.
            row_bytes: bytes of each row.

        Returns:
            The number; less than 1 counts as 1, and more than ``rows`` as ``rows``.
        """


class FixedShardsPartitioner(Partitioner):
    """Cuts each variable into the same number of shards, but into no more than it has rows.

    Args:
        num_shards: number of shards.

    Raises:
        OptionError: ``num_shards`` is not a whole number of at least 1.

    Example:
        >>> from lockstep.partitioners import FixedShardsPartitioner
        >>> FixedShardsPartitioner(2)((10, 3), "float32"), FixedShardsPartitioner(2)((1, 3), "float32")
        ([2, 1], [1, 1])
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = whole_number("FixedShardsPartitioner: num_shards", num_shards)

    def shards(self, rows: int, row_bytes: int) -> int:
        """See :class:`Partitioner`."""
        return self.num_shards


class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many shards as possible of at least ``min_shard_bytes`` each, as TensorFlow documents it.

    TensorFlow's implementation can make smaller shards: it cuts 3 rows of 4 bytes into 2 shards for ``min_shard_bytes=8``.

    Args:
        min_shard_bytes: least size of a shard, unless the whole variable is smaller.
        max_shards: largest number of shards.

    Raises:
        OptionError: one of them is not a whole number of at least 1.

    Example:
        >>> from lockstep.partitioners import MinSizePartitioner
        >>> MinSizePartitioner(4, max_shards=2)((6, 1), "float32"), MinSizePartitioner(4, max_shards=10)((6, 1), "float32")
        ([2, 1], [6, 1])
    """

    def __init__(self, min_shard_bytes: int = 256 * 2**10, max_shards: int = 1) -> None:
        self.min_shard_bytes = whole_number("MinSizePartitioner: min_shard_bytes", min_shard_bytes)
        self.max_shards = whole_number("MinSizePartitioner: max_shards", max_shards)

    def shards(self, rows: int, row_bytes: int) -> int:
        """See :class:`Partitioner`."""
        rows_needed = math.ceil(self.min_shard_bytes / max(1, row_bytes))
        return min(self.max_shards, rows // rows_needed)


class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few shards as possible of at most ``max_shard_bytes`` each.

    A single row may be larger, and shards may be larger if ``max_shards`` does not allow enough of them.

    Args:
        max_shard_bytes: largest size of a shard.
        max_shards: largest number of shards; None: no limit.

    Raises:
        OptionError: one of them is not a whole number of at least 1.

    Example:
        >>> from lockstep.partitioners import MaxSizePartitioner
        >>> MaxSizePartitioner(4)((6, 1), "float32"), MaxSizePartitioner(1024)((6, 1), "float32")
        ([6, 1], [1, 1])
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self.max_shard_bytes = whole_number("MaxSizePartitioner: max_shard_bytes", max_shard_bytes)
        self.max_shards = None if max_shards is None else whole_number("MaxSizePartitioner: max_shards", max_shards)

    def shards(self, rows: int, row_bytes: int) -> int:
        """See :class:`Partitioner`."""
        rows_that_fit = max(1, self.max_shard_bytes // max(1, row_bytes))
        needed = math.ceil(rows / rows_that_fit)
        return needed if self.max_shards is None else min(self.max_shards, needed)
