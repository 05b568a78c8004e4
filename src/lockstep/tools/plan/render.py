"""A plan as text and as an HTML page."""

import io
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from html import escape as escape_html
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep._logging import counted
from lockstep.devices.host_memory import size_text
from lockstep.tools.plan.compile_process import Check, TargetResult
from lockstep.tools.plan.estimate import Estimate, Group
from lockstep.tools.scaling.html_report import Bar, Figure, bar_chart, bulleted, figure_of, html_page, html_table
from lockstep.tools.scaling.results import format_seconds

if TYPE_CHECKING:
    from lockstep.tools.plan.planner import Plan, PlanRow

_MIN_WIDTH = 140  # of a line: tables of fewer columns are cut
_MAX_BARS = 24
_KINDS = ("weights", "optimizer", "gradients", "activations", "workspace")
_SUMMARY = ("fits", "needs", "which is", "of", "largest batch", "a step", "rows/s", "price of 1M rows")
_TIMES = ("TFLOP a device", "arithmetic", "memory", "collectives", "a step", "efficiency", "measured")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "others")
_METHOD = (
    "Each step was compiled for its target and not run. A fitting step fits with the last, uneven batch of an epoch, too.",
    "Gradients are counted as if the program held them at once; activations are the part of the temporaries that grows with the rows, known "
    "if two batches were compiled. Workspace: the input, results, code, and what remains of the temporaries.",
    "Time is the roofline: the longer of arithmetic at the peak of the data sheet and memory traffic at its bandwidth, and then all "
    "collectives as rings, which overlap with nothing. A real step takes longer than its arithmetic and may hide collectives.",
    "A GPU has the share of its memory that JAX takes, which XLA_PYTHON_CLIENT_MEM_FRACTION sets (0.75 by default).",
)


def text_of(plan: "Plan", *, is_terminal: bool = False) -> str:
    """Render a plan as text, as wide as the terminal, but of at least 140 columns, with colours on a terminal."""
    file = io.StringIO()
    columns = max(_MIN_WIDTH, shutil.get_terminal_size((_MIN_WIDTH, 24)).columns)
    show = Console(file=file, width=columns, force_terminal=is_terminal, highlight=False).print
    show(f"[bold]Plan of {escape(plan.title)}[/]")
    show(_described(plan), style="dim")
    for title, names, cells in tables_of(plan):
        table = Table(box=SIMPLE_HEAD, title=title, padding=(0, 0, 0, 1), pad_edge=False)
        for number, name in enumerate(names):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
        for cell in cells:
            table.add_row(*cell)
        show(table)
    for row in plan.rows:
        if row.reason:
            show(f"[red]{row.name}:[/] {escape(row.reason)}")
    for sentence in plan.recommendation:
        show(f"• {escape(sentence)}")
    for note in plan.notes:
        show(f"Note: {escape(note)}", style="dim")
    return file.getvalue()


def _described(plan: "Plan") -> str:
    flops = plan.survey.flops_per_row
    operations = "operations unknown" if flops is None else f"{flops / 1e9:.3g} GFLOP a row"
    return f"batch {plan.survey.batch:,}, {plan.survey.dtype}, {operations}"


Lines = list[tuple[str, ...]]


def tables_of(plan: "Plan") -> list[tuple[str, tuple[str, ...], Lines]]:
    """Return the tables of a plan: their titles, columns and lines."""
    first = "target", "strategy", "batch"
    named = [(row, (row.target, row.strategy, f"{row.batch:,}")) for row in plan.rows]
    found = [
        ("Does it fit?", (*first, *_SUMMARY), [(*name, *_summary_cells(row)) for row, name in named]),
        (
            "Memory of a device in a step with a whole batch",
            (*first, *_KINDS),
            [(*name, *(_size(row.kinds[kind]) for kind in _KINDS)) for row, name in named if row.kinds],
        ),
        (
            "Time of a step, estimated",
            (*first, *_TIMES),
            [(*name, *_time_cells(row, row.estimate)) for row, name in named if row.estimate],
        ),
        (
            "Collectives of a step with a whole batch: number, and bytes of a device",
            (*first, *_COLLECTIVES, "over"),
            [
                (*name, *_collective_cells(row.step.collectives), row.links or "–")
                for row, name in named
                if row.step and row.step.collectives
            ],
        ),
    ]
    return [table for table in found if table[2]]


def _summary_cells(row: "PlanRow") -> tuple[str, ...]:
    return (
        "?" if row.fits is None else "yes" if row.fits else "no",
        _size(row.needed),
        row.certainty if row.needed else "–",
        _size(row.usable),
        _largest(row),
        format_seconds(row.estimate.seconds) if row.estimate else "–",
        f"{row.rows_per_second:,.0f}" if row.rows_per_second else "–",
        "–" if row.price is None else f"{row.price:.4g}",
    )


def _time_cells(row: "PlanRow", time: Estimate) -> tuple[str, ...]:
    return (
        f"{time.operations / 1e12:.3g}",
        *map(format_seconds, (time.arithmetic, time.traffic, time.communication, time.seconds)),
        f"{time.efficiency:.0%}",
        f"{row.ratio.time:.2f} × that" if row.ratio and row.ratio.time else "unverified",
    )


