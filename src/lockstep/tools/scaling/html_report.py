"""The HTML page of a scaling report, and its charts as SVG."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING

from lockstep._logging import counted
from lockstep.tools.scaling.prediction import Prediction
from lockstep.tools.scaling.results import (
    CurvePoint,
    ScalingRow,
    ScalingTable,
    format_memory,
    format_number,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from lockstep.tools.scaling.api import ScalingReport

WIDTH, HEIGHT = 460, 270  # of a chart, in its own units; a letter is 12 high
LEFT, RIGHT, TOP, BOTTOM = 70, 22, 12, 46
_ROW, _LINE, _LETTER = 26, 18, 6.6  # of a bar, of a line of the legend; width of a letter
COLORS = 8  # in the style
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
    for row, bar in enumerate(bars):
        parts += _bar(bar, names, left, TOP + _ROW * row)
    legend, height = _legend([(name, color, None) for color, name in enumerate(names)], bottom + 24)
    return Chart(title, _svg(title, height, [*parts, *legend]))


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
    for color, ((part, text), name) in enumerate(zip(bar.parts, names, strict=True)):
        length = width * part
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


_PARTS = ("compute", "communication", "input", "host")


@dataclass(frozen=True)
class Figure:
    """A chart with its table."""

    chart: Chart
    text: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def figures_of(table: ScalingTable, prediction: Prediction | None) -> list[Figure]:
    """Draw all figures that have data."""
    rows = [row for row in table.rows if row.setting.devices]
    if not rows:
        return []
    figures = [_throughput(rows)]
    figures += [figure for is_weak in (False, True) if (figure := _efficiency(rows, is_weak=is_weak))]
    figures.append(_shares(table.rows))
    if table.metric and any(_is_drawn(point) for row in rows for point in row.measured.curve):
        figures += [_metric(table, rows, by_rows=by_rows) for by_rows in (True, False)]
    if prediction:
        figures += [_predicted(prediction), _checked(prediction)]
    return figures


def _throughput(rows: Sequence[ScalingRow]) -> Figure:
    series = []
    for color, batch in enumerate(_batches(rows)):
        points = [
            ChartPoint(
                row.setting.devices, row.rows_per_second, f"{row.setting.name}: {row.rows_per_second:,.0f} rows/s"
            )
            for row in rows
            if row.setting.batch == batch
        ]
        series.append(Series(f"batch {batch}", points, color))
    y = Axis("rows/s", ticks_of([row.rows_per_second for row in rows]))
    lines = tuple(
        (
            *row.setting.cells,
            f"{row.rows_per_second:,.0f}",
            f"{1e3 * row.step:.3g}",
            f"{1e3 * row.low:.3g} – {1e3 * row.high:.3g}",
        )
        for row in rows
    )
    text = "Rows of training data per second, from the median of the blocks of steps within fit. The global batch is the same along a line."
    columns = ("devices", "global batch", "rows/s", "ms a step", "half of the blocks")
    return Figure(line_chart("Throughput", _devices(rows), y, series), text, columns, lines)


def _efficiency(rows: Sequence[ScalingRow], *, is_weak: bool) -> Figure | None:
    speed_ups = [(row, row.weak if is_weak else row.strong) for row in rows]
    known = [(row, value, value / row.setting.devices) for row, value in speed_ups if value is not None]
    if not any(row.setting.devices > 1 for row, _, _ in known):
        return None
    keys = sorted({row.per_device if is_weak else row.setting.batch for row, _, _ in known})
    series = []
    for color, key in enumerate(keys):
        points = [
            ChartPoint(row.setting.devices, efficiency, f"{row.setting.name}: {efficiency:.0%}")
            for row, _, efficiency in known
            if (row.per_device if is_weak else row.setting.batch) == key
        ]
        series.append(Series(f"{key:g} a device" if is_weak else f"batch {key:g}", points, color))
    ticks = ticks_of([1.0, *(efficiency for _, _, efficiency in known)])
    axis = Axis("efficiency", {place: f"{place:.0%}" for place in ticks})
    title = "Weak scaling: same batch on each device" if is_weak else "Strong scaling: same global batch"
    text = "Rows per second, divided by those of one device and by the number of devices. 100 % is ideal."
    lines = tuple(
        (*row.setting.cells, f"{row.per_device:g}", format_ratio(value), f"{efficiency:.0%}")
        for row, value, efficiency in known
    )
    columns = ("devices", "global batch", "a device", "speed-up", "efficiency")
    return Figure(line_chart(title, _devices(rows), axis, series), text, columns, lines)


def _shares(rows: Sequence[ScalingRow]) -> Figure:
    bars, lines = [], []
    for row in rows:
        parts = [part / row.step for part in asdict(row.shares).values()]
        name = f"{row.setting.devices or 'Keras'} × {row.setting.batch}"
        texts = [f"{part:.0%}, {format_seconds(part * row.step)}" for part in parts]
        bars.append(Bar(name, list(zip(parts, texts, strict=True))))
        shown = [f"{part:.0%}" for part in parts]
        lines.append((*row.setting.cells, format_seconds(row.step), *shown))
    text = (
        "Devices × global batch. Compute: the compiled step alone, repeated on one batch, less the all-reduce. Communication: an all-reduce of arrays "
        "like the gradients alone. Input: the time that devices wait for batches. Host: the rest of a step within fit."
    )
    return Figure(
        bar_chart("Where a step's time goes", _PARTS, bars), text, ("devices", "batch", "a step", *_PARTS), tuple(lines)
    )


def _is_drawn(point: CurvePoint) -> bool:
    """Return whether to draw a point: not the value before training, which would compress the axis, and no value that has diverged."""
    return point.rows > 0 and math.isfinite(point.value)


def _metric(table: ScalingTable, rows: Sequence[ScalingRow], *, by_rows: bool) -> Figure:
    name, batches = table.metric or "", _batches(rows)
    counts = sorted({row.setting.devices for row in rows})
    series = []
    for row in rows:
        points = [
            ChartPoint(
                point.rows if by_rows else point.seconds,
                point.value,
                f"{row.setting.name}: {name} {point.value:.4g} after {f'{point.rows:,} rows' if by_rows else format_seconds(point.seconds)}",
            )
            for point in row.measured.curve
            if _is_drawn(point)
        ]
        color, dash = batches.index(row.setting.batch), counts.index(row.setting.devices)
        series.append(Series(row.setting.name, points, color, dash))
    places = [point.x for one in series for point in one.points]
    y = Axis(name, ticks_of([point.y for one in series for point in one.points], is_from_zero=False))
    x = Axis("rows trained on" if by_rows else "seconds of training", ticks_of(places, count=4))
    equal = f"{table.equal_rows:,} rows" if by_rows else format_seconds(table.equal_seconds)
    text = (
        f"On validation data; evaluation is not timed. Settings are compared after equal {'rows' if by_rows else 'time'}: {equal}, the smallest "
        "total of all settings."
    )
    lines = tuple((*row.setting.cells, format_number(row.at_rows if by_rows else row.at_time)) for row in rows)
    columns = ("devices", "global batch", f"{name} after {equal}")
    title = f"{name} by {'rows' if by_rows else 'time'}"
    return Figure(line_chart(title[0].upper() + title[1:], x, y, series), text, columns, lines)


def _predicted(prediction: Prediction) -> Figure:
    both = (("strong", prediction.strong), ("weak", prediction.weak))
    series = [
        Series(
            f"{kind} scaling",
            [
                ChartPoint(one.devices, one.speed_up, f"{kind}, {one.devices:,} devices: {format_ratio(one.speed_up)}")
                for one in found
            ],
            color,
        )
        for color, (kind, found) in enumerate(both)
    ]
    most = prediction.weak[-1].devices
    series.append(Series("perfect", [ChartPoint(1, 1, ""), ChartPoint(most, most, "")], 4, 1, is_marked=False))
    lowest = math.floor(math.log2(min(1.0, *(one.speed_up for _, found in both for one in found))) / 2)
    ticks = {4.0**power: f"{4**power:,}" if power >= 0 else f"1/{4**-power}" for power in range(lowest, 6)}
    counts = {place: text for place, text in ticks.items() if place >= 1}
    chart = line_chart("Predicted speed-up", Axis("devices", counts, True), Axis("speed-up", ticks, True), series)
    lines = tuple(
        (
            kind,
            f"{one.devices:,}",
            f"{one.batch:,}",
            format_seconds(one.seconds),
            f"{one.batch / one.seconds:,.0f}",
            format_ratio(one.speed_up),
            f"{one.shares.communication / one.seconds:.0%}",
        )
        for kind, found in both
        for one in found
        if one.devices >= 8
    )
    columns = ("scaling", "devices", "global batch", "a step", "rows/s", "speed-up", "communication")
    return Figure(chart, f"Predicted, not measured. {prediction.described}. {prediction.error}.", columns, lines)


def _checked(prediction: Prediction) -> Figure:
    counts = sorted({row.setting.devices for row, _, _ in prediction.checks})
    series = [
        Series(
            counted(count, "device"),
            [
                ChartPoint(
                    1e3 * row.step,
                    1e3 * found,
                    f"{row.setting.name}: {format_seconds(row.step)}, predicted {format_seconds(found)}, {error:+.0%}",
                )
                for row, found, error in prediction.checks
                if row.setting.devices == count
            ],
            color,
            is_joined=False,
        )
        for color, count in enumerate(counts)
    ]
    most = 1e3 * max(max(row.step, found) for row, found, _ in prediction.checks)
    ticks = ticks_of([most])
    line = Series("equal", [ChartPoint(0, 0, ""), ChartPoint(max(ticks), max(ticks), "")], 4, 1, is_marked=False)
    chart = line_chart(
        "Error of the prediction",
        Axis("ms a step, measured", ticks),
        Axis("ms a step, predicted", ticks),
        [*series, line],
    )
    text = (
        f"The same formula on the measured settings. {prediction.error}. Expect at least this error in the prediction."
    )
    lines = tuple(
        (*row.setting.cells, format_seconds(row.step), format_seconds(found), f"{error:+.0%}")
        for row, found, error in prediction.checks
    )
    return Figure(chart, text, ("devices", "global batch", "measured", "predicted", "error"), lines)


def _batches(rows: Sequence[ScalingRow]) -> list[int]:
    return sorted({row.setting.batch for row in rows})


def _devices(rows: Sequence[ScalingRow]) -> Axis:
    counts = sorted({row.setting.devices for row in rows})
    return Axis("devices", {float(count): str(count) for count in counts}, is_log=True)


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--faint:#d5d9de;--card:#f6f8fa;--accent:#0b62a8}
*{box-sizing:border-box}body{margin:0 auto;max-width:1320px;padding:1rem clamp(.75rem,3vw,2.5rem) 3rem;background:var(--paper);
color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.25rem;margin:2rem 0 .5rem}h3{font-size:1.05rem;margin:0 0 .25rem}section>h3{margin-top:1.5rem}
.soft{color:var(--soft);font-size:.9rem}.take{border-left:4px solid var(--accent);background:var(--card);padding:.75rem 1rem;
margin:1rem 0}.take ul{margin:0;padding-left:1.1rem}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr));
gap:1.25rem}figure{margin:0;padding:1rem;border:1px solid var(--faint);border-radius:8px;min-width:0}figcaption p{margin:.25rem 0 .75rem}
.scroll{overflow-x:auto;margin-top:.75rem}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;
overflow-wrap:normal}th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--faint)}th{text-align:right;vertical-align:bottom}
td{white-space:nowrap}
figure th,figure td{padding:.25rem .4rem;font-size:.8rem}
td:first-child,th:first-child{text-align:left;padding-left:0}code{font-size:.9em}a:focus-visible,.scroll:focus-visible{outline:3px solid
var(--accent);outline-offset:2px}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e8eaed;--soft:#a6adb5;--faint:#3c434b;--card:#1f242a;--accent:#6cb6ff}}
.chart{--ink:#1b1f24;--faint:#d5d9de;--paper:#fff;--c0:#0b62a8;--c1:#c2500a;--c2:#197a4b;--c3:#9b2a73;--c4:#7a5c00;--c5:#4d5bc9;
--c6:#00777a;--c7:#b3202c;font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;display:block;width:100%;height:auto}
.chart text{fill:var(--ink)}.chart .grid{stroke:var(--faint)}.chart .axis{stroke:var(--ink)}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}.chart .tip{visibility:hidden;font-weight:600;paint-order:stroke;
stroke:var(--paper);stroke-width:5px;stroke-linejoin:round;pointer-events:none}
.chart .point:hover .tip,.chart .point:focus .tip{visibility:visible}.chart .point:focus{outline:none}
.chart .point:focus .mark{stroke:var(--ink);stroke-width:3}
@media screen and (prefers-color-scheme:dark){.chart{--ink:#e8eaed;--faint:#3c434b;--paper:#14171a;--c0:#6cb6ff;--c1:#ff9e5e;--c2:#5fd39a;--c3:#f08fcb;--c4:#e2c04c;--c5:#aab4ff;
--c6:#4fd0d3;--c7:#ff8a8f}}
@media print{:root{color-scheme:light}body{max-width:none;padding:0;font-size:10pt}.figures{display:block}figure,.take,tr{break-inside:avoid}
figure{margin-bottom:1rem}.chart{max-width:420pt}.scroll{overflow:visible}table{font-size:7.5pt}th,td{padding:.15rem .35rem}}
"""
_METHOD = (
    "Each setting ran in a new process, one after the other. The time of a step is the median over blocks of steps within fit; devices "
    "are idle at both ends of a block. The first three steps, which compile, are excluded. ± is half the interquartile range.",
    "Strong scaling keeps the global batch: each device gets fewer rows. Weak scaling keeps the batch per device: the global batch grows.",
    "Communication is measured alone, on idle devices. In a real step the time that devices wait for each other counts as compute.",
    "Logical CPU devices share the cores of one machine. They show the cost of a strategy, not the gain of separate machines.",
    "Keras means plain Keras on one device, without a strategy; input and host time cannot be separated there.",
)


