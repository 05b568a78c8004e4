"""The search for the largest batch size that fits and the fastest one."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import keras

from lockstep._errors import (
    ClusterError,
    InputError,
    ModelError,
    OptionError,
    ScopeError,
    sequence_of,
    shown,
    whole_number,
)
from lockstep._keras import trainer
from lockstep.data.process_group import ProcessGroup
from lockstep.data.sources import InputSource, check_data, make_source
from lockstep.devices.host_memory import host_memory, size_text
from lockstep.devices.placement import count_rows
from lockstep.execution.executors import CentralExecutor, SpmdExecutor
from lockstep.execution.step_measurement import KerasProbes, StepProbe, StrategyProbes
from lockstep.strategies.base import Strategy
from lockstep.strategies.parameter_server import ParameterServerStrategy

_SMALLEST, _PARTS = 8, 32
CLOSE = 0.05  # of the highest rate: such a difference in rows a second is ignored


@dataclass(frozen=True)
class BatchMeasurement:
    """The measurement of one batch size.

    Args:
        rows: number of rows of the global batch.
        fits: whether its step fits into memory.
        memory_bytes: memory of a step: on each accelerator, or for all CPU devices of a process together; None if compiling ran out of
            memory.
        seconds: median time of a step; None if it was not run.
        note: why it does not fit, or was not run.
    """

    rows: int
    fits: bool
    memory_bytes: int | None
    seconds: float | None
    note: str = ""

    @property
    def rows_per_second(self) -> float | None:
        """Rows trained on in a second, without the input and Keras's loop."""
        return self.rows / self.seconds if self.seconds else None


@dataclass(frozen=True)
class BatchSizes:
    """Measured global batch sizes, with a recommendation. ``print`` shows them as a table.

    Args:
        measurements: in the order of their rows.
        largest: the largest size that fits.
        available_bytes: memory that a step may use, on the worker with the least; None if unknown.
        is_estimate: whether memory is that of the default executor's program, because the strategy runs several programs.
        is_all: whether ``largest`` is the number of rows of ``x``.
    """

    measurements: tuple[BatchMeasurement, ...]
    largest: int
    available_bytes: int | None
    is_estimate: bool
    is_all: bool

    @cached_property
    def fastest(self) -> int:
        """The batch size with the most rows a second."""
        return max(self._timed, key=lambda found: found[1])[0]

    @cached_property
    def recommended(self) -> int:
        """The smallest batch size with at least 95 % of the rows a second of the fastest."""
        most = max(rate for _, rate in self._timed)
        return min(rows for rows, rate in self._timed if rate >= (1 - CLOSE) * most)

    @property
    def _timed(self) -> list[tuple[int, float]]:
        return [(found.rows, found.rows_per_second) for found in self.measurements if found.rows_per_second]

    def __str__(self) -> str:
        lines = [f"{'rows':>9} {'ms a step':>10} {'rows/s':>11} {'memory':>10}  "]
        lines += [_line(found) for found in self.measurements]
        return "\n".join([*(line.rstrip() for line in lines), *self._sentences()])

    def _sentences(self) -> list[str]:
        estimate = "Memory is an estimate: that of the default executor's program. " if self.is_estimate else ""
        room = "the memory of the devices is unknown"
        if self.available_bytes is not None:
            room = f"{size_text(self.available_bytes)} may be used"
        reach = ", all rows of x" if self.is_all else ""
        return [
            f"{estimate}Largest that fits: {self.largest:,}{reach} ({room}). Fastest: {self.fastest:,}.",
            f"Recommended: {self.recommended:,}, the smallest with at least {1 - CLOSE:.0%} of the fastest's rows a second: larger ones make fewer "
            "updates of the same rows and gain little time. The learning rate: see lockstep.callbacks.LearningRateScaling.",
        ]


def _line(found: BatchMeasurement) -> str:
    time = f"{1000 * found.seconds:,.2f}" if found.seconds else "-"
    rate = f"{found.rows_per_second:,.0f}" if found.rows_per_second else "-"
    memory = "-" if found.memory_bytes is None else size_text(found.memory_bytes)
    return f"{found.rows:>9,} {time:>10} {rate:>11} {memory:>10}  {found.note}"


