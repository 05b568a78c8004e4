"""Which global batch: sizes are tried on the model's own training step, by all workers alike."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from lockstep._errors import ClusterError, InputError, ModelError, OptionError, ScopeError, whole_number
from lockstep._keras import trainer
from lockstep.data.device_placement import count_rows
from lockstep.data.fit_entry import ProcessGroup
from lockstep.data.sources import AdapterSource, make_source
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.step_probe import KerasProbes, StepProbe, StepProbes, StrategyProbes
from lockstep.strategies.base import Strategy
from lockstep.strategies.parameter_server import ParameterServerStrategy
from lockstep.tuning.batch_sizes import BatchMeasurement, BatchSizes
from lockstep.tuning.free_memory import free_memory
from lockstep.tuning.size_search import find_largest, powers_of_two

__all__ = ["batch_size_finder"]

_PATIENCE, _FASTER = 2, 1.01  # sizes in a row that are not faster by this end the timing
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def batch_size_finder(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_sizes: Sequence[int] | None = None,
    steps: int = 5,
    memory_limit: int | None = None,
) -> BatchSizes:
    """Measure which global batch fits into memory, and which trains the most rows a second.

    The model's own training step is compiled for each size, and what the compiler says that it needs is compared with what there is before
    it is run, so that nothing is killed for lack of memory. Each size that fits is then run some times, until larger ones are no faster. All of
    this is done on copies: the model, its optimizer and metrics, and all random states stay as they are. What is not built yet is built; ``fit`` then
    looks at one batch less beforehand, and so shuffles the rows of such a model in another order. Several workers call it together with the same arguments: a size fits where it fits on all, and the slowest counts.

    Args:
        model: compiled; of a strategy, or plain Keras.
        x: inputs, a tree of arrays ``(rows, …)``.
        y: targets, likewise.
        sample_weight: a weight for each row, ``(rows,)``.
        batch_sizes: rows of the global batches to try. By default powers of two, from 8 or the number of replicas up to all rows; and then,
            between the last that fits and the first that does not, steps of 1/32, in multiples of the
            replicas, to find the largest.
        steps: how many training steps a size is timed for, after a first that does not count.
        memory_limit: bytes that a step may take: on each accelerator, or for all CPU devices of a process together. By default nine tenths of
            what is free, on a CPU also within the limit of the control group (container).

    Returns:
        The measurements with ``largest``, ``fastest`` and ``recommended``; ``print`` shows a table.

    Raises:
        ClusterError: another worker gave other arguments.
        InputError: x is no tree of arrays.
        ModelError: the model is not compiled, or runs uncompiled.
        OptionError: an argument is out of its range, or not even the smallest size fits.
        ScopeError: servers keep the variables, or a ``keras.distribution`` is active.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> found = lockstep.batch_size_finder(model, np.ones((64, 4)), np.ones((64, 1)))
        >>> [measured.rows for measured in found.measurements], found.largest
        ([8, 16, 32, 64], 64)
    """
    owner = trainer.strategy_of(model)
    _refuse(model, owner)
    data = (x, y, sample_weight)
    _source(data, 1)
    rows, steps = count_rows(data), whole_number("batch_size_finder: steps", steps)
    trials = _trials(model, owner)
    sizes = powers_of_two(rows, trials.replicas) if batch_sizes is None else _asked(batch_sizes, rows)
    process_group = owner._process_group if owner else ProcessGroup()
    on_pause = owner._functions_of(model).pause if owner else lambda: None
    _agree(process_group, [sizes, steps, rows, batch_sizes is None])
    hosts = process_group.all_gather("batch_size_finder: the machines", socket.gethostname())
    if memory_limit is None:
        available = free_memory(trials.devices, hosts.count(socket.gethostname()))
    else:
        available = whole_number("batch_size_finder: memory_limit", memory_limit)
    search = _Search(
        trials, lambda size: _batch(data, size), steps, available, process_group, on_pause, stops=batch_sizes is None
    )
    largest = find_largest(sizes, search.fits, trials.replicas if batch_sizes is None else None)
    found = tuple(sorted(search.found, key=lambda measured: measured.rows))
    if largest is None:
        raise OptionError(
            f"batch_size_finder: not even a batch of {sizes[0]:,} rows fits: {found[0].note}. Give smaller batch_sizes, free memory, or take "
            "gradient accumulation or a smaller model."
        )
    return BatchSizes(found, largest, _least(process_group, available), trials.is_estimate, largest == rows)


class _Search:
    """Tries sizes, and remembers what was found.

    Args:
        trials: of the model.
        batch: gives a batch of so many rows.
        steps: how many are timed.
        available: bytes, or None.
        process_group: the processes.
        on_pause: is called before what may take long.
        stops: whether larger sizes are run no more once they are no faster.
    """

    def __init__(
        self,
        trials: StepProbes,
        batch: Callable[[int], Any],
        steps: int,
        available: int | None,
        process_group: ProcessGroup,
        on_pause: Callable[[], None],
        *,
        stops: bool,
    ) -> None:
        self._trials, self._batch, self._steps, self._available = trials, batch, steps, available
        self._process_group, self._pauses, self._stops = process_group, on_pause, stops
        self._best, self._slower = 0.0, 0
        self.found: list[BatchMeasurement] = []

    def fits(self, rows: int) -> bool:
        """Try a size."""
        self._pauses()
        trial, memory, why = self._compiled(rows)
        memories, reasons = zip(*self._all(f"memory of {rows} rows", [memory, why]), strict=True)
        memory = None if None in memories else max(memories)
        why = next(filter(None, reasons), "")
        seconds, note = None, why
        if not why and self._slower >= _PATIENCE:
            note = "not run: larger batches are no faster"
        elif trial and not why:
            seconds, why = self._timed(trial, rows)
            note = why
        self.found.append(BatchMeasurement(rows, not why, memory, seconds, note))
        return not why

    def _compiled(self, rows: int) -> tuple[StepProbe | None, int | None, str]:
        """What is ready to run, its memory, and why it does not fit, if so."""
        try:
            trial = self._trials.compile(self._batch(rows))
        except jax.errors.JaxRuntimeError as error:
            return None, None, _reason(error)
        devices = self._trials.devices
        memory = trial.memory * (len(devices) if devices[0].platform == "cpu" else 1)
        if self._available is None or memory <= self._available:
            return trial, memory, ""
        return trial, memory, f"it takes {memory:,} bytes, and there are {self._available:,}"

    def _timed(self, trial: StepProbe, rows: int) -> tuple[float | None, str]:
        """Seconds of a step on the slowest process, or why there are none."""
        try:
            own: tuple[float | None, str] = trial.seconds(self._steps), ""
        except jax.errors.JaxRuntimeError as error:
            own = None, _reason(error)
        found, reasons = zip(*self._all(f"seconds of {rows} rows", list(own)), strict=True)
        if any(reasons):
            return None, next(filter(None, reasons))
        seconds = max(found)
        is_faster = rows / seconds > _FASTER * self._best
        self._best = max(self._best, rows / seconds)
        self._slower = 0 if is_faster or not self._stops else self._slower + 1
        return seconds, ""

    def _all(self, what: str, value: Any) -> list[Any]:
        return self._process_group.all_gather(f"batch_size_finder: {what}", value)


def _reason(error: jax.errors.JaxRuntimeError) -> str:
    """Why a size does not fit; what is no lack of memory is raised again."""
    if _NO_MEMORY not in str(error):
        raise error
    return f"the device has no memory for it: {str(error).splitlines()[0]}"


def _least(process_group: ProcessGroup, available: int | None) -> int | None:
    """What the process with least memory has; None where nobody says."""
    return min(
        (own for own in process_group.all_gather("batch_size_finder: memory", available) if own is not None),
        default=None,
    )


def _trials(model: keras.Model, strategy: Strategy | None) -> StepProbes:
    if strategy is None:
        return KerasProbes(model)
    placement = strategy._placement
    executor = strategy._executor_for(placement, model)
    default = executor if type(executor) is SpmdExecutor else SpmdExecutor(placement, strategy.cross_device_ops)
    return StrategyProbes(model, placement, executor, default)


def _batch(data: tuple[Any, ...], rows: int) -> Any:
    """The first rows, as ``fit`` would read them."""
    return next(_source(data, rows).batches())


def _source(data: tuple[Any, ...], rows: int) -> AdapterSource:
    """What ``fit`` would read.

    Raises:
        InputError: they are no arrays.
    """
    source = make_source(*data, batch_size=rows, steps_per_epoch=None, pending=lambda generator: generator)
    if not isinstance(source, AdapterSource) or not source.is_arrays:
        raise InputError(
            f"batch_size_finder: x must be a tree of arrays, of which it makes batches of any size; got {type(data[0]).__name__}."
        )
    return source


def _asked(batch_sizes: Sequence[int], rows: int) -> list[int]:
    sizes = sorted({whole_number("batch_size_finder: batch_sizes", size) for size in batch_sizes})
    if not sizes or sizes[-1] > rows:
        raise OptionError(
            f"batch_size_finder: batch_sizes: expected one size or more of at most {rows:,} rows, which x has, got {list(batch_sizes)!r}."
        )
    return sizes


def _agree(process_group: ProcessGroup, value: list[Any]) -> None:
    found = process_group.all_gather("batch_size_finder", value)
    for index, other in enumerate(found):
        if other != found[0]:
            raise ClusterError(
                f"batch_size_finder: worker {index} was called with other arguments than the chief: sizes, steps, rows and whether to refine are {other}, the "
                f"chief's {found[0]}. Call it on all workers with the same."
            )


def _refuse(model: keras.Model, owner: Any) -> None:
    if isinstance(owner, ParameterServerStrategy):
        raise ScopeError(
            "batch_size_finder: under ParameterServerStrategy each worker has batches of its own and servers make the updates, so there is no step "
            "to measure. Find the batch of one worker with the model in plain Keras or under MirroredStrategy."
        )
    if owner is None and keras.distribution.distribution() is not None:
        raise ScopeError(
            "batch_size_finder: a keras.distribution is active, whose steps it does not know. Train under a strategy, or without."
        )
    if not model.compiled or model.run_eagerly or not model.jit_compile:
        raise ModelError(
            f"batch_size_finder: {model.name!r} {'runs uncompiled' if model.compiled else 'is not compiled'}, so no compiler knows its memory. Call "
            "compile() without run_eagerly and jit_compile=False first."
        )
