"""Draw curves over two logarithmic axes as SVG, readable on light and dark pages."""

import math
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#8c6bb1", "#2f9e9e", "#9d755d", "#d67195", "#777777")
LEFT, TOP, WIDTH, HEIGHT, GAP = 76, 52, 330, 270, 90


@dataclass(frozen=True)
class Panel:
    """Title (which says what stands on the upright axis), name of the other axis, ticks, and for each curve its points."""

    title: str
    x_label: str
    x_ticks: dict[float, str]
    y_ticks: dict[float, str]
    curves: dict[str, list[tuple[float, float]]]


def draw(path: Path, title: str, panels: list[Panel], all_names: tuple[str, ...]) -> None:
    """Write panels side by side, with one legend below; ``all_names`` have the same colors in every picture."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    color = {name: COLORS[position % len(COLORS)] for position, name in enumerate(all_names)}
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 30
    height = TOP + HEIGHT + 58 + 22 * math.ceil(len(names) / 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',  # Its own page, whatever the page around it.
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (WIDTH + GAP), color)
    for number, name in enumerate(names):
        x, y = LEFT + number % 4 * (width - LEFT - 20) / 4, TOP + HEIGHT + 66 + 22 * (number // 4)
        parts.append(f'<path d="M{x:.0f} {y - 4}h24" stroke="{color[name]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 30:.0f}" y="{y}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _panel(panel: Panel, left: float, color: dict[str, str]) -> list[str]:
    def at(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * _share(x, panel.x_ticks), TOP + HEIGHT * (1 - _share(y, panel.y_ticks))

    bottom = TOP + HEIGHT
    parts = [f'<text x="{left + WIDTH / 2:.0f}" y="28" font-weight="bold" text-anchor="middle">{panel.title}</text>']
    for value, text in panel.x_ticks.items():
        x, _ = at(value, min(panel.y_ticks))
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    for value, text in panel.y_ticks.items():
        _, y = at(min(panel.x_ticks), value)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<text x="{left + WIDTH / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{panel.x_label}</text>')
    for name, points in panel.curves.items():
        line = "L".join("{:.1f} {:.1f}".format(*at(x, y)) for x, y in points)
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{color[name]}" stroke-width="2.5" stroke-linejoin="round"/>'
        )
        parts += [
            '<circle cx="{:.1f}" cy="{:.1f}" r="3.2" fill="{}"/>'.format(*at(x, y), color[name]) for x, y in points
        ]
    return parts


def _share(value: float, ticks: dict[float, str]) -> float:
    low, high = math.log(min(ticks)), math.log(max(ticks))
    return (math.log(value) - low) / (high - low)


def decades(values: list[float], text: dict[float, str]) -> dict[float, str]:
    """The ticks of ``text`` that enclose ``values``."""
    low = max((tick for tick in text if tick <= min(values)), default=min(text))
    high = min((tick for tick in text if tick >= max(values)), default=max(text))
    return {tick: label for tick, label in text.items() if low <= tick <= high}
