"""SVG charts: lines over two axes, and stacked bars. Every point is reachable by Tab and has a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Bar", "Chart", "ChartPoint", "Series", "bar_chart", "line_chart", "standalone", "ticks_of"]

WIDTH, HEIGHT = 460, 270  # of a chart, in its own units; a letter is 12 high
LEFT, RIGHT, TOP, BOTTOM = 70, 22, 12, 46
_ROW, _LINE, _LETTER = 26, 18, 6.6  # of a bar, of a line of the legend; width of a letter
COLORS = 8  # in the style
STYLE = """
.chart{--ink:#1b1f24;--faint:#d5d9de;--paper:#fff;--c0:#0b62a8;--c1:#c2500a;--c2:#197a4b;--c3:#9b2a73;--c4:#7a5c00;--c5:#4d5bc9;
--c6:#00777a;--c7:#b3202c;font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;display:block;width:100%;height:auto}
.chart text{fill:var(--ink)}.chart .grid{stroke:var(--faint)}.chart .axis{stroke:var(--ink)}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}.chart .tip{visibility:hidden;font-weight:600;paint-order:stroke;
stroke:var(--paper);stroke-width:5px;stroke-linejoin:round;pointer-events:none}
.chart .point:hover .tip,.chart .point:focus .tip{visibility:visible}.chart .point:focus{outline:none}
.chart .point:focus .mark{stroke:var(--ink);stroke-width:3}
"""
_DARK = "{--ink:#e8eaed;--faint:#3c434b;--paper:#14171a;--c0:#6cb6ff;--c1:#ff9e5e;--c2:#5fd39a;--c3:#f08fcb;--c4:#e2c04c;--c5:#aab4ff;\n--c6:#4fd0d3;--c7:#ff8a8f}"
STYLE_DARK = f"@media screen and (prefers-color-scheme:dark){{.chart{_DARK}}}\n"
_DASHES = ("", "6 4", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        label: with the unit.
        ticks: positions and their texts; the first and the last are the ends of the axis.
        is_log: whether the axis is logarithmic.
    """

    label: str
    ticks: dict[float, str]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value between the ends, from 0 to 1."""
        low, high = min(self.ticks), max(self.ticks)
        if low == high:
            return 0.5
        if self.is_log:
            value, low, high = (math.log(max(one, low)) for one in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class ChartPoint:
    """A point; ``text`` describes it completely."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Series:
    """A series of points.

    Args:
        name: in the legend.
        points: in order.
        color: index of the colour.
        dash: index of the dash pattern.
        is_marked: whether points have focusable marks; a reference line has none.
        is_joined: whether a line joins the points.
    """

    name: str
    points: Sequence[ChartPoint]
    color: int
    dash: int = 0
    is_marked: bool = True
    is_joined: bool = True


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its name, and for each part its share of the whole and its text."""

    name: str
    parts: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Chart:
    """A rendered chart: its title and its SVG."""

    title: str
    svg: str


def ticks_of(values: Sequence[float], *, is_from_zero: bool = True, count: int = 5) -> dict[float, str]:
    """Return round numbers that enclose ``values``, with their texts."""
    low, high = (0.0 if is_from_zero else min(values)), max(values)
    if high <= low:
        low, high = low - (0.0 if is_from_zero else 0.5), low + 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return {number * step: _format_tick(round(number * step, 12)) for number in range(first, last + 1)}


def _format_tick(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.6g}{unit}"
    return f"{value:,.12g}"


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Chart:
    """Draw lines over two axes, with a legend below."""
    legend, height = _legend([(one.name, one.color, one.dash if one.is_joined else None) for one in series], HEIGHT)
    parts = [*_axes(x, y), *(part for one in series for part in _line(one, x, y)), *legend]
    return Chart(title, _svg(title, height, parts))


def bar_chart(title: str, names: Sequence[str], bars: Sequence[Bar]) -> Chart:
    """Draw stacked bars of equal length; ``names`` are those of the parts."""
    left = 14 + _LETTER * max(len(bar.name) for bar in bars)
    bottom = TOP + _ROW * len(bars)
    parts = []
    for tenth in (0, 25, 50, 75, 100):
        at = left + (WIDTH - left - RIGHT - 8) * tenth / 100
        parts.append(
            f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>{_text(at, bottom + 16, f"{tenth} %", "middle")}'
        )
    for number, bar in enumerate(bars):
        parts += _bar(bar, names, left, TOP + _ROW * number)
    legend, height = _legend([(name, color, None) for color, name in enumerate(names)], bottom + 24)
    return Chart(title, _svg(title, height, [*parts, *legend]))


def standalone(chart: Chart) -> str:
    """Return the chart as the text of a standalone SVG file."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" '
    background = '<rect style="fill:var(--paper)" width="100%" height="100%"/>'  # The background, which does not depend on the page around the chart.
    body = chart.svg.replace("<svg ", head, 1)
    return body.replace(">", f"><style>{STYLE}{STYLE_DARK}</style>{background}", 1) + "\n"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="group" aria-label="{escape(title)}">\n{inside}\n</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(x: Axis, y: Axis) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in y.ticks.items():
        _, at = _position(x, y, min(x.ticks), value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>{_text(LEFT - 6, at + 4, text, "end")}')
    for value, text in x.ticks.items():
        at, _ = _position(x, y, value, min(y.ticks))
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>{_text(at, bottom + 16, text, "middle")}')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(_text((LEFT + right) / 2, bottom + 36, x.label, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, y.label, "middle")}</g>')
    return parts


