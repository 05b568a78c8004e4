"""Results of :func:`lockstep.batch_size_finder`, and the search for the largest batch size: plain arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["BatchMeasurement", "BatchSizes", "find_largest", "powers_of_two"]

_SMALLEST, _PARTS = 8, 32
CLOSE = 0.05  # of the highest rate: such a difference in rows a second is ignored


@dataclass(frozen=True)
class BatchMeasurement:
    """The measurement of one batch size.

    Args:
        rows: of the global batch.
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
        room = (
            "the memory of the devices is unknown"
            if self.available_bytes is None
            else f"{_size(self.available_bytes)} may be used"
        )
        reach = ", all rows of x" if self.is_all else ""
        return [
            f"{estimate}Largest that fits: {self.largest:,}{reach} ({room}). Fastest: {self.fastest:,}.",
            f"Recommended: {self.recommended:,}, the smallest with at least {1 - CLOSE:.0%} of the fastest's rows a second: larger ones make fewer "
            "updates of the same rows and gain little time. The learning rate: see lockstep.callbacks.LearningRateScaling.",
        ]


def _line(found: BatchMeasurement) -> str:
    time = f"{1000 * found.seconds:,.2f}" if found.seconds else "-"
    rate = f"{found.rows_per_second:,.0f}" if found.rows_per_second else "-"
    memory = "-" if found.memory_bytes is None else _size(found.memory_bytes)
    return f"{found.rows:>9,} {time:>10} {rate:>11} {memory:>10}  {found.note}"


def _size(number: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    thousands = min(len(units) - 1, (len(f"{float(f'{number:.3g}'):.0f}") - 1) // 3)
    return f"{number / 1000**thousands:.3g} {units[thousands]}"


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
