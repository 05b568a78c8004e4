"""Into how many shards a variable is cut: the partitioners of ``tf.distribute.experimental.partitioners``.

A partitioner is any function ``(shape, dtype) -> [shards along each axis]``; only the first axis may be cut. How rows then fall to
shards is in ``shards.py``.
"""

import abc
import math
from collections.abc import Sequence

import numpy as np

from lockstep._errors import OptionError, whole_number

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(abc.ABC):
    """Says how many shards a variable has along each axis.

    Example:
        >>> from lockstep.partitioners import Partitioner
        >>> class OneForEachRow(Partitioner):
        ...     def shards(self, rows, row_bytes):
        ...         return rows
        >>> OneForEachRow()((6, 2), "float32"), OneForEachRow().shards(6, 8)
        ([6, 1], 6)
    """

    def __call__(self, shape: Sequence[int], dtype: str, axis: int = 0) -> list[int]:
        """The number of shards along each axis: 1, but for ``axis``.

        Args:
            shape: of the variable, with at least one axis.
            dtype: of the variable, by name.
            axis: to cut along.

        Returns:
            One number for each axis.

        Raises:
            OptionError: there is no such axis.
        """
        if not 0 <= axis < len(shape):
            raise OptionError(f"{type(self).__name__}: axis: expected one of the {len(shape)} of {shape}, got {axis}.")
        partitions = [1] * len(shape)
        rows = shape[axis]
        row_bytes = math.prod(shape) // max(1, rows) * np.dtype(dtype).itemsize
        partitions[axis] = max(1, min(rows, self.shards(rows, row_bytes)))
        return partitions

    @abc.abstractmethod
    def shards(self, rows: int, row_bytes: int) -> int:
        """The number of shards of a variable.

        Args:
            rows: along the axis that is cut.
            row_bytes: bytes of each.

        Returns:
            The number; less than 1 counts as 1, and more than ``rows`` as ``rows``.
        """


class FixedShardsPartitioner(Partitioner):
    """The same number of shards for each variable, but no more than it has rows.

    Args:
        num_shards: number of shards.

    Raises:
        OptionError: it is no whole number of at least 1.

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
    """As many shards as can be of at least ``min_shard_bytes`` each: as TensorFlow documents it.

    What TensorFlow does can make them smaller: it cuts 3 rows of 4 bytes in 2 shards for ``min_shard_bytes=8``.

    Args:
        min_shard_bytes: a shard is not smaller, unless the whole variable is.
        max_shards: at most so many.

    Raises:
        OptionError: one of them is no whole number of at least 1.

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
    """As few shards as can be of at most ``max_shard_bytes`` each.

    A single row may be larger, and so may shards be where ``max_shards`` does not allow enough of them.

    Args:
        max_shard_bytes: a shard is not larger.
        max_shards: at most so many; None: as many as are needed.

    Raises:
        OptionError: one of them is no whole number of at least 1.

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