def page_of(report: "ScalingReport") -> str:
    """Render the page."""
    title = f"Scaling of {report.title}"
    metadata = f"{escape(report.machine)}<br>Command: <code>{escape(report.command)}</code>"
    figures = figures_of(report.table, report.outlook)
    notes = [*report.notes, *_METHOD]
    parts = [
        f'<header><h1>{escape(title)}</h1><p class="soft">{metadata}</p></header><main>',
        f'<section class="take" aria-label="Recommendation">{bulleted(report.recommendation)}</section>',
        "<section><h2>All settings</h2>",
        _settings_table(report.table) if report.table.rows else "<p>No setting could be measured.</p>",
        _failures(report.table),
        '</section><section><h2>Charts</h2><div class="figures">',
        *(figure_of(figure) for figure in figures),
        f'</div></section><section><h2>How it was measured</h2><div class="soft">{bulleted(notes)}</div></section></main>',
    ]
    return html_page(title, parts)


def html_page(title: str, parts: Sequence[str]) -> str:
    """Return a page of these parts, without external files."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *parts, "</body></html>\n"])


def bulleted(sentences: Sequence[str]) -> str:
    """Return a list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _settings_table(table: ScalingTable) -> str:
    columns = ["devices", "global batch", "a device", "ms a step", "±", "s an epoch", "rows/s"]
    columns += ["strong", "efficiency", "weak", "efficiency"]
    if table.metric:
        columns += [f"{table.metric} after {table.equal_rows:,} rows", f"after {format_seconds(table.equal_seconds)}"]
    lines = [_cells(row, with_metric=bool(table.metric)) for row in table.rows]
    return html_table("All settings", [*columns, "memory"], lines)