def _position(x: Axis, y: Axis, at: float, value: float) -> tuple[float, float]:
    return LEFT + (WIDTH - LEFT - RIGHT) * x.fraction(at), TOP + (HEIGHT - TOP - BOTTOM) * (1 - y.fraction(value))


def _line(series: Series, x: Axis, y: Axis) -> list[str]:
    positions = [_position(x, y, point.x, point.y) for point in series.points]
    color = _color(series.color)
    parts = []
    if series.is_joined and positions:
        path = "L".join(f"{across:.1f} {up:.1f}" for across, up in positions)
        dash = f' stroke-dasharray="{_DASHES[series.dash % len(_DASHES)]}"' if series.dash else ""
        parts.append(f'<path class="line" style="stroke:{color}"{dash} d="M{path}"/>')
    if series.is_marked:
        for point, (across, up) in zip(series.points, positions, strict=True):
            mark = f'<circle class="mark" style="fill:{color}" cx="{across:.1f}" cy="{up:.1f}" r="4"/>'
            parts.append(_focusable(point.text, mark, across, up - 10 if up > TOP + 20 else up + 20))
    return parts


def _bar(bar: Bar, names: Sequence[str], left: float, top: float) -> list[str]:
    parts, at, width = [_text(left - 8, top + 17, bar.name, "end")], left, WIDTH - left - RIGHT - 8
    for color, ((share, text), name) in enumerate(zip(bar.parts, names, strict=True)):
        length = width * share
        shape = f'x="{at:.1f}" y="{top + 3}" width="{length:.1f}" height="{_ROW - 6}"'
        mark = f'<rect class="mark" style="fill:{_color(color)}" {shape}/>'
        parts.append(_focusable(f"{bar.name}, {name}: {text}", mark, at + length / 2, top + 17))
        at += length
    return parts


def _focusable(text: str, mark: str, x: float, y: float) -> str:
    """Draw a focusable mark whose text appears on focus or hover."""
    half = _LETTER * len(text) / 2
    middle = min(max(x, half + 2), WIDTH - half - 2) if 2 * half < WIDTH else WIDTH / 2
    tip = _text(middle, y, text, "middle", ' class="tip" aria-hidden="true"')
    return f'<g class="point" tabindex="0" role="img" aria-label="{escape(text)}">{mark}{tip}</g>'


def _legend(entries: Sequence[tuple[str, int, int | None]], top: float) -> tuple[list[str], float]:
    """Draw names beside a sample of their line or a square; also return the bottom of the chart."""
    parts, across, y = [], 10.0, top + 12
    for name, color, dash in dict.fromkeys(entries):
        width = 34 + _LETTER * len(name)
        if across + width > WIDTH and across > 10:
            across, y = 10.0, y + _LINE
        style = _color(color)
        if dash is None:
            parts.append(f'<rect style="fill:{style}" x="{across:.1f}" y="{y - 9:.1f}" width="11" height="11"/>')
        else:
            broken = f' stroke-dasharray="{_DASHES[dash % len(_DASHES)]}"' if dash else ""
            parts.append(f'<path class="line" style="stroke:{style}"{broken} d="M{across:.1f} {y - 4:.1f}h20"/>')
        parts.append(_text(across + (16 if dash is None else 25), y, name))
        across += width + 8
    return parts, y + 8


def _color(number: int) -> str:
    return f"var(--c{number % COLORS})"
