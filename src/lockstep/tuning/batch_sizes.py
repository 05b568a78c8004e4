"""What :func:`lockstep.batch_size_finder` has found."""

from dataclasses import dataclass
from functools import cached_property

__all__ = ["BatchMeasurement", "BatchSizes"]

CLOSE = 0.05  # a share of the most rows a second


@dataclass(frozen=True)
class BatchMeasurement:
    """One batch that was tried.

    Args:
        rows: of the global batch.
        fits: whether its step fits into memory.
        memory_bytes: what a step takes: on each accelerator, or for all CPU devices of a process together; None where not even the compiler
            could say, for lack of memory.
        seconds: median time of a step; None where it was not run.
        note: why it does not fit, or was not run.
    """

    rows: int
    fits: bool
    memory_bytes: int | None
    seconds: float | None
    note: str = ""

    @property
    def rows_per_second(self) -> float | None:
        """Rows that the devices train on in a second, without the input and Keras's loop."""
        return self.rows / self.seconds if self.seconds else None


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes that were tried, and what follows. ``print`` shows them as a table.

    Args:
        measurements: by rising rows.
        largest: the largest that was found to fit.
        available_bytes: memory that a step may take, of the worker with least; None where no device says.
        is_estimate: whether memory is that of the default executor's program, as the strategy runs several, which have no common figure.
        is_all: whether ``largest`` is all the rows there are.
    """

    measurements: tuple[BatchMeasurement, ...]
    largest: int
    available_bytes: int | None
    is_estimate: bool
    is_all: bool

    @cached_property
    def fastest(self) -> int:
        """The batch with the most rows a second."""
        return max(self._timed, key=lambda found: found[1])[0]

    @cached_property
    def recommended(self) -> int:
        """The smallest batch with at least 95 % of the rows a second of the fastest."""
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
        about = "Memory is an estimate: that of the default executor's program. " if self.is_estimate else ""
        room = (
            "no device says how much memory there is"
            if self.available_bytes is None
            else f"{_size(self.available_bytes)} may be used"
        )
        reach = ", all the rows that there are" if self.is_all else ""
        return [
            f"{about}Largest that fits: {self.largest:,}{reach} ({room}). Fastest: {self.fastest:,}.",
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