def _cells(row: ScalingRow, *, with_metric: bool) -> list[str]:
    efficiencies = ["–" if value is None else f"{value:.0%}" for value in (row.strong_efficiency, row.weak_efficiency)]
    return [
        str(row.setting.devices or "Keras"),
        f"{row.setting.batch:,}",
        f"{row.per_device:g}",
        f"{1e3 * row.step:.3g}",
        f"{row.spread:.0%}",
        f"{row.epoch:.3g}",
        f"{row.rows_per_second:,.0f}",
        format_ratio(row.strong),
        efficiencies[0],
        format_ratio(row.weak),
        efficiencies[1],
        *([format_number(row.at_rows), format_number(row.at_time)] if with_metric else []),
        format_memory(row.measured.memory),
    ]


def _failures(table: ScalingTable) -> str:
    if not table.failed:
        return ""
    return f"<h3>Not measured</h3>{bulleted([f'{one.setting.name}: {one.reason}' for one in table.failed])}"


def figure_of(figure: Figure) -> str:
    """Return a chart with its explanation and its table."""
    return (
        f'<figure><figcaption><h3>{escape(figure.chart.title)}</h3><p class="soft">{escape(figure.text)}</p></figcaption>\n'
        f"{figure.chart.svg}\n{html_table(figure.chart.title, figure.columns, figure.lines)}</figure>"
    )


def html_table(name: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls if it is wide."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>\n" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {escape(name)}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )
