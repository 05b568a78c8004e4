"""Charts as SVG by hand: lines over two axes, and stacked bars. Every point can be reached by Tab and says what it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Bar", "Chart", "ChartPoint", "Series", "bar_chart", "line_chart", "standalone", "ticks_of"]

WIDTH, HEIGHT = 460, 270  # of a chart, in units of its own; a letter is 12 high
LEFT, RIGHT, TOP, BOTTOM = 70, 22, 12, 46
_ROW, _LINE, _LETTER = 26, 18, 6.6  # of a bar, of a line of the legend; width of a letter
COLORS = 8  # that the style has
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
        label: what it is, with its unit.
        ticks: where, and the text there; the first and the last are its ends.
        is_log: whether equal factors are equally long.
    """

    label: str
    ticks: dict[float, str]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is between the ends, from 0 to 1."""
        low, high = min(self.ticks), max(self.ticks)
        if low == high:
            return 0.5
        if self.is_log:
            value, low, high = (math.log(max(one, low)) for one in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class ChartPoint:
    """A point; ``text`` says all of it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Args:
        name: in the legend.
        points: in order.
        color: number of a colour.
        dash: number of a way to break the line.
        is_marked: whether points can be reached; without, it is a line to compare with.
        is_joined: whether there is a line.
    """

    name: str
    points: Sequence[ChartPoint]
    color: int
    dash: int = 0
    is_marked: bool = True
    is_joined: bool = True


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its name, and for each part its share of the whole and what is said of it."""

    name: str
    parts: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Chart:
    """A finished chart: what it is called, and its SVG."""

    title: str
    svg: str


def ticks_of(values: Sequence[float], *, is_from_zero: bool = True, count: int = 5) -> dict[float, str]:
    """Round numbers that enclose ``values``, with their text."""
    low, high = (0.0 if is_from_zero else min(values)), max(values)
    if high <= low:
        low, high = low - (0.0 if is_from_zero else 0.5), low + 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return {number * step: _short(round(number * step, 12)) for number in range(first, last + 1)}


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.6g}{unit}"
    return f"{value:,.12g}"


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Chart:
    """Lines over two axes, with a legend below."""
    legend, height = _legend([(one.name, one.color, one.dash if one.is_joined else None) for one in series], HEIGHT)
    parts = [*_axes(x, y), *(part for one in series for part in _line(one, x, y)), *legend]
    return Chart(title, _svg(title, height, parts))


def bar_chart(title: str, names: Sequence[str], bars: Sequence[Bar]) -> Chart:
    """Bars of equal length, divided; ``names`` are those of the parts."""
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
    """The SVG as a file of its own."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" '
    paper = '<rect style="fill:var(--paper)" width="100%" height="100%"/>'  # Its own, whatever the page around it.
    body = chart.svg.replace("<svg ", head, 1)
    return body.replace(">", f"><style>{STYLE}{STYLE_DARK}</style>{paper}", 1) + "\n"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="group" aria-label="{escape(title)}">\n{inside}\n</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(x: Axis, y: Axis) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in y.ticks.items():
        _, at = _place(x, y, min(x.ticks), value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>{_text(LEFT - 6, at + 4, text, "end")}')
    for value, text in x.ticks.items():
        at, _ = _place(x, y, value, min(y.ticks))
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>{_text(at, bottom + 16, text, "middle")}')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(_text((LEFT + right) / 2, bottom + 36, x.label, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, y.label, "middle")}</g>')
    return parts


def _place(x: Axis, y: Axis, at: float, value: float) -> tuple[float, float]:
    return LEFT + (WIDTH - LEFT - RIGHT) * x.share(at), TOP + (HEIGHT - TOP - BOTTOM) * (1 - y.share(value))


def _line(series: Series, x: Axis, y: Axis) -> list[str]:
    places = [_place(x, y, point.x, point.y) for point in series.points]
    color = _color(series.color)
    parts = []
    if series.is_joined and places:
        path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        dash = f' stroke-dasharray="{_DASHES[series.dash % len(_DASHES)]}"' if series.dash else ""
        parts.append(f'<path class="line" style="stroke:{color}"{dash} d="M{path}"/>')
    if series.is_marked:
        for point, (across, up) in zip(series.points, places, strict=True):
            mark = f'<circle class="mark" style="fill:{color}" cx="{across:.1f}" cy="{up:.1f}" r="4"/>'
            parts.append(_reachable(point.text, mark, across, up - 10 if up > TOP + 20 else up + 20))
    return parts


def _bar(bar: Bar, names: Sequence[str], left: float, top: float) -> list[str]:
    parts, at, width = [_text(left - 8, top + 17, bar.name, "end")], left, WIDTH - left - RIGHT - 8
    for color, ((share, text), name) in enumerate(zip(bar.parts, names, strict=True)):
        length = width * share
        shape = f'x="{at:.1f}" y="{top + 3}" width="{length:.1f}" height="{_ROW - 6}"'
        mark = f'<rect class="mark" style="fill:{_color(color)}" {shape}/>'
        parts.append(_reachable(f"{bar.name}, {name}: {text}", mark, at + length / 2, top + 17))
        at += length
    return parts


def _reachable(text: str, mark: str, x: float, y: float) -> str:
    """A mark with its text, which shows where it has the focus or the pointer."""
    half = _LETTER * len(text) / 2
    middle = min(max(x, half + 2), WIDTH - half - 2) if 2 * half < WIDTH else WIDTH / 2
    tip = _text(middle, y, text, "middle", ' class="tip" aria-hidden="true"')
    return f'<g class="point" tabindex="0" role="img" aria-label="{escape(text)}">{mark}{tip}</g>'


def _legend(entries: Sequence[tuple[str, int, int | None]], top: float) -> tuple[list[str], float]:
    """Names beside a piece of their line, or a square; and where the chart ends."""
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
