"""What the terminal shows: the table, what was predicted, what to take; and how far measuring has come."""

import io
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from lockstep.tools.scaling.formatting import memory, number, ratio, seconds, share
from lockstep.tools.scaling.report import ReportData
from lockstep.tools.scaling.results import ScalingSetting, SettingFailure, SettingResult
from lockstep.tools.scaling.subprocess_runner import Told
from lockstep.tools.scaling.table import ScalingRow, ScalingTable

__all__ = ["render", "telling"]

_LEAST_WIDTH = 100  # of a line that is no terminal's


def render(report: ReportData, width: int | None = None, *, is_terminal: bool = False) -> str:
    """The report as text.

    Args:
        report: what to show.
        width: columns; None: those of the terminal, or 100.
        is_terminal: whether there may be colours.
    """
    file = io.StringIO()
    columns = width or max(_LEAST_WIDTH, shutil.get_terminal_size((_LEAST_WIDTH, 24)).columns)
    show = Console(file=file, width=columns, force_terminal=is_terminal, highlight=False).print
    show(f"[bold]Scaling of {escape(report.title)}[/]")
    show(escape(report.machine), style="dim")
    show(_measured(report.table))
    show(_where(report.table))
    for failed in report.table.failed:
        show(f"[red]{escape(failed.setting.name)}:[/] {escape(failed.reason)}")
    for sentence in report.recommendation:
        show(f"• {escape(sentence)}")
    if report.outlook:
        show(_outlook(report))
    for note in report.notes:
        show(f"Note: {escape(note)}", style="dim")
    return file.getvalue()


def _measured(table: ScalingTable) -> RichTable:
    title = "Measured. Speed-up and efficiency, strong: at one global batch, weak: at one batch a device"
    shown = RichTable(box=SIMPLE_HEAD, title=title, padding=(0, 0, 0, 1), pad_edge=False)
    names = ["devices", "batch", "ms a step", "s/epoch", "rows/s", "strong", "weak"]
    for name in [*names, *(["equal rows", "equal time"] if table.metric else [])]:
        shown.add_column(name, justify="right", no_wrap=True)
    if table.metric:
        after = f"after {table.equal_rows:,} rows, and after {seconds(table.equal_seconds)} of training"
        shown.caption = f"{table.metric} on validation data {after}"
    for row in table.rows:
        shown.add_row(*_cells(row, table))
    return shown


def _cells(row: ScalingRow, table: ScalingTable) -> list[str]:
    values = [number(row.at_rows), number(row.at_time)] if table.metric else []
    return [
        str(row.setting.devices or "Keras"),
        str(row.setting.batch),
        f"{1e3 * row.step:.3g} ± {row.spread:.0%}",
        f"{row.epoch:.3g}",
        f"{row.rows_per_second:,.0f}",
        _speed_up(row.strong, row.strong_efficiency),
        _speed_up(row.weak, row.weak_efficiency),
        *values,
    ]


def _speed_up(value: float | None, efficiency: float | None) -> str:
    return "–" if efficiency is None else f"{ratio(value)} {efficiency:.0%}"


def _where(table: ScalingTable) -> RichTable:
    shown = RichTable(box=SIMPLE_HEAD, title="Where a step's time goes, and the greatest memory")
    for name in ("devices", "batch", "compute", "communication", "input", "host", "memory"):
        shown.add_column(name, justify="right")
    for row in table.rows:
        parts = [share(part, row.step) for part in asdict(row.shares).values()]
        shown.add_row(str(row.setting.devices or "Keras"), str(row.setting.batch), *parts, memory(row.measured.memory))
    return shown


def _outlook(report: ReportData) -> RichTable:
    outlook = report.outlook
    shown = RichTable(box=SIMPLE_HEAD, title="Predicted, not measured")
    for name in ("devices", "strong: batch", "rows/s", "speed-up", "weak: batch", "rows/s", "speed-up"):
        shown.add_column(name, justify="right")
    if outlook is None:
        return shown
    strong = {one.devices: one for one in outlook.strong}
    for weak in outlook.weak:
        cells = []
        for one in (strong.get(weak.devices), weak):
            cells += [f"{one.batch:,}", f"{one.batch / one.seconds:,.0f}", ratio(one.speed_up)] if one else ["–"] * 3
        shown.add_row(f"{weak.devices:,}", *cells)
    shown.caption = f"{outlook.described}. {outlook.error}"
    return shown


@contextmanager
def telling(count: int, stream: TextIO | None = None) -> Iterator[Told]:
    """Tells how far measuring has come, on standard error: a bar on a terminal, else a line for each setting."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _lines(count, stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task("measuring", total=count)

        def tell(setting: ScalingSetting, found: SettingResult | SettingFailure | None) -> None:
            bar.update(task, description=setting.name, advance=0 if found is None else 1)
            if found is not None:
                bar.console.log(escape(line_of(setting, found)), highlight=False)

        yield tell


def _lines(count: int, stream: TextIO) -> Told:
    done = 0

    def tell(setting: ScalingSetting, found: SettingResult | SettingFailure | None) -> None:
        nonlocal done
        if found is not None:
            done += 1
            stream.write(f"lockstep scale: {done} of {count}: {line_of(setting, found)}\n")
            stream.flush()

    return tell


def line_of(setting: ScalingSetting, found: SettingResult | SettingFailure) -> str:
    """One line about what a setting gave."""
    if isinstance(found, SettingFailure):
        return f"{setting.name}: {found.reason}"
    if not found.blocks:
        return f"{setting.name}: too few steps"
    return f"{setting.name}: {seconds(statistics.median(found.blocks))} a step"
