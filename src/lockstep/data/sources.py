"""Sources: the kinds of input, each of which reads batches on the host pass by pass, and the factory that chooses one.

Keras's data adapters read arrays, ``tf.data``, torch and Grain. Generators, PyDatasets and callables have separate sources,
because Keras's would lose, repeat or reorder batches: it reads two batches of a generator in advance, yields them
again in the second epoch, and its queue of a PyDataset keeps batches of an interrupted epoch. Keras draws the order of shuffled arrays
from the global random generators. The position of a pass, and the state from which it continues, with that of these generators, are in
``resumable_iterator.py``; orders that ``tf.data`` and torch draw in ``random_state.py``.
"""

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult, ThreadPool
from types import FunctionType, GeneratorType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import keras
import numpy as np

from lockstep._errors import InputError, check_depth, shown
from lockstep._keras import trainer
from lockstep._logging import log_info
from lockstep.data.random_state import ShuffledData, without_added_prefetch

_CLOSE_SECONDS = 10.0  # for threads in the user's code to return when a pass is cut short
NON_NUMERIC_KINDS = "OSUTMm"  # kinds of NumPy arrays that no device holds: objects, texts and times
Pending = deque[Any]  # batches that were read from a generator and that no step has taken yet


@dataclass
class InputProgress:
    """How far this process has used a data object, in all calls of ``fit`` and ``evaluate``.

    Attributes:
        hooks: number of its hooks at the beginning and end of epochs that have run.
        batches: number of its batches that steps have taken, if it does not begin again.
        unread: those of them that finished runs of an earlier process have taken, and this process has not read: states of passes, each
            with the number of batches that are left.
    """

    hooks: int = 0
    batches: int = 0
    unread: deque[Any] = field(default_factory=deque)


_progress: WeakKeyDictionary[Any, InputProgress] = WeakKeyDictionary()


def _progress_of(data: Any) -> InputProgress:
    """Return the progress of a data object; a new one if the object has no hash or no weak references."""
    try:
        return _progress.setdefault(data, InputProgress())
    except TypeError:
        return InputProgress()


class InputSource:
    """Base class of the sources. Subclasses override what differs.

    Args:
        name: what it is, for messages.
    """

    restarts = True  # whether a new pass begins with the first batch again
    is_arrays = False  # whether it is arrays in memory
    can_seek = False  # whether batches_from reads nothing that comes before
    has_reader = False  # whether batch_reader returns a function
    has_hooks = False  # whether the user's code runs at the beginning or end of an epoch
    is_shared = True  # whether all processes of a job read the same input
    prefetch: int | None = None  # number of batches to read ahead, if the data have options of their own
    _shuffled: ShuffledData | None = None  # what it knows of the order in which its data are shuffled

    def __init__(self, name: str, data: Any = None) -> None:
        self.name = name
        self.progress = InputProgress() if data is None else _progress_of(data)

    @property
    def num_batches(self) -> int | None:
        """Number of batches of a pass, or None if it is not known."""
        return None

    def batches(self) -> Iterator[Any]:
        """Begin a pass over the batches: ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)`` or x alone."""
        return iter(())

    def batches_from(self, number: int) -> Iterator[Any]:
        """Begin a pass at batch ``number``; the batches before it are read again unless :attr:`can_seek`."""
        return itertools.islice(self.batches(), number, None)

    def batch_reader(self) -> Callable[[int], Any] | None:
        """Begin a pass and return a function from a batch's number to the batch; None if the batches before it must be read."""
        return None

    def set_limit(self, number: float) -> None:
        """Keep read-ahead threads from reading batch ``number`` or later before it is requested."""

    def give_back(self, batches: list[Any]) -> None:
        """Take back batches that were read and not used, in order."""

    def track_cache(self, earlier: dict[str, Any] | None) -> None:
        """Track how a cache reads its batches, for :meth:`cache_state`; ``earlier``: they are read as another process has read them."""

    def cache_state(self) -> dict[str, Any] | None:
        """Return, in values of JSON, how the batches were read that a cache keeps; None if it does not keep all of them."""
        return None

    def order_state(self) -> dict[str, Any] | None:
        """Return, in values of JSON, what the order of the next pass depends on besides the global generators; None: nothing else."""
        return self._shuffled.state() if self._shuffled else None

    def restore_order(self, state: dict[str, Any] | None) -> None:
        """Give the next pass the order that it had when :meth:`order_state` returned ``state``, in this process or another one."""
        if self._shuffled:
            self._shuffled.restore(state)

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def end_epoch(self) -> None:
        """End an epoch."""

    def close(self) -> None:
        """End the call of ``fit``, ``evaluate`` or ``predict`` that reads this input."""


