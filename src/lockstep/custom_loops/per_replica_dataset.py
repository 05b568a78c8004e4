"""``distribute_datasets_from_function``: a separate batch for each replica; each process reads for its own replicas.

The processes exchange how many rows they have read. If all replicas have the same number, each process puts its rows on its own
devices. Otherwise, as at the end of an input, they exchange the rows, and each process continues with the rows of all. A process
whose input has ended contributes no rows until the inputs of all processes have ended.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np

from lockstep._arrays import (
    array_bytes,
    arrays_from_bytes,
    decode_tree,
    describe_arrays,
    encode_tree,
    parse_description,
)
from lockstep._errors import InputError
from lockstep.custom_loops.distributed_dataset import DistributedDataset
from lockstep.custom_loops.per_replica import as_numeric_array, per_replica_of, per_replica_of_local
from lockstep.custom_loops.value_checks import check_structures
from lockstep.data.device_placement import Placement, count_rows
from lockstep.data.pass_iterator import BatchGather
from lockstep.data.sources import InputSource
from lockstep.distributed.control.wait_logger import CancelledError

__all__ = ["PerReplicaDataset", "gather_trees"]

_CHUNK = 4 * 2**20  # characters in one message


class PerReplicaDataset(DistributedDataset):
    """A :class:`DistributedDataset` with a separate batch for each replica.

    Args:
        source: batches of the size of one replica.
        placement: devices and number of replicas.
        depth: number of batches to place ahead, for each replica.
        new_gather: makes, for each pass, the function that gathers values of all processes; None: there is one process.
    """

    is_shared = False

    def __init__(
        self, source: InputSource, placement: Placement, depth: int, new_gather: Callable[[], BatchGather] | None
    ) -> None:
        batches = (
            _PerReplicaIterator(source, placement.replicas)
            if new_gather is None
            else _ProcessGroupIterator(source, placement, new_gather)
        )
        super().__init__(batches, placement, depth)
        # Batches that fit has read ahead, and the replicas' batches they were made of: fit may give them back.
        self._recent: deque[tuple[Any, list[Any]]] = deque(maxlen=2 * depth + 4)

    def _values_of(self, batch: list[Any]) -> Any:
        make = per_replica_of if len(batch) == self._placement.replicas else per_replica_of_local
        return jax.tree.map(lambda *values: make(values, self._placement), *batch)

    def batches(self) -> Iterator[Any]:
        """Yield global batches, the rows of all replicas in their order; with several processes they are on the devices already."""
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
    """Reads one batch for each replica at a time; at the end of the input, replicas without a batch get 0 rows."""

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
        while drawn := _read(batches, self._replicas):
            check_structures("distribute_datasets_from_function", drawn)
            yield _pad_with_empty(drawn, self._replicas, drawn[0])

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
    """As :class:`_PerReplicaIterator` with several processes: the batches of this process's replicas or, if uneven, of all replicas."""

    def __init__(self, source: InputSource, placement: Placement, new_gather: Callable[[], BatchGather]) -> None:
        super().__init__(source, len(placement.local_replicas))
        self._all, self._new_gather = placement.replicas, new_gather
        self._divides = placement.replicas % len(placement.devices) == 0

    @property
    def num_batches(self) -> None:
        """Unknown: the longest input of all processes determines it."""
        return

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        batches, gather = self._source.batches(), self._new_gather()
        try:
            while drawn := self._agree_on_batches(_read(batches, self._replicas), gather):
                check_structures("distribute_datasets_from_function", drawn)
                yield drawn
        finally:
            gather.close()

    def _agree_on_batches(self, drawn: list[Any], gather: BatchGather) -> list[Any]:
        """Return the batches that this process or, if uneven, all have read; none if all inputs have ended or the pass is cancelled."""
        try:
            rows = gather([self._replicas, [count_rows(batch) for batch in drawn]])
            if not any(own for _, own in rows):
                return []
            every = [count for _, own in rows for count in own]
            if self._divides and len(every) == self._all and len(set(every)) == 1:
                return drawn
            return _exchange(drawn, [replicas for replicas, _ in rows], gather)
        except CancelledError:
            self._source.give_back(drawn)
            return []


def _exchange(drawn: list[Any], replicas: list[int], gather: BatchGather) -> list[Any]:
    found = gather_trees(drawn, gather)
    example = next(batch for own in found for batch in own)
    return [
        batch
        for own, count in zip(found, replicas, strict=True)
        for batch in _pad_with_empty(list(own), count, example)
    ]


def _read(batches: Iterator[Any], count: int) -> list[Any]:
    return [jax.tree.map(_check_rows, batch) for batch in islice(batches, count)]


def _check_rows(leaf: Any) -> Any:
    array = as_numeric_array(leaf)
    if not array.ndim:
        raise InputError(
            "distribute_datasets_from_function: expected batches of arrays with rows, (rows, …), as a replica may get none of them; "
            f"got the number {array}. Fix: give it a first axis, np.asarray([{array}]) for one row."
        )
    return array


def _pad_with_empty(drawn: list[Any], count: int, example: Any) -> list[Any]:
    nothing = jax.tree.map(lambda leaf: leaf[:0], example)
    return drawn + [nothing] * (count - len(drawn))


def _rows(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])


def gather_trees(tree: Any, gather: Callable[[Any], list[Any]]) -> list[Any]:
    """Gather the trees of all processes, in their order, encoded as JSON and base64, so that no code can be run.

    Args:
        tree: of dicts, lists and tuples; its leaves are arrays of numbers.
        gather: gathers JSON values.

    Raises:
        InputError: it holds other objects.

    Example:
        >>> import numpy as np
        >>> gather_trees({"x": np.arange(3)}, lambda value: [value])
        [{'x': array([0, 1, 2])}]
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        encoded = encode_tree(_as_plain_containers(tree), "", arrays)
    except TypeError as error:
        raise InputError(
            f"distribute_datasets_from_function: a batch that is sent to other workers must hold numbers, got {error}."
        ) from None
    text = base64.b64encode(b"".join(map(array_bytes, arrays.values()))).decode()
    headers = gather([encoded, describe_arrays(arrays), len(text)])
    chunks = [gather(text[start : start + _CHUNK]) for start in range(0, max(length for *_, length in headers), _CHUNK)]
    return [
        decode_tree(spec, arrays_from_bytes(parse_description(described), _join(chunks, worker)))
        for worker, (spec, described, _) in enumerate(headers)
    ]


def _join(chunks: list[list[str]], worker: int) -> bytes:
    return base64.b64decode("".join(chunk[worker] for chunk in chunks))


def _as_plain_containers(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples, also for subclasses of these such as named tuples, and of NumPy's arrays."""
    if isinstance(tree, dict):
        return {str(name): _as_plain_containers(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (tuple if isinstance(tree, tuple) else list)(_as_plain_containers(value) for value in tree)
    return np.asarray(tree)
