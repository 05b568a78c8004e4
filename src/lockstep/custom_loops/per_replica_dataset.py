"""Every replica draws a batch of its own; where there are several processes, each draws for its own replicas.

Processes tell each other how many rows they have drawn. Where all replicas have the same number, every process puts its rows on
its devices. Else, as at the end of an input, they exchange the rows, and each goes on as if it had drawn them all. One whose
input has ended brings nothing until those of all have.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError
from lockstep.custom_loops.distributed_dataset import DistributedDataset
from lockstep.custom_loops.per_replica import of_local_replicas, of_replicas, with_numbers
from lockstep.custom_loops.pytree_exchange import gathered_trees
from lockstep.custom_loops.value_checks import check_structures
from lockstep.data.device_placement import Placement, count_rows
from lockstep.data.pass_iterator import BatchGather
from lockstep.data.sources import InputSource
from lockstep.distributed.control.wait_logger import CancelledError

__all__ = ["PerReplicaDataset"]


class PerReplicaDataset(DistributedDataset):
    """As :class:`DistributedDataset`; every replica draws a batch of its own.

    Args:
        source: batches of the size of one replica.
        placement: devices and number of replicas.
        depth: number of batches to place ahead, for each replica.
        new_gather: gives, for each pass, what brings together what the processes say; None: there is one.
    """

    is_shared = False

    def __init__(
        self, source: InputSource, placement: Placement, depth: int, new_gather: Callable[[], BatchGather] | None
    ) -> None:
        drawn = (
            _PerReplicaIterator(source, placement.replicas)
            if new_gather is None
            else _ProcessGroupIterator(source, placement, new_gather)
        )
        super().__init__(drawn, placement, depth)
        # Batches that fit has read ahead, and what they were made of: it may give them back.
        self._recent: deque[tuple[Any, list[Any]]] = deque(maxlen=2 * depth + 4)

    def _values_of(self, batch: list[Any]) -> Any:
        make = of_replicas if len(batch) == self._placement.replicas else of_local_replicas
        return jax.tree.map(lambda *values: make(values, self._placement), *batch)

    def batches(self) -> Iterator[Any]:
        """The global batches: the rows of all replicas, in their order; those of several processes are placed already."""
        for drawn in self._source.batches():
            batch = jax.tree.map(lambda *values: np.concatenate(values), *drawn)
            if not self._placement.is_local:
                is_whole = len(drawn) == self._placement.replicas
                batch = self._placement.place(batch) if is_whole else self._placement.place_local(batch)
            if not self.restarts:
                self._recent.append((batch, drawn))
            yield batch

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`InputSource`."""
        self._source.give_back([drawn for known, drawn in self._recent if any(known is batch for batch in batches)])


class _PerReplicaIterator(InputSource):
    """As many batches at a time as there are replicas; those for which none is left get 0 rows."""

    def __init__(self, source: InputSource, replicas: int) -> None:
        super().__init__(source.name)
        self._source, self._replicas = source, replicas
        self.restarts = source.restarts

    @property
    def num_batches(self) -> int | None:
        """See :class:`InputSource`."""
        batches = self._source.num_batches
        return None if batches is None else -(-batches // self._replicas)

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        batches = self._source.batches()
        while drawn := _next_of(batches, self._replicas):
            check_structures("distribute_datasets_from_function", drawn)
            yield _filled(drawn, self._replicas, drawn[0])

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`InputSource`."""
        self._source.give_back([batch for drawn in batches for batch in drawn if _rows(batch)])

    def begin_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.end_epoch()


class _ProcessGroupIterator(_PerReplicaIterator):
    """As :class:`_PerReplicaIterator`, in several processes: the batches of this process's replicas, or, where they are uneven, of all."""

    def __init__(self, source: InputSource, placement: Placement, new_gather: Callable[[], BatchGather]) -> None:
        super().__init__(source, len(placement.local_replicas))
        self._all, self._new_gather = placement.replicas, new_gather
        self._divides = placement.replicas % len(placement.devices) == 0

    @property
    def num_batches(self) -> None:
        """Not known: the longest input of all processes decides."""
        return

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        batches, gather = self._source.batches(), self._new_gather()
        try:
            while drawn := self._drawn_by_all(_next_of(batches, self._replicas), gather):
                check_structures("distribute_datasets_from_function", drawn)
                yield drawn
        finally:
            gather.close()

    def _drawn_by_all(self, drawn: list[Any], gather: BatchGather) -> list[Any]:
        """What this process has drawn, or all have; nothing where all have come to their ends, or nobody takes batches any more."""
        try:
            rows = gather([self._replicas, [count_rows(batch) for batch in drawn]])
            if not any(own for _, own in rows):
                return []
            every = [count for _, own in rows for count in own]
            if self._divides and len(every) == self._all and len(set(every)) == 1:
                return drawn
            return _exchanged(drawn, [replicas for replicas, _ in rows], gather)
        except CancelledError:
            self._source.give_back(drawn)
            return []


def _exchanged(drawn: list[Any], replicas: list[int], gather: BatchGather) -> list[Any]:
    found = gathered_trees(drawn, gather)
    example = next(batch for own in found for batch in own)
    return [batch for own, count in zip(found, replicas, strict=True) for batch in _filled(list(own), count, example)]


def _next_of(batches: Iterator[Any], count: int) -> list[Any]:
    return [jax.tree.map(_with_rows, batch) for batch in islice(batches, count)]


def _with_rows(leaf: Any) -> Any:
    array = with_numbers(leaf)
    if not array.ndim:
        raise InputError(
            "distribute_datasets_from_function: expected batches of arrays with rows, (rows, …), as a replica may get none of them; "
            f"got the number {array}. Fix: give it a first axis, np.asarray([{array}]) for one row."
        )
    return array


def _filled(drawn: list[Any], count: int, example: Any) -> list[Any]:
    nothing = jax.tree.map(lambda leaf: leaf[:0], example)
    return drawn + [nothing] * (count - len(drawn))


def _rows(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])
