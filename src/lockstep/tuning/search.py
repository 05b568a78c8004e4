"""Which batch sizes are tried: plain arithmetic."""

from collections.abc import Callable, Sequence

__all__ = ["find_largest", "powers_of_two"]

_SMALLEST, _PARTS = 8, 32


def powers_of_two(rows: int, least: int) -> list[int]:
    """Powers of two from a small one, of at least ``least``, up to ``rows``, which comes last."""
    first = max(_SMALLEST, 1 << (least - 1).bit_length())
    return [*(1 << power for power in range(first.bit_length() - 1, rows.bit_length()) if 1 << power < rows), rows]


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool], *, refine: bool) -> int | None:
    """The largest size that fits, where each that is smaller than a fitting one fits, too.

    Args:
        sizes: to try, rising; the search ends with the first that does not fit.
        fits: is asked once for each size that is tried.
        refine: whether sizes between the last that fits and the first that does not are tried, in steps of 1/32 of the last.

    Returns:
        None where not even the first fits.
    """
    largest = None
    for size in sizes:
        if fits(size):
            largest = size
        elif largest is None:
            return None
        else:
            return _between(largest, size, fits) if refine else largest
    return largest


def _between(low: int, high: int, fits: Callable[[int], bool]) -> int:
    step = max(1, low // _PARTS)
    fitting, failing = 0, -(-(high - low) // step)  # in steps above ``low``
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(low + middle * step):
            fitting = middle
        else:
            failing = middle
    return low + fitting * step
