"""Numbers as they are shown, in the terminal and on the page."""

__all__ = ["memory", "number", "ratio", "seconds", "share"]

_MEGABYTE = 1e6


def seconds(value: float) -> str:
    """With a unit that suits it."""
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (600.0, 1.0, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 60:,.0f} min"


def ratio(value: float | None) -> str:
    """How many times."""
    return "–" if value is None else f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def share(part: float, whole: float) -> str:
    """Of a whole, as a percentage."""
    return f"{part / whole:.0%}"


def number(value: float | None) -> str:
    """Of a metric."""
    return "–" if value is None else f"{value:.4g}"


def memory(value: int) -> str:
    """Bytes."""
    return f"{value / _MEGABYTE:,.0f} MB"