class WrappedSource(InputSource):
    """Base class of sources that read another source. It cannot seek; what a subclass does not override is forwarded to that source."""

    def __init__(self, source: InputSource) -> None:
        super().__init__(source.name)
        self._source, self.prefetch = source, source.prefetch

    @property
    def has_hooks(self) -> bool:  # type: ignore[override]
        return self._source.has_hooks

    @property
    def restarts(self) -> bool:  # type: ignore[override]
        return self._source.restarts

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    def batches(self) -> Iterator[Any]:
        return self._source.batches()

    def set_limit(self, number: float) -> None:
        self._source.set_limit(number)

    def order_state(self) -> dict[str, Any] | None:
        return self._source.order_state()

    def restore_order(self, state: dict[str, Any] | None) -> None:
        self._source.restore_order(state)

    def give_back(self, batches: list[Any]) -> None:
        self._source.give_back(batches)

    def begin_epoch(self) -> None:
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        self._source.end_epoch()

    def close(self) -> None:
        self._source.close()


class AdapterSource(InputSource):
    """The input of one of Keras's adapters, which reads ``data``."""

    def __init__(self, adapter: Any, data: Any) -> None:
        super().__init__(type(data).__name__)
        self._adapter = adapter
        self.is_arrays = self.can_seek = trainer.is_array_adapter(adapter)  # Slicing arrays costs almost nothing.
        self._shuffled: ShuffledData = ShuffledData(data, self.name)

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def batches(self) -> Iterator[Any]:
        batches = self._shuffled.noted(iter(self._adapter.get_jax_iterator()))
        return _copied(batches) if trainer.may_reuse_memory(self._adapter) else batches

    def begin_epoch(self) -> None:
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        self._adapter.on_epoch_end()


def _copied(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield copies: the user's code may write the next batch into the same memory while a step still reads this one."""
    for batch in batches:
        yield jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)


