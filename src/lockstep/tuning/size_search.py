"""Which batch sizes are tried: plain arithmetic."""

from collections.abc import Callable, Sequence

__all__ = ["find_largest", "powers_of_two"]

_SMALLEST, _PARTS = 8, 32


def powers_of_two(rows: int, least: int) -> list[int]:
    """Powers of two from a small one, of at least ``least``, up to ``rows``, which comes last."""
    first = max(_SMALLEST, 1 << (least - 1).bit_length())
    return [*(1 << power for power in range(first.bit_length() - 1, rows.bit_length()) if 1 << power < rows), rows]


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool], refine: int | None) -> int | None:
    """The largest size that fits, where each that is smaller than a fitting one fits, too.

    Args:
        sizes: to try, rising; the search ends with the first that does not fit.
        fits: is asked once for each size that is tried.
        refine: try multiples of this number between the last that fits and the first that does not, in steps of about 1/32 of the
            last: batches that replicas do not share evenly take more memory than larger ones that they do. None: do not.

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
