"""Distributed data sets: batches divided among replicas, or a separate batch for each replica.

The processes exchange how many rows they have read. If all replicas have the same number, each process puts its rows on its own
devices. Otherwise, as at the end of an input, they exchange the rows, and each process continues with the rows of all. A process
whose input has ended contributes no rows until the inputs of all processes have ended.
"""

import base64
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep._array_encoding import (
    array_bytes,
    arrays_from_bytes,
    decode_tree,
    describe_arrays,
    encode_tree,
    parse_description,
)
from lockstep._errors import InputError, OptionError, ScopeError, shown, whole_number
from lockstep._logging import CancelledError
from lockstep.custom_loops.per_replica import (
    as_numeric_array,
    check_structures,
    per_replica_of,
    per_replica_of_local,
    split_batch,
)
from lockstep.custom_loops.replica_context import current_replica
from lockstep.data.input_bound import WaitMeter
from lockstep.data.resumable_iterator import BatchCheck, BatchGather, ResumableIterator
from lockstep.data.sources import InputSource, WrappedSource
from lockstep.devices.placement import Placement, count_rows


@dataclass(frozen=True)
class InputContext:
    """Argument of a function that makes a data set: ``tf.distribute.InputContext``.

    Args:
        num_input_pipelines: number of processes that read.
        input_pipeline_id: number of this process.
        num_replicas_in_sync: number of replicas of all processes.

    Raises:
        OptionError: one of them is not such a number.

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

    def __post_init__(self) -> None:
        pipelines = whole_number("InputContext: num_input_pipelines", self.num_input_pipelines)
        whole_number("InputContext: input_pipeline_id", self.input_pipeline_id, minimum=0, maximum=pipelines - 1)
        whole_number("InputContext: num_replicas_in_sync", self.num_replicas_in_sync)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica.

        Args:
            global_batch_size: rows of all replicas together.

        Returns:
            Number of rows of each replica.

        Raises:
            OptionError: the number of replicas does not divide ``global_batch_size``, or that is not a whole number.

        Example:
            >>> from lockstep import InputContext
            >>> InputContext(1, 0, 4).get_per_replica_batch_size(512)
            128
        """
        rows = whole_number("get_per_replica_batch_size: global_batch_size", global_batch_size)
        if rows % self.num_replicas_in_sync:
            raise OptionError(
                f"get_per_replica_batch_size: {self.num_replicas_in_sync} replicas do not divide a global batch of "
                f"{shown(rows)} rows. Fix: use a multiple of {self.num_replicas_in_sync}."
            )
        return rows // self.num_replicas_in_sync


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


class DistributedDataset(WrappedSource):
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
        super().__init__(source)
        self._placement, self._new_check = placement, new_check
        self.prefetch: int = depth

    def __iter__(self) -> "DistributedIterator":
        check = self._new_check() if self._new_check else None
        return DistributedIterator(self._source, self._values_of, self.prefetch, check)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"the number of batches of this {self.name} is not known before it has ended")
        return self.num_batches

    def _values_of(self, batch: Any) -> Any:
        return split_batch(batch, self._placement)


class DistributedIterator(Iterator[Any]):
    """Iterator over a distributed data set: ``tf.distribute.DistributedIterator``.

    A thread reads, checks and places ``depth`` batches ahead. When the iterator is garbage collected, the thread ends, and batches
    that were read but not taken are given back to an input that cannot yield them again.
    """

    def __init__(
        self, source: InputSource, place: Callable[[Any], Any], depth: int, check: BatchCheck | None = None
    ) -> None:
        self._source = source
        self._pass = ResumableIterator(source, place, depth, WaitMeter(), check)
        self._pass.set_limit(math.inf)
        source.set_limit(math.inf)
        self._close = weakref.finalize(self, _close, self._pass, id(sys.exception()))
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


def _close(iterator: ResumableIterator, handled: int) -> None:
    """End a pass; ``handled`` is the ID of the exception that was handled when it began: only another one means that it has failed."""
    iterator.close(failed=id(sys.exception()) not in (handled, id(None)))


_CHARACTERS = 8 * 2**20  # in one message to a process, which holds a chunk of each process


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
        self._source.give_back([drawn for known, drawn in self._recent if any(known is batch for batch in batches)])