class _UserCodeSource(InputSource):
    """A source whose batches are made by the user's Python code."""

    def _made(self) -> Iterator[Any]:
        """Return the batches as that code makes them."""
        return iter(())

    def _made_from(self, number: int) -> Iterator[Any]:
        return itertools.islice(self._made(), number, None)

    def batches(self) -> Iterator[Any]:
        return self._copied(self._made_from(0))

    def batches_from(self, number: int) -> Iterator[Any]:
        return self._copied(self._made_from(number))

    def _picking(self, made: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda number: next(self._copied(iter([made(number)])))

    def _copied(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _copied(trainer.get_jax_iterator(batches))


class _LeftoverSource(_UserCodeSource):
    """A source with leftovers: batches that were read and not used come first in the next pass."""

    def __init__(self, name: str, data: Any, pending: Pending) -> None:
        super().__init__(name, data)
        self._pending = pending

    def batches(self) -> Iterator[Any]:
        while self._pending:
            yield self._pending.popleft()
        yield from super().batches()

    batches_from = InputSource.batches_from  # Leftovers come first, so a pass cannot begin at a number.

    def give_back(self, batches: list[Any]) -> None:
        self._pending.extendleft(reversed(batches))


class GeneratorSource(_LeftoverSource):
    """A Python generator of tuples: one pass, which continues from epoch to epoch and from one ``fit`` to the next, first with the batches that
    earlier calls read and did not use.
    """

    restarts = False

    def __init__(self, generator: "GeneratorType[Any, None, None]", pending: Pending) -> None:
        super().__init__(f"generator {generator.__name__!r}", generator, pending)
        self._generator = generator

    def _made(self) -> Iterator[Any]:
        for batch in self._generator:
            if not isinstance(batch, tuple):
                raise InputError(
                    f"The {self.name} must yield tuples: (inputs,), (inputs, targets) or (inputs, targets, sample_weights). "
                    f"It yielded a {type(batch).__name__}. Fix: yield a tuple, also of inputs alone: (inputs,)."
                )
            yield batch


class DatasetSource(_UserCodeSource):
    """A ``keras.utils.PyDataset``, whose batches are read by ``workers`` threads.

    Args:
        dataset: the data set.
        adapter: Keras's adapter of it, which standardizes batches; None leaves them as they are.
        shuffle: whether to read the batches in another order each epoch, in Keras's order.
    """

    can_seek = has_reader = True

    def __init__(self, dataset: keras.utils.PyDataset, adapter: Any = None, shuffle: bool = False) -> None:
        super().__init__(type(dataset).__name__, dataset)
        kinds = type(dataset), keras.utils.PyDataset
        self.has_hooks = len({(kind.on_epoch_begin, kind.on_epoch_end) for kind in kinds}) > 1
        self._adapter, self._dataset, self._shuffle = adapter, dataset, shuffle
        self._limit = float("inf")
        self._has_logged = False  # that threads read instead of processes

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def _made_from(self, number: int) -> Iterator[Any]:
        order = itertools.islice(self._order(), number, None)
        read = self._read(order, number) if self._dataset.workers > 1 else (self._dataset[number] for number in order)
        # In a generator a StopIteration of the user's code is an error.
        return (self._standard(batch) for batch in read)

    def batch_reader(self) -> Callable[[int], Any]:
        order = None if self.num_batches is None else list(self._order())

        def batch(number: int) -> Any:
            if order is not None and number >= len(order):
                raise StopIteration  # As a source that finds its end by reading.
            return self._standard(self._dataset[number if order is None else order[number]])

        return self._picking(batch)

    def _standard(self, batch: Any) -> Any:
        return batch if self._adapter is None else trainer.standardize_batch(self._adapter, batch)

    def _order(self) -> Iterator[int]:
        if self.num_batches is None:
            return itertools.count()
        order = list(range(self.num_batches))
        if self._shuffle:
            random.shuffle(order)
        return iter(order)

    def set_limit(self, number: float) -> None:
        self._limit = number

    def _read(self, order: Iterator[int], asked: int) -> Iterator[Any]:
        if self._dataset.use_multiprocessing and not self._has_logged:
            log_info(
                f"{self.name}: {self._dataset.workers} threads read it instead of processes, which would not keep the order."
            )
            self._has_logged = True
        ahead = max(self._dataset.max_queue_size, 1)
        waiting: deque[AsyncResult[Any]] = deque()
        closed = threading.Event()
        # Its threads are daemons and are not joined: a hanging __getitem__ keeps neither the process alive nor an error back.
        pool = ThreadPool(self._dataset.workers)

        def read(number: int) -> tuple[Any, BaseException | None]:
            try:
                return (None if closed.is_set() else self._dataset[number]), None
            except BaseException as error:  # SystemExit would end a thread of the pool, and leave its result open.
                return None, error

        try:
            while True:
                while len(waiting) < ahead and (asked < self._limit or not waiting):
                    number = next(order, None)
                    if number is None:
                        break
                    waiting.append(pool.apply_async(read, (number,)))
                    asked += 1
                if not waiting:
                    return
                batch, error = waiting.popleft().get()
                if error is not None:
                    raise error
                yield batch
        except GeneratorExit:
            closed.set()
            self._wait_for(waiting)
            raise
        finally:
            closed.set()
            pool.terminate()

    def _wait_for(self, results: "Iterable[AsyncResult[Any]]") -> None:
        """Wait for a moment until no thread reads, so that none does so while the next pass begins."""
        until = time.monotonic() + _CLOSE_SECONDS
        for result in results:
            result.wait(max(0.0, until - time.monotonic()))
        late = sum(not result.ready() for result in results)
        if late:
            log_info(
                f"{self.name}: gave up batches that were read ahead: after {_CLOSE_SECONDS:g} s, {late} of its calls of "
                "__getitem__ have not returned."
            )

    def begin_epoch(self) -> None:
        self._dataset.on_epoch_begin()

    def end_epoch(self) -> None:
        self._dataset.on_epoch_end()


class CallableSource(_UserCodeSource):
    """A function that returns the batch of a step, given its number; None or StopIteration ends the pass."""

    can_seek = has_reader = True

    def __init__(self, function: Callable[[int], Any]) -> None:
        super().__init__(f"function {_name_of(function)!r}")  # A name that is the same in all processes.
        self._function = function

    def _made_from(self, number: int) -> Iterator[Any]:
        for step in itertools.count(number):
            try:
                batch = self._function(step)
            except StopIteration:
                return
            if batch is None:
                return
            yield tuple(batch) if isinstance(batch, list) else batch

    def batch_reader(self) -> Callable[[int], Any]:
        return self._picking(lambda number: next(self._made_from(number)))


def _name_of(function: Callable[..., Any]) -> str:
    return function.__name__ if isinstance(function, (FunctionType, MethodType)) else type(function).__name__


class IterableSource(_LeftoverSource):
    """An iterable of batches, which are trees of arrays; an iterator continues from pass to pass."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        super().__init__(type(iterable).__name__, iterable, Pending())
        self.restarts = not isinstance(iterable, Iterator)
        self._iterable = iterable
        self._shuffled: ShuffledData = ShuffledData(iterable, self.name)

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._iterable) if self.restarts else None  # type: ignore[arg-type]  # Some have a length.
        except TypeError:
            return None

    def _made(self) -> Iterator[Any]:
        return self._shuffled.noted(iter(without_added_prefetch(self._iterable)))


_VALUE_FOR_EACH_ROW = "give a value for each row, as numpy.full(rows, value) does"


def check_data(argument: str, data: Any, *, is_arrays: bool = False, may_be_empty: bool = False) -> None:
    """Refuse data, arrays or an object that yields batches, without rows of numbers, for which Keras's errors do not name the argument; arrays
    without rows pass if they ``may_be_empty``.

    Raises:
        InputError: it has none.
    """
    check_depth(argument, data)
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not leaves:
        fix = "pass one of these" if data is None else "pass an array for each input that is not optional"
        raise InputError(
            f"{argument}: expected arrays, or an object that yields batches, got {shown(data)}. Fix: {fix}."
        )
    for leaf in leaves:
        is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array)
        if isinstance(leaf, type):
            raise InputError(
                f"{argument}: expected arrays, or an object that yields batches, got the class {leaf.__name__}. Fix: pass {leaf.__name__}(…)."
            )
        if isinstance(leaf, (bool, int, float, complex, str, bytes)):
            is_number = leaf is data and not isinstance(leaf, (str, bytes))
            fix = _VALUE_FOR_EACH_ROW if is_number else "convert lists with numpy.asarray"
            raise InputError(f"{argument}: expected arrays, got {shown(data)}. Fix: {fix}.")
        if is_arrays and not is_array and not (trainer.can_convert_arrays(leaf) and getattr(leaf, "shape", None)):
            raise InputError(
                f"{argument}: expected arrays (rows, …), got a {type(leaf).__name__}: {shown(leaf)}. Fix: convert it with numpy.asarray."
            )
        if isinstance(leaf, np.ma.MaskedArray):
            raise InputError(
                f"{argument}: expected arrays, got a masked array, whose masked values would be used. Fix: array.filled(value), and a "
                "keras.layers.Masking."
            )
        if is_array and (not leaf.ndim or leaf.dtype.kind in NON_NUMERIC_KINDS or not (may_be_empty or len(leaf))):
            if leaf.dtype.kind in NON_NUMERIC_KINDS:
                fix = "turn texts into numbers, with keras.layers.StringLookup or TextVectorization"
            elif leaf.ndim:
                fix = "leave out what has no rows"
            else:
                fix = _VALUE_FOR_EACH_ROW
            raise InputError(
                f"{argument}: expected rows of numbers, got an array of {leaf.dtype} of shape {leaf.shape}: {shown(leaf)}. Fix: {fix}."
            )


def make_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    shuffle: bool | str = False,
    class_weight: Any = None,
    pending: Callable[[Any], Pending] = lambda generator: Pending(),
    **options: Any,
) -> InputSource:
    """Return the source for the data arguments of ``fit``, ``evaluate`` or ``predict``.

    Args:
        x: inputs, or an object that yields whole batches; a source, such as a distributed data set, is returned as it is.
        y: targets.
        sample_weight: a weight for each row.
        shuffle: whether epochs read the rows in another order each time.
        class_weight: a weight for each class.
        pending: returns the batches that earlier calls read from a generator and did not use; by default none.
        **options: batch_size and steps_per_epoch.

    Raises:
        InputError: a generator or a callable was given together with targets or weights, which it must yield itself.
        ValueError: from Keras, for the same mistake with its kinds of input.
    """
    is_generator = isinstance(x, GeneratorType)
    if isinstance(x, InputSource):
        _refuse_extra_arguments(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
        return x
    if is_generator or (callable(x) and not isinstance(x, (trainer.DataAdapter, keras.utils.PyDataset))):
        _refuse_extra_arguments(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
        return GeneratorSource(x, pending(x)) if is_generator else CallableSource(x)
    read = without_added_prefetch(x)
    adapter = trainer.adapter_of(read, y, sample_weight, shuffle=shuffle, class_weight=class_weight, **options)
    if isinstance(x, keras.utils.PyDataset):
        return DatasetSource(x, adapter, bool(shuffle))
    return AdapterSource(adapter, x)


def make_tree_source(dataset: Any, argument: str = "dataset") -> InputSource:
    """Return the source for batches that are any trees: an iterable, a ``keras.utils.PyDataset``, or a function of the step.

    Raises:
        InputError: the data set is none of them.
    """
    if isinstance(dataset, InputSource):
        return dataset
    if isinstance(dataset, keras.utils.PyDataset):
        return DatasetSource(dataset)
    if isinstance(dataset, Iterable):
        return IterableSource(dataset)
    if callable(dataset):
        return CallableSource(dataset)
    raise InputError(
        f"{argument}: expected an iterable of batches, a keras.utils.PyDataset or a function step -> batch, got {shown(dataset)}. Fix: pass "
        "one of these, such as a list of batches."
    )


def _refuse_extra_arguments(x: Any, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InputError(
            f"{given[0]} was given besides a {type(x).__name__}. Fix: let it come out of the {type(x).__name__} itself, as "
            "(inputs, targets) or (inputs, targets, sample_weights)."
        )
