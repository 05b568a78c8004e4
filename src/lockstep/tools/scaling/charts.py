"""Which charts the page has, and the tables beside them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.tools.scaling.formatting import number, ratio, seconds, share
from lockstep.tools.scaling.report import Outlook
from lockstep.tools.scaling.results import CurvePoint
from lockstep.tools.scaling.svg import Axis, Bar, Chart, ChartPoint, Series, bar_chart, line_chart, ticks_of
from lockstep.tools.scaling.table import ScalingRow, ScalingTable

__all__ = ["Figure", "figures_of"]

_PARTS = ("compute", "communication", "input", "host")


@dataclass(frozen=True)
class Figure:
    """A chart with its table.

    Args:
        chart: what is drawn.
        text: how to read it.
        columns: of the table.
        lines: of the table.
    """

    chart: Chart
    text: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def figures_of(table: ScalingTable, outlook: Outlook | None) -> list[Figure]:
    """All of them; what has no data is left out."""
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
    text = "Rows of training data a second, from the median of the blocks of steps within fit. The global batch stays the same along a line."
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
    text = "Rows a second, divided by those of one device and by the number of devices. 100 % would be perfect."
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
        "like the gradients alone. Input: getting batches, as far as devices wait for it. Host: the rest of a step within fit."
    )
    return Figure(
        bar_chart("Where a step's time goes", _PARTS, bars), text, ("devices", "batch", "a step", *_PARTS), tuple(lines)
    )


def _is_drawn(point: CurvePoint) -> bool:
    """What was there before training would only press the rest together, and what has diverged has no place."""
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
        f"On validation data, with the clock stopped. Settings are compared after equal {'rows' if by_rows else 'time'}: {equal}, the least "
        "that one of them had in all."
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
        "The prediction's own error",
        Axis("ms a step, measured", ticks),
        Axis("ms a step, predicted", ticks),
        [*series, line],
    )
    text = f"The same formula on the settings that were measured. {outlook.error}. What it is wrong by here it is wrong by there at least."
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
