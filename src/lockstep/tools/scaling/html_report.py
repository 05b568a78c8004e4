"""The report as one HTML page without network, scripts or fonts: its charts, and the tables beside them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from lockstep.tools.scaling.formatting import memory, number, ratio, seconds, share
from lockstep.tools.scaling.report import Outlook, ReportData
from lockstep.tools.scaling.results import CurvePoint
from lockstep.tools.scaling.svg import (
    STYLE,
    STYLE_DARK,
    Axis,
    Bar,
    Chart,
    ChartPoint,
    Series,
    bar_chart,
    line_chart,
    ticks_of,
)
from lockstep.tools.scaling.table import ScalingRow, ScalingTable

__all__ = ["Figure", "figures_of", "page_of"]

_PARTS = ("compute", "communication", "input", "host")


@dataclass(frozen=True)
class Figure:
    """A chart with its table.

    Args:
        chart: the rendered chart.
        text: explanation.
        columns: of the table.
        lines: of the table.
    """

    chart: Chart
    text: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def figures_of(table: ScalingTable, outlook: Outlook | None) -> list[Figure]:
    """Draw all figures that have data."""
    rows = [row for row in table.rows if row.setting.devices]
    if not rows:
        return []
    figures = [_throughput(rows)]
    figures += [_efficiency(rows, is_weak=is_weak) for is_weak in (False, True) if _has_efficiency(rows, is_weak)]
    figures.append(_shares(table.rows))
    if table.metric and any(_is_drawn(point) for row in rows for point in row.measured.curve):
        figures += [_metric(table, rows, by_rows=by_rows) for by_rows in (True, False)]
    if outlook:
        figures += [_predicted(outlook), _checked(outlook)]
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
            str(row.setting.devices),
            str(row.setting.batch),
            f"{row.rows_per_second:,.0f}",
            f"{1e3 * row.step:.3g}",
            f"{1e3 * row.low:.3g} – {1e3 * row.high:.3g}",
        )
        for row in rows
    )
    text = "Rows of training data per second, from the median of the blocks of steps within fit. The global batch is the same along a line."
    columns = ("devices", "global batch", "rows/s", "ms a step", "half of the blocks")
    return Figure(line_chart("Throughput", _devices(rows), y, series), text, columns, lines)


def _has_efficiency(rows: Sequence[ScalingRow], is_weak: bool) -> bool:
    return any(row.setting.devices > 1 and _speed_up(row, is_weak) is not None for row in rows)


def _speed_up(row: ScalingRow, is_weak: bool) -> float | None:
    return row.weak if is_weak else row.strong


def _efficiency(rows: Sequence[ScalingRow], *, is_weak: bool) -> Figure:
    known = [(row, value) for row in rows if (value := _speed_up(row, is_weak)) is not None]
    keys = sorted({row.per_device if is_weak else row.setting.batch for row, _ in known})
    series = []
    for color, key in enumerate(keys):
        points = [
            ChartPoint(
                row.setting.devices,
                value / row.setting.devices,
                f"{row.setting.name}: {value / row.setting.devices:.0%}",
            )
            for row, value in known
            if (row.per_device if is_weak else row.setting.batch) == key
        ]
        series.append(Series(f"{key:g} a device" if is_weak else f"batch {key:g}", points, color))
    ticks = ticks_of([1.0, *(value / row.setting.devices for row, value in known)])
    axis = Axis("efficiency", {place: f"{place:.0%}" for place in ticks})
    title = "Weak scaling: same batch on each device" if is_weak else "Strong scaling: same global batch"
    text = "Rows per second, divided by those of one device and by the number of devices. 100 % is ideal."
    lines = tuple(
        (
            str(row.setting.devices),
            str(row.setting.batch),
            f"{row.per_device:g}",
            ratio(value),
            f"{value / row.setting.devices:.0%}",
        )
        for row, value in known
    )
    columns = ("devices", "global batch", "a device", "speed-up", "efficiency")
    return Figure(line_chart(title, _devices(rows), axis, series), text, columns, lines)


def _shares(rows: Sequence[ScalingRow]) -> Figure:
    bars, lines = [], []
    for row in rows:
        parts = [part / row.step for part in asdict(row.shares).values()]
        name = f"{row.setting.devices or 'Keras'} × {row.setting.batch}"
        texts = [f"{part:.0%}, {seconds(part * row.step)}" for part in parts]
        bars.append(Bar(name, list(zip(parts, texts, strict=True))))
        shown = [f"{part:.0%}" for part in parts]
        lines.append((str(row.setting.devices or "Keras"), str(row.setting.batch), seconds(row.step), *shown))
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
                f"{row.setting.name}: {name} {point.value:.4g} after {f'{point.rows:,} rows' if by_rows else seconds(point.seconds)}",
            )
            for point in row.measured.curve
            if _is_drawn(point)
        ]
        color, dash = batches.index(row.setting.batch), counts.index(row.setting.devices)
        series.append(Series(row.setting.name, points, color, dash))
    places = [point.x for one in series for point in one.points]
    y = Axis(name, ticks_of([point.y for one in series for point in one.points], is_from_zero=False))
    x = Axis("rows trained on" if by_rows else "seconds of training", ticks_of(places, count=4))
    equal = f"{table.equal_rows:,} rows" if by_rows else seconds(table.equal_seconds)
    text = (
        f"On validation data; evaluation is not timed. Settings are compared after equal {'rows' if by_rows else 'time'}: {equal}, the smallest "
        "total of all settings."
    )
    lines = tuple(
        (str(row.setting.devices), str(row.setting.batch), number(row.at_rows if by_rows else row.at_time))
        for row in rows
    )
    columns = ("devices", "global batch", f"{name} after {equal}")
    title = f"{name} by {'rows' if by_rows else 'time'}"
    return Figure(line_chart(title[0].upper() + title[1:], x, y, series), text, columns, lines)


def _predicted(outlook: Outlook) -> Figure:
    both = (("strong", outlook.strong), ("weak", outlook.weak))
    series = [
        Series(
            f"{kind} scaling",
            [
                ChartPoint(one.devices, one.speed_up, f"{kind}, {one.devices:,} devices: {ratio(one.speed_up)}")
                for one in found
            ],
            color,
        )
        for color, (kind, found) in enumerate(both)
    ]
    most = outlook.weak[-1].devices
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
            seconds(one.seconds),
            f"{one.batch / one.seconds:,.0f}",
            ratio(one.speed_up),
            share(one.shares.communication, one.seconds),
        )
        for kind, found in both
        for one in found
        if one.devices >= 8
    )
    columns = ("scaling", "devices", "global batch", "a step", "rows/s", "speed-up", "communication")
    return Figure(chart, f"Predicted, not measured. {outlook.described}. {outlook.error}.", columns, lines)


def _checked(outlook: Outlook) -> Figure:
    counts = sorted({row.setting.devices for row, _, _ in outlook.checks})
    series = [
        Series(
            f"{count} device{'s' * (count > 1)}",
            [
                ChartPoint(
                    1e3 * row.step,
                    1e3 * found,
                    f"{row.setting.name}: {seconds(row.step)}, predicted {seconds(found)}, {error:+.0%}",
                )
                for row, found, error in outlook.checks
                if row.setting.devices == count
            ],
            color,
            is_joined=False,
        )
        for color, count in enumerate(counts)
    ]
    most = 1e3 * max(max(row.step, found) for row, found, _ in outlook.checks)
    ticks = ticks_of([most])
    line = Series("equal", [ChartPoint(0, 0, ""), ChartPoint(max(ticks), max(ticks), "")], 4, 1, is_marked=False)
    chart = line_chart(
        "Error of the prediction",
        Axis("ms a step, measured", ticks),
        Axis("ms a step, predicted", ticks),
        [*series, line],
    )
    text = f"The same formula on the measured settings. {outlook.error}. Expect at least this error in the prediction."
    lines = tuple(
        (str(row.setting.devices), str(row.setting.batch), seconds(row.step), seconds(found), f"{error:+.0%}")
        for row, found, error in outlook.checks
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
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.25rem;margin:2rem 0 .5rem}h3{font-size:1.05rem;margin:0 0 .25rem}
.soft{color:var(--soft);font-size:.9rem}.take{border-left:4px solid var(--accent);background:var(--card);padding:.75rem 1rem;
margin:1rem 0}.take ul{margin:0;padding-left:1.1rem}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr));
gap:1.25rem}figure{margin:0;padding:1rem;border:1px solid var(--faint);border-radius:8px;min-width:0}figcaption p{margin:.25rem 0 .75rem}
.scroll{overflow-x:auto;margin-top:.75rem}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;
overflow-wrap:normal}th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--faint)}th{text-align:right;vertical-align:bottom}
td{white-space:nowrap}
figure th,figure td{padding:.25rem .4rem;font-size:.8rem}
td:first-child,th:first-child{text-align:left;padding-left:0}code{font-size:.9em}a:focus-visible,.scroll:focus-visible{outline:3px solid
var(--accent);outline-offset:2px}
"""
_STYLE_DARK = """
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e8eaed;--soft:#a6adb5;--faint:#3c434b;--card:#1f242a;--accent:#6cb6ff}}
"""
_STYLE_PRINT = """
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


def page_of(report: ReportData) -> str:
    """Render the page."""
    title = f"Scaling of {report.title}"
    metadata = f"{escape(report.machine)}<br>Command: <code>{escape(report.command)}</code>"
    figures = figures_of(report.table, report.outlook)
    notes = [*report.notes, *_METHOD]
    parts = [
        f'<header><h1>{escape(title)}</h1><p class="soft">{metadata}</p></header><main>',
        f'<section class="take" aria-label="Recommendation">{_list(report.recommendation)}</section>',
        "<section><h2>All settings</h2>",
        _settings_table(report.table) if report.table.rows else "<p>No setting could be measured.</p>",
        _failures(report.table),
        '</section><section><h2>Charts</h2><div class="figures">',
        *(_figure(figure) for figure in figures),
        f'</div></section><section><h2>How it was measured</h2><div class="soft">{_list(notes)}</div></section></main>',
    ]
    styles = _STYLE + _STYLE_DARK + STYLE + STYLE_DARK + _STYLE_PRINT
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{styles}</style></head><body>"
    )
    return "\n".join([head, *parts, "</body></html>\n"])


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _settings_table(table: ScalingTable) -> str:
    columns = [
        "devices",
        "global batch",
        "a device",
        "ms a step",
        "±",
        "s an epoch",
        "rows/s",
        "strong",
        "efficiency",
        "weak",
        "efficiency",
    ]
    if table.metric:
        columns += [f"{table.metric} after {table.equal_rows:,} rows", f"after {seconds(table.equal_seconds)}"]
    lines = [_cells(row, with_metric=bool(table.metric)) for row in table.rows]
    return _table("All settings", [*columns, "memory"], lines)


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
        ratio(row.strong),
        efficiencies[0],
        ratio(row.weak),
        efficiencies[1],
        *([number(row.at_rows), number(row.at_time)] if with_metric else []),
        memory(row.measured.memory),
    ]


def _failures(table: ScalingTable) -> str:
    if not table.failed:
        return ""
    return f"<h3>Not measured</h3>{_list([f'{one.setting.name}: {one.reason}' for one in table.failed])}"


def _figure(figure: Figure) -> str:
    return (
        f'<figure><figcaption><h3>{escape(figure.chart.title)}</h3><p class="soft">{escape(figure.text)}</p></figcaption>\n'
        f"{figure.chart.svg}\n{_table(figure.chart.title, figure.columns, figure.lines)}</figure>"
    )


def _table(name: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>\n" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {escape(name)}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )
