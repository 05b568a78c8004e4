"""How a scaling report is printed in a terminal."""

import io
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from lockstep.tools.scaling.benchmark import ProgressCallback
from lockstep.tools.scaling.prediction import Prediction
from lockstep.tools.scaling.results import (
    ScalingRow,
    ScalingSetting,
    ScalingTable,
    SettingFailure,
    SettingResult,
    format_memory,
    format_number,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from lockstep.tools.scaling.api import ScalingReport

_MIN_WIDTH = 100  # of a line: tables of fewer columns are cut


def render(report: "ScalingReport", *, is_terminal: bool = False) -> str:
    """Render the report as text, as wide as the terminal, but of at least 100 columns, with colours on a terminal."""
    file = io.StringIO()
    columns = max(_MIN_WIDTH, shutil.get_terminal_size((_MIN_WIDTH, 24)).columns)
    show = Console(file=file, width=columns, force_terminal=is_terminal, highlight=False).print
    show(f"[bold]Scaling of {escape(report.title)}[/]")
    show(escape(report.machine), style="dim")
    show(_results_table(report.table))
    show(_shares_table(report.table))
    for failed in report.table.failed:
        show(f"[red]{escape(failed.setting.name)}:[/] {escape(failed.reason)}")
    for sentence in report.recommendation:
        show(f"• {escape(sentence)}")
    if report.outlook:
        show(_prediction_table(report.outlook))
    for note in report.notes:
        show(f"Note: {escape(note)}", style="dim")
    return file.getvalue()


def _results_table(table: ScalingTable) -> RichTable:
    title = "Measured. Speed-up and efficiency, strong: at one global batch, weak: at one batch per device"
    rendered = RichTable(box=SIMPLE_HEAD, title=title, padding=(0, 0, 0, 1), pad_edge=False)
    names = ["devices", "batch", "ms a step", "s/epoch", "rows/s", "strong", "weak"]
    for name in [*names, *(["equal rows", "equal time"] if table.metric else [])]:
        rendered.add_column(name, justify="right", no_wrap=True)
    if table.metric:
        after = f"after {table.equal_rows:,} rows, and after {format_seconds(table.equal_seconds)} of training"
        rendered.caption = f"{table.metric} on validation data {after}"
    for row in table.rows:
        rendered.add_row(*_cells(row, table))
    return rendered


def _cells(row: ScalingRow, table: ScalingTable) -> list[str]:
    values = [format_number(row.at_rows), format_number(row.at_time)] if table.metric else []
    return [
        *row.setting.cells,
        f"{1e3 * row.step:.3g} ± {row.spread:.0%}",
        f"{row.epoch:.3g}",
        f"{row.rows_per_second:,.0f}",
        _speed_up(row.strong, row.strong_efficiency),
        _speed_up(row.weak, row.weak_efficiency),
        *values,
    ]


def _speed_up(value: float | None, efficiency: float | None) -> str:
    return "–" if efficiency is None else f"{format_ratio(value)} {efficiency:.0%}"


def _shares_table(table: ScalingTable) -> RichTable:
    rendered = RichTable(box=SIMPLE_HEAD, title="Where a step's time goes, and the peak memory")
    for name in ("devices", "batch", "compute", "communication", "input", "host", "memory"):
        rendered.add_column(name, justify="right")
    for row in table.rows:
        parts = [f"{part / row.step:.0%}" for part in asdict(row.shares).values()]
        rendered.add_row(*row.setting.cells, *parts, format_memory(row.measured.memory))
    return rendered


def _prediction_table(prediction: Prediction) -> RichTable:
    rendered = RichTable(box=SIMPLE_HEAD, title="Predicted, not measured")
    for name in ("devices", "strong: batch", "rows/s", "speed-up", "weak: batch", "rows/s", "speed-up"):
        rendered.add_column(name, justify="right")
    strong = {one.devices: one for one in prediction.strong}
    for weak in prediction.weak:
        cells = []
        for one in (strong.get(weak.devices), weak):
            cells += (
                [f"{one.batch:,}", f"{one.batch / one.seconds:,.0f}", format_ratio(one.speed_up)] if one else ["–"] * 3
            )
        rendered.add_row(f"{weak.devices:,}", *cells)
    rendered.caption = f"{prediction.described}. {prediction.error}"
    return rendered


@contextmanager
def progress_reporter(count: int, stream: TextIO | None = None) -> Iterator[ProgressCallback]:
    """Report the progress on standard error: a bar on a terminal, else a line for each setting."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _line_reporter(count, stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task("measuring", total=count)

        def report(setting: ScalingSetting, result: SettingResult | SettingFailure | None) -> None:
            bar.update(task, description=setting.name, advance=0 if result is None else 1)
            if result is not None:
                bar.console.log(escape(describe_result(setting, result)), highlight=False)

        yield report


def _line_reporter(count: int, stream: TextIO) -> ProgressCallback:
    done = 0

    def report(setting: ScalingSetting, result: SettingResult | SettingFailure | None) -> None:
        nonlocal done
        if result is not None:
            done += 1
            stream.write(f"lockstep scale: {done} of {count}: {describe_result(setting, result)}\n")
            stream.flush()

    return report


def describe_result(setting: ScalingSetting, result: SettingResult | SettingFailure) -> str:
    """Describe the result of a setting in one line."""
    if isinstance(result, SettingFailure):
        return f"{setting.name}: {result.reason}"
    if not result.blocks:
        return f"{setting.name}: too few steps"
    return f"{setting.name}: {format_seconds(statistics.median(result.blocks))} per step"