def powers_of_two(rows: int, least: int) -> list[int]:
    """Return powers of two of at least ``least`` below ``rows``, and ``rows`` as the last."""
    first = max(_SMALLEST, 1 << (least - 1).bit_length())
    return [*(1 << power for power in range(first.bit_length() - 1, rows.bit_length()) if 1 << power < rows), rows]


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool], refine: int | None) -> int | None:
    """Return the largest size that fits, assuming that all smaller sizes fit, too.

    Args:
        sizes: to try, in rising order; the search ends with the first that does not fit.
        fits: is called once for each size that is tried.
        refine: try multiples of this number between the last size that fits and the first that does not, in steps of about 1/32 of the
            last: a batch that the replicas do not divide evenly needs more memory than a larger one that they do. None: do not.

    Returns:
        None if not even the first size fits.
    """
    largest = None
    for size in sizes:
        if fits(size):
            largest = size
        elif largest is None:
            return None
        else:
            return _between(largest, size, fits, refine) if refine else largest
    return largest


def _between(low: int, high: int, fits: Callable[[int], bool], multiple: int) -> int:
    first, step = low - low % multiple, max(1, low // _PARTS // multiple) * multiple
    fitting, failing = 0, -(-(high - first) // step)  # in steps above ``first``
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(first + middle * step):
            fitting = middle
        else:
            failing = middle
    return first + fitting * step if fitting else low


_PATIENCE, _FASTER = 2, 1.01  # timing ends after 2 sizes in a row that are not 1 % faster
_SHARE = 0.9  # of the free memory; the rest is for allocations that the compiler does not count
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
    """Measure which global batch sizes fit into memory, and which trains the most rows a second.

    The model's training step is compiled for each size. Before it runs, the memory that the compiler reports is compared with the memory
    that is free, so that the process is not killed. Each size that fits is timed for some steps, until larger ones are no faster. Steps run
    on copies: the model, its optimizer and metrics, and all random states are unchanged. What is not built, such as the optimizer before the
    first ``fit``, is built; ``fit`` then reads one batch less in advance, and so shuffles the rows in another order. Several workers call it
    together with the same arguments: a size fits if it fits on all of them, and the time is that of the slowest.

    Args:
        model: compiled; of a strategy, or plain Keras.
        x: inputs, a tree of arrays ``(rows, …)``.
        y: targets, likewise.
        sample_weight: a weight for each row, ``(rows,)``.
        batch_sizes: rows of the global batches to try. By default powers of two, from 8 or the number of replicas up to all rows; and then,
            between the last that fits and the first that does not, steps of 1/32, in multiples of the
            replicas, to find the largest.
        steps: number of training steps that are timed for a size, after a first one that is not counted.
        memory_limit: bytes that a step may use: on each accelerator, or for all CPU devices of a process together. By default nine tenths of
            the free memory, on a CPU also within the limit of the control group (container).

    Returns:
        The measurements with ``largest``, ``fastest`` and ``recommended``; ``print`` shows a table.

    Raises:
        ClusterError: the workers' arguments differ.
        InputError: x is not a tree of arrays.
        ModelError: the model is not compiled, or runs eagerly.
        OptionError: an argument is out of its range, or not even the smallest size fits.
        ScopeError: parameter servers keep the variables, or a ``keras.distribution`` is active.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> found = lockstep.batch_size_finder(model, np.ones((64, 4)), np.ones((64, 1)))
        >>> [measured.rows for measured in found.measurements], found.largest
        ([8, 16, 32, 64], 64)
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"batch_size_finder: model: expected a compiled Keras model, got {shown(model)}. Fix: pass a keras.Model after compile()."
        )
    for name, part in {"x": x, "y": y, "sample_weight": sample_weight}.items():
        if part is not None or name == "x":
            check_data(f"batch_size_finder: {name}", part, is_arrays=name != "x")
    owner = trainer.strategy_of(model)
    _check_model(model, owner)
    data = (x, y, sample_weight)
    _source(data, 1)
    rows, steps = count_rows(data), whole_number("batch_size_finder: steps", steps)
    probes = _make_probes(model, owner)
    sizes = powers_of_two(rows, probes.replicas) if batch_sizes is None else _check_sizes(batch_sizes, rows)
    process_group = owner._process_group if owner else ProcessGroup()
    on_pause = owner._functions_of(model).pause if owner else lambda: None
    _check_same_arguments(process_group, [sizes, steps, rows, batch_sizes is None])
    hosts = process_group.all_gather("batch_size_finder: the machines", socket.gethostname())
    if memory_limit is None:
        available = _free_memory(probes.devices, hosts.count(socket.gethostname()))
    else:
        available = whole_number("batch_size_finder: memory_limit", memory_limit)
    search = _Search(
        probes, lambda size: _batch(data, size), steps, available, process_group, on_pause, stops=batch_sizes is None
    )
    largest = find_largest(sizes, search.fits, probes.replicas if batch_sizes is None else None)
    found = tuple(sorted(search.found, key=lambda measured: measured.rows))
    if largest is None:
        raise OptionError(
            f"batch_size_finder: not even a batch of {sizes[0]:,} rows fits: {found[0].note}. Fix: use smaller batch_sizes, free memory, or use "
            "gradient accumulation or a smaller model."
        )
    return BatchSizes(found, largest, _least(process_group, available), probes.is_estimate, largest == rows)


class _Search:
    """Measures sizes, and collects the measurements; ``on_pause`` is called before each, which may take long. If it ``stops``, timing ends when
    larger sizes are no faster.
    """

    def __init__(
        self,
        probes: StrategyProbes | KerasProbes,
        batch: Callable[[int], Any],
        steps: int,
        available: int | None,
        process_group: ProcessGroup,
        on_pause: Callable[[], None],
        *,
        stops: bool,
    ) -> None:
        self._probes, self._batch, self._steps, self._available = probes, batch, steps, available
        self._process_group, self._on_pause, self._stops = process_group, on_pause, stops
        self._best, self._slower = 0.0, 0
        self.found: list[BatchMeasurement] = []

    def fits(self, rows: int) -> bool:
        """Measure a size; return whether it fits."""
        self._on_pause()
        probe, memory, why = self._compile(rows)
        memories, reasons = zip(*self._all_gather(f"memory of {rows} rows", [memory, why]), strict=True)
        memory = None if None in memories else max(memories)
        why = next(filter(None, reasons), "")
        seconds, note = None, why
        if not why and self._slower >= _PATIENCE:
            note = "not run: larger batches are no faster"
        elif probe and not why:
            seconds, why = self._time(probe, rows)
            note = why
        self.found.append(BatchMeasurement(rows, not why, memory, seconds, note))
        return not why

    def _compile(self, rows: int) -> tuple[StepProbe | None, int | None, str]:
        """Return the compiled step, its memory, and why it does not fit, if so."""
        try:
            probe = self._probes.compile(self._batch(rows))
        except jax.errors.JaxRuntimeError as error:
            return None, None, _reason(error)
        devices = self._probes.devices
        memory = probe.memory * (len(devices) if devices[0].platform == "cpu" else 1)
        if self._available is None or memory <= self._available:
            return probe, memory, ""
        return probe, memory, f"it needs {memory:,} bytes, and {self._available:,} are available"

    def _time(self, probe: StepProbe, rows: int) -> tuple[float | None, str]:
        """Return the seconds of a step on the slowest process, or why there are none."""
        try:
            own: tuple[float | None, str] = probe.run(self._steps)[0], ""
        except jax.errors.JaxRuntimeError as error:
            own = None, _reason(error)
        found, reasons = zip(*self._all_gather(f"seconds of {rows} rows", list(own)), strict=True)
        if any(reasons):
            return None, next(filter(None, reasons))
        seconds = max(found)
        is_faster = rows / seconds > _FASTER * self._best
        self._best = max(self._best, rows / seconds)
        self._slower = 0 if is_faster or not self._stops else self._slower + 1
        return seconds, ""

    def _all_gather(self, what: str, value: Any) -> list[Any]:
        return self._process_group.all_gather(f"batch_size_finder: {what}", value)


def _reason(error: jax.errors.JaxRuntimeError) -> str:
    """Return why a size does not fit; errors other than a lack of memory are raised again."""
    if _NO_MEMORY not in str(error):
        raise error
    return f"the device has no memory for it: {next(line for line in str(error).splitlines() if _NO_MEMORY in line)}"


def _least(process_group: ProcessGroup, available: int | None) -> int | None:
    """Return the memory of the process with the least; None if unknown."""
    found = process_group.all_gather("batch_size_finder: memory", available)
    return min((own for own in found if own is not None), default=None)


def _make_probes(model: keras.Model, strategy: Strategy | None) -> StrategyProbes | KerasProbes:
    if strategy is None:
        return KerasProbes(model)
    placement = strategy._placement
    executor = strategy._executor_for(placement, model)
    if isinstance(executor, SpmdExecutor) and not isinstance(executor, CentralExecutor):  # Its step is one program.
        return StrategyProbes(model, placement, executor, executor)
    default = SpmdExecutor(placement, strategy.cross_device_ops)
    return StrategyProbes(model, placement, executor, default)


def _batch(data: tuple[Any, ...], rows: int) -> Any:
    """Return the first rows, as ``fit`` would read them."""
    return next(_source(data, rows).batches())


def _source(data: tuple[Any, ...], rows: int) -> InputSource:
    """Return the input as ``fit`` would read it.

    Raises:
        InputError: it is not arrays.
    """
    source = make_source(*data, batch_size=rows, steps_per_epoch=None)
    if not source.is_arrays:
        raise InputError(
            f"batch_size_finder: x must be a tree of arrays, of which it makes batches of any size; got {type(data[0]).__name__}. Fix: pass arrays, "
            "such as some rows of the data set."
        )
    return source


def _check_sizes(batch_sizes: Sequence[int], rows: int) -> list[int]:
    name = "batch_size_finder: batch_sizes"
    sizes = sorted({whole_number(name, size) for size in sequence_of(name, batch_sizes, "numbers such as (32, 64)")})
    if not sizes or sizes[-1] > rows:
        raise OptionError(
            f"batch_size_finder: batch_sizes: expected one or more sizes, each of at most {rows:,} rows, the rows of x, got {shown(list(batch_sizes))}. Fix: "
            "leave out larger ones, or pass more rows."
        )
    return sizes


def _check_same_arguments(process_group: ProcessGroup, value: list[Any]) -> None:
    found = process_group.all_gather("batch_size_finder", value)
    for index, other in enumerate(found):
        if other != found[0]:
            raise ClusterError(
                f"batch_size_finder: worker {index} was called with other arguments than the chief: sizes, steps, rows and whether to refine are {other}, the "
                f"chief's {found[0]}. Fix: call it on all workers with the same arguments."
            )


def _check_model(model: keras.Model, owner: Any) -> None:
    if isinstance(owner, ParameterServerStrategy):
        raise ScopeError(
            "batch_size_finder: under ParameterServerStrategy each worker has separate batches and servers make the updates, so there is no step "
            "to measure. Fix: find the batch size of one worker with the model in plain Keras or under MirroredStrategy."
        )
    if owner is None and keras.distribution.distribution() is not None:
        raise ScopeError(
            "batch_size_finder: a keras.distribution is active, whose steps it cannot measure. Fix: train under a strategy, or without the distribution."
        )
    if not model.compiled or not trainer.is_compiled(model):
        raise ModelError(
            f"batch_size_finder: {model.name!r} {'runs uncompiled' if model.compiled else 'is not compiled'}, so its memory is unknown. Fix: call "
            "compile() without run_eagerly and jit_compile=False first."
        )


def _free_memory(devices: Sequence[jax.Device], processes_here: int = 1) -> int | None:
    """Return the bytes that a step may use: on each accelerator, or on this machine, whose memory several processes of the job may share, for
    all CPU devices of this one.

    Returns:
        Nine tenths of the free memory; None if unknown.
    """
    if devices[0].platform == "cpu":
        free = host_memory().free
        return None if free is None else int(_SHARE * free / processes_here)
    known = [memory for device in devices if (memory := device.memory_stats())]
    left = [memory["bytes_limit"] - memory["bytes_in_use"] for memory in known if "bytes_limit" in memory]
    return int(_SHARE * min(left)) if left else None
