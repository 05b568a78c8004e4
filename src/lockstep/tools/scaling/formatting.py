"""Format numbers for the terminal and the HTML page."""

__all__ = ["memory", "number", "ratio", "seconds", "share"]

_MEGABYTE = 1e6


def seconds(value: float) -> str:
    """Format seconds with a suitable unit."""
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (600.0, 1.0, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 60:,.0f} min"


def ratio(value: float | None) -> str:
    """Format a factor, such as a speed-up."""
    return "–" if value is None else f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def share(part: float, whole: float) -> str:
    """Format a part of a whole as a percentage."""
    return f"{part / whole:.0%}"


def number(value: float | None) -> str:
    """Format the value of a metric."""
    return "–" if value is None else f"{value:.4g}"


def memory(value: int) -> str:
    """Format bytes as megabytes."""
    return f"{value / _MEGABYTE:,.0f} MB"