def _collective_cells(found: Sequence[tuple[str, int, int, Group]]) -> tuple[str, ...]:
    numbers, sizes = Counter[str](), Counter[str]()
    for name, number, size, _ in found:
        column = name if name in _COLLECTIVES else "others"
        numbers[column] += number
        sizes[column] += size
    return tuple(f"{numbers[name]:,}: {size_text(sizes[name])}" if numbers[name] else "–" for name in _COLLECTIVES)


def _size(size: float | None) -> str:
    return "–" if size is None else size_text(size)


def _largest(row: "PlanRow") -> str:
    if row.largest is None:
        return "–"
    fitting, failing = row.largest
    return f"{fitting:,}" if failing is not None else f"≥ {fitting:,}"


def page_of(plan: "Plan") -> str:
    """Render a plan as an HTML page without external files."""
    title = f"Plan of {plan.title}"
    reasons = [f"{row.name}: {row.reason}" for row in plan.rows if row.reason]
    parts = [
        f'<header><h1>{escape_html(title)}</h1><p class="soft">{escape_html(_described(plan))}</p></header><main>',
        f'<section class="take" aria-label="Recommendation">{bulleted(plan.recommendation)}</section>',
        "<section><h2>All settings</h2>",
        *(
            f"<h3>{escape_html(name)}</h3>{html_table(name, columns, lines)}"
            for name, columns, lines in tables_of(plan)
        ),
        f"<h3>Does not fit, or cannot be compiled</h3>{bulleted(reasons)}" if reasons else "",
        '</section><section><h2>Charts</h2><div class="figures">',
        *(figure_of(figure) for figure in (_memory(plan), _times(plan)) if figure),
        f'</div></section><section><h2>How to read it</h2><div class="soft">{bulleted([*plan.notes, *_METHOD])}</div></section></main>',
    ]
    return html_page(title, parts)


def _memory(plan: "Plan") -> Figure | None:
    rows = [(row, row.kinds) for row in plan.rows if row.kinds][:_MAX_BARS]
    if not rows:
        return None
    sums = [sum(size or 0 for size in kinds.values()) for _, kinds in rows]
    bars = [Bar(_name(row), [((size or 0) / max(sums), _size(size)) for size in kinds.values()]) for row, kinds in rows]
    lines = [
        (_name(row), *map(_size, kinds.values()), size_text(total), _size(row.usable))
        for (row, kinds), total in zip(rows, sums, strict=True)
    ]
    text = "Memory of one device in a step with a whole batch, as shares of what the largest setting needs."
    return Figure(bar_chart("Memory", _KINDS, bars), text, ("setting", *_KINDS, "all", "of"), tuple(lines))


def _times(plan: "Plan") -> Figure | None:
    rows = [(row, row.estimate) for row in plan.rows if row.estimate][:_MAX_BARS]
    if not rows:
        return None
    bars, lines = [], []
    for row, time in rows:
        parts = (time.seconds - time.communication, time.communication)
        bars.append(Bar(_name(row), [(part / time.seconds, format_seconds(part)) for part in parts]))
        lines.append(
            (_name(row), *map(format_seconds, (time.arithmetic, time.traffic, time.communication, time.seconds)))
        )
    text = "Shares of a step's estimated time. Work is the longer of arithmetic and memory traffic."
    columns = ("setting", "arithmetic", "memory", "communication", "a step")
    return Figure(bar_chart("Time", ("work", "communication"), bars), text, columns, tuple(lines))


def _name(row: "PlanRow") -> str:
    return f"{row.target} {row.strategy} {row.batch:,}"


def checks_text(checks: Sequence[Check], failures: Sequence[str], path: Path | None) -> str:
    """Describe measured steps, those that could not be measured, and where the former are kept; None: there are none."""
    lines = []
    for one in checks:
        where = f"{one.devices} × {one.accelerator}, {one.strategy}, batch {one.batch:,}"
        told = f"{format_seconds(one.measured_seconds)} a step"
        if one.predicted_seconds:
            ratio = one.measured_seconds / one.predicted_seconds
            told += f", predicted {format_seconds(one.predicted_seconds)}: {ratio:.2f} ×"
        if one.measured_memory and one.predicted_memory:
            ratio = one.measured_memory / one.predicted_memory
            told += f"; {size_text(one.measured_memory)}, predicted {size_text(one.predicted_memory)}: {ratio:.2f} ×"
        lines.append(f"{where}: {told}\n")
    lines += [f"{where}: not measured: {reason}\n" for where, _, reason in (line.partition(": ") for line in failures)]
    return "".join([*lines, *([f"kept for later plans in {path}\n"] if path else [])])


def report_progress(result: TargetResult, done: int, count: int) -> None:
    """Report a finished target in a line on standard error."""
    spent = sum(step.seconds for step in result.steps)
    told = result.failure or f"{counted(len(result.steps), 'step')} compiled in {format_seconds(spent)}"
    sys.stderr.write(f"lockstep plan: {done} of {count}: {result.target}, {result.strategy}: {told}\n")
    sys.stderr.flush()
