"""Batches for replicas, out of any input."""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np

from lockstep._errors import OptionError
from lockstep.data.advice import Meter
from lockstep.data.inputs import Epoch
from lockstep.data.placement import Placement, count_rows
from lockstep.data.sources import Source
from lockstep.loops.values import of_replicas, rows_of_batch
from lockstep.topology.layout import rows_of_replicas

__all__ = ["DistributedDataset", "DistributedIterator", "InputContext", "OwnBatches", "ValueContext"]


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a data set knows: ``tf.distribute.InputContext``.

    Args:
        num_input_pipelines: number of processes that read.
        input_pipeline_id: number of this one.
        num_replicas_in_sync: number of replicas of all.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Rows of one replica.

        Raises:
            OptionError: the replicas do not divide ``global_batch_size``.

        Example:
            >>> from lockstep import InputContext
            >>> InputContext(1, 0, 4).get_per_replica_batch_size(512)
            128
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise OptionError(
                f"get_per_replica_batch_size: {self.num_replicas_in_sync} replicas do not divide a global batch of "
                f"{global_batch_size} rows."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """What a function that makes a value for a replica knows: ``tf.distribute.experimental.ValueContext``.

    Args:
        replica_id_in_sync_group: number of the replica.
        num_replicas_in_sync: number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class DistributedDataset(Source):
    """Batches of :class:`PerReplica`, one pass for each ``iter``: ``tf.distribute.DistributedDataset``.

    ``fit``, ``evaluate`` and ``predict`` take it, too.

    Args:
        source: batches of the global size.
        placement: devices and number of replicas.
        depth: number of batches to place ahead.
    """

    def __init__(self, source: Source, placement: Placement, depth: int) -> None:
        super().__init__(source.name)
        self._source, self._placement, self._depth = source, placement, depth
        self.restarts = source.restarts

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self._source, self._place, self._depth)

    def _place(self, batch: Any) -> Any:
        """A batch, cut into replicas."""
        return rows_of_batch(batch, count_rows(jax.tree.map(np.asarray, batch)), self._placement)

    @property
    def num_batches(self) -> int | None:
        """See :class:`Source`."""
        return self._source.num_batches

    def batches(self) -> Iterator[Any]:
        """See :class:`Source`."""
        return self._source.batches()

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`Source`."""
        self._source.give_back(batches)

    def begin_epoch(self) -> None:
        """See :class:`Source`."""
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        """See :class:`Source`."""
        self._source.end_epoch()


class OwnBatches(DistributedDataset):
    """As :class:`DistributedDataset`; every replica draws a batch of its own.

    Args:
        source: batches of the size of one replica.
        placement: devices and number of replicas.
        depth: number of batches to place ahead, for each replica.
    """

    def __init__(self, source: Source, placement: Placement, depth: int) -> None:
        super().__init__(_Drawn(source, placement.replicas), placement, depth)

    def _place(self, batch: Any) -> Any:
        return jax.tree.map(lambda *values: of_replicas(values, self._placement), *batch)

    @property
    def num_batches(self) -> int | None:
        """See :class:`Source`."""
        return self._source.num_batches

    def batches(self) -> Iterator[Any]:
        """The global batches: the rows of all replicas, in their order."""
        for own in self._source.batches():
            yield jax.tree.map(lambda *values: np.concatenate(values), *own)

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`Source`."""
        self._source.give_back([self._apart(batch) for batch in batches])

    def _apart(self, batch: Any) -> list[Any]:
        sizes = rows_of_replicas(count_rows(batch), self._placement.replicas)
        ends = np.cumsum(sizes)
        return [
            jax.tree.map(lambda leaf, end=end, rows=rows: leaf[end - rows : end], batch)
            for end, rows in zip(ends, sizes, strict=True)
        ]


class _Drawn(Source):
    """As many batches at a time as there are replicas; those for which none is left get 0 rows."""

    def __init__(self, source: Source, replicas: int) -> None:
        super().__init__(source.name)
        self._source, self._replicas = source, replicas
        self.restarts = source.restarts

    @property
    def num_batches(self) -> int | None:
        """See :class:`Source`."""
        batches = self._source.num_batches
        return None if batches is None else -(-batches // self._replicas)

    def batches(self) -> Iterator[Any]:
        """See :class:`Source`."""
        batches = self._source.batches()
        while own := [jax.tree.map(np.asarray, batch) for batch in islice(batches, self._replicas)]:
            nothing = jax.tree.map(lambda leaf: leaf[:0], own[0])
            yield own + [nothing] * (self._replicas - len(own))

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`Source`."""
        self._source.give_back([batch for own in batches for batch in own if len(jax.tree.leaves(batch)[0])])

    def begin_epoch(self) -> None:
        """See :class:`Source`."""
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        """See :class:`Source`."""
        self._source.end_epoch()


class DistributedIterator(Iterator[Any]):
    """Iterator over a distributed data set: ``tf.distribute.DistributedIterator``.

    A thread reads and places ahead of it. When it is dropped the thread ends, and what was read and not taken goes back to an
    input that cannot yield it again.

    Args:
        source: where batches come from.
        place: makes of one a tree of :class:`PerReplica`.
        depth: number of batches to place ahead.
    """

    def __init__(self, source: Source, place: Callable[[Any], Any], depth: int) -> None:
        self._source = source
        self._epoch = Epoch(source, place, depth, Meter())
        self._epoch.allow(math.inf)
        self._close = weakref.finalize(self, _close, self._epoch)
        self._close.atexit = False
        source.begin_epoch()

    def __next__(self) -> Any:
        if not self._close.alive:
            raise StopIteration
        try:
            return self._epoch.take(None)
        except BaseException as error:
            self._close()
            if isinstance(error, StopIteration):
                self._source.end_epoch()
            raise

    def get_next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """The next batch, or the news that there is none."""
        for batch in self:
            return Optional(batch, True)
        return Optional(None, False)


@dataclass(frozen=True)
class Optional:
    """A batch or none: ``tf.experimental.Optional``."""

    _value: Any
    _has_value: bool

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return self._has_value

    def get_value(self) -> Any:
        """The batch.

        Raises:
            StopIteration: there is none.
        """
        if not self._has_value:
            raise StopIteration("the data set has ended: ask has_value() first")
        return self._value


def _close(epoch: Epoch) -> None:
    epoch.close(failed=sys.exception() is not None)