class _PerReplicaIterator(WrappedSource):
    """Reads one batch for each replica at a time; at the end of the input, replicas without a batch get 0 rows."""

    def __init__(self, source: InputSource, replicas: int) -> None:
        super().__init__(source)
        self._replicas = replicas

    @property
    def num_batches(self) -> int | None:
        batches = self._source.num_batches
        return None if batches is None else -(-batches // self._replicas)

    def batches(self) -> Iterator[Any]:
        batches = self._source.batches()
        while drawn := _read(batches, self._replicas):
            check_structures("distribute_datasets_from_function", drawn)
            yield _pad_with_empty(drawn, self._replicas, drawn[0])

    def set_limit(self, number: float) -> None:
        self._source.set_limit(number * self._replicas)

    def give_back(self, batches: list[Any]) -> None:
        self._source.give_back([batch for drawn in batches for batch in drawn if _rows(batch)])


class _ProcessGroupIterator(_PerReplicaIterator):
    """As :class:`_PerReplicaIterator` with several processes: the batches of this process's replicas or, if uneven, of all replicas."""

    def __init__(self, source: InputSource, placement: Placement, new_gather: Callable[[], BatchGather]) -> None:
        super().__init__(source, len(placement.local_replicas))
        self._all, self._new_gather = placement.replicas, new_gather
        self._divides = placement.replicas % len(placement.devices) == 0
        self._own = slice(placement.local_replicas.start, placement.local_replicas.stop)

    @property
    def num_batches(self) -> None:
        """Unknown: the longest input of all processes determines it."""
        return

    def batches(self) -> Iterator[Any]:
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
            found = gather([self._replicas, [_kinds_of(batch) for batch in drawn]])
            if not any(own for _, own in found):
                return []
            every = [kinds for _, own in found for kinds in own]
            if self._divides and len(every) == self._all and all(kinds == every[0] for kinds in every):
                return drawn
            return _exchange(drawn, [replicas for replicas, _ in found], gather)
        except CancelledError:
            self._source.give_back(drawn)
            return []

    def give_back(self, batches: list[Any]) -> None:
        """See :class:`InputSource`; of uneven batches, which all processes have, those that this one has read."""
        super().give_back([drawn if len(drawn) == self._replicas else drawn[self._own] for drawn in batches])


def _exchange(drawn: list[Any], replicas: list[int], gather: BatchGather) -> list[Any]:
    found = gather_trees(drawn, gather)
    example = next(batch for own in found for batch in own)
    return [
        batch
        for own, count in zip(found, replicas, strict=True)
        for batch in _pad_with_empty(list(own), count, example)
    ]


def _kinds_of(batch: Any) -> list[Any]:
    """Return shapes and dtypes of a batch, as values of JSON; the batches of all replicas need equal ones to be stacked."""
    count_rows(batch)
    return [[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(batch)]


def _read(batches: Iterator[Any], count: int) -> list[Any]:
    return [jax.tree.map(_array_with_rows, batch) for batch in islice(batches, count)]


def _array_with_rows(leaf: Any) -> Any:
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
        tree: tree of dicts, lists and tuples; its leaves are arrays of numbers.
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
            f"distribute_datasets_from_function: a batch that is sent to other workers must hold numbers, got {error}. Fix: turn it into "
            "arrays in dataset_fn."
        ) from None
    text = base64.b64encode(b"".join(map(array_bytes, arrays.values()))).decode()
    headers = gather([encoded, describe_arrays(arrays), len(text)])
    longest, size = max(length for *_, length in headers), _CHARACTERS // len(headers)
    chunks = [gather(text[start : start + size]) for start in range(0, longest, size)]
    return [
        decode_tree(spec, arrays_from_bytes(parse_description(described), _join(chunks, worker)))
        for worker, (spec, described, _) in enumerate(headers)
    ]


def _join(chunks: list[list[str]], worker: int) -> bytes:
    return base64.b64decode("".join(chunk[worker] for chunk in chunks))


def _as_plain_containers(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples, also for subclasses of these such as named tuples, and of NumPy's arrays."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {name: _as_plain_containers(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (tuple if isinstance(tree, tuple) else list)(_as_plain_containers(value) for value in tree)
    return np.asarray(tree)
