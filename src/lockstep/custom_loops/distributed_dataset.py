"""Distributed data sets and iterators: batches for replicas from any input."""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep._errors import OptionError, ScopeError, whole_number
from lockstep.custom_loops.per_replica import split_batch
from lockstep.custom_loops.replica_context import current_replica
from lockstep.data.device_placement import Placement, count_rows
from lockstep.data.pass_iterator import BatchCheck, PassIterator
from lockstep.data.sources import InputSource
from lockstep.data.wait_meter import WaitMeter

__all__ = ["DistributedDataset", "DistributedIterator", "InputContext", "ValueContext"]


@dataclass(frozen=True)
class InputContext:
    """Argument of a function that makes a data set: ``tf.distribute.InputContext``.

    Args:
        num_input_pipelines: number of processes that read.
        input_pipeline_id: number of this process.
        num_replicas_in_sync: number of replicas of all processes.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
        >>> seen = []
        >>> data = strategy.distribute_datasets_from_function(lambda context: seen.append(context) or [])
        >>> seen
        [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)]
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica.

        Args:
            global_batch_size: rows of all replicas together.

        Returns:
            Number of rows of each replica.

        Raises:
            OptionError: the number of replicas does not divide ``global_batch_size``, or one of the two is not a whole number.

        Example:
            >>> from lockstep import InputContext
            >>> InputContext(1, 0, 4).get_per_replica_batch_size(512)
            128
        """
        replicas = whole_number("InputContext: num_replicas_in_sync", self.num_replicas_in_sync)
        if whole_number("get_per_replica_batch_size: global_batch_size", global_batch_size) % replicas:
            raise OptionError(
                f"get_per_replica_batch_size: {self.num_replicas_in_sync} replicas do not divide a global batch of "
                f"{global_batch_size} rows. Fix: use a multiple of {self.num_replicas_in_sync}."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """Argument of a function that makes a value for a replica: ``tf.distribute.experimental.ValueContext``.

    Args:
        replica_id_in_sync_group: number of the replica.
        num_replicas_in_sync: number of replicas.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
        >>> values = strategy.experimental_distribute_values_from_function(lambda context: 1 / context.num_replicas_in_sync)
        >>> [float(value) for value in values.values]
        [0.5, 0.5]
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class DistributedDataset(InputSource):
    """Batches of :class:`PerReplica`, one pass for each ``iter``: ``tf.distribute.DistributedDataset``.

    ``fit``, ``evaluate`` and ``predict`` take it, too.

    Args:
        source: batches of the global size.
        placement: devices and number of replicas.
        depth: number of batches to place ahead.
        new_check: makes, for each pass, a check that several processes read the same batches; None: no check.
    """

    def __init__(
        self, source: InputSource, placement: Placement, depth: int, new_check: Callable[[], BatchCheck] | None = None
    ) -> None:
        super().__init__(source.name)
        self._source, self._placement, self._depth, self._new_check = source, placement, depth, new_check
        self.restarts = source.restarts

    def __iter__(self) -> "DistributedIterator":
        check = self._new_check() if self._new_check else None
        return DistributedIterator(self._source, self._values_of, self._depth, check)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"the number of batches of this {self.name} is not known before it has ended")
        return self.num_batches

    def _values_of(self, batch: Any) -> Any:
        """Return a batch, split into replicas."""
        return split_batch(batch, count_rows(jax.tree.map(np.asarray, batch)), self._placement)

    @property
    def num_batches(self) -> int | None:
        """See :class:`InputSource`."""
        return self._source.num_batches

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        return self._source.batches()

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`InputSource`."""
        self._source.give_back(batches)

    def begin_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.end_epoch()


class DistributedIterator(Iterator[Any]):
    """Iterator over a distributed data set: ``tf.distribute.DistributedIterator``.

    A thread reads and places batches ahead. When the iterator is garbage collected, the thread ends, and batches that were read but
    not taken are given back to an input that cannot yield them again.

    Args:
        source: yields batches.
        place: turns a batch into a tree of :class:`PerReplica`.
        depth: number of batches to place ahead.
        check: is called with each batch before it is placed.
    """

    def __init__(
        self, source: InputSource, place: Callable[[Any], Any], depth: int, check: BatchCheck | None = None
    ) -> None:
        self._source = source
        self._pass = PassIterator(source, place, depth, WaitMeter(), check)
        self._pass.set_limit(math.inf)
        self._close = weakref.finalize(self, _close, self._pass)
        self._close.atexit = False
        source.begin_epoch()

    def __next__(self) -> Any:
        if current_replica() is not None:
            raise ScopeError(
                "A function that strategy.run runs on each replica asked for the next batch of a distributed data set, which is one for all "
                "replicas. Fix: take it outside and pass it as an argument: strategy.run(fn, args=(next(iterator),))."
            )
        if isinstance(jnp.add(0, 0), jax.core.Tracer):
            raise ScopeError(
                "A function that jax.jit compiles asked for the next batch of a distributed data set. It would be traced once, and use that "
                "batch in each call. Fix: take it outside and pass it as an argument: step(next(iterator))."
            )
        if not self._close.alive:
            raise StopIteration
        try:
            return self._pass.take(None)
        except BaseException as error:
            self._close()
            if isinstance(error, StopIteration):
                self._source.end_epoch()
            raise

    def get_next(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the data set has ended.
        """
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Return the next batch as an optional, which is empty at the end."""
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
        """Return the batch.

        Raises:
            StopIteration: there is none.
        """
        if not self._has_value:
            raise StopIteration("the data set has ended: call has_value() first")
        return self._value


def _close(iterator: PassIterator) -> None:
    iterator.close(failed=sys.exception() is not None)
