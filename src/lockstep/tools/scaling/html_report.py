"""The report as one page of HTML that needs no network, no script and no font of its own."""

from collections.abc import Sequence
from html import escape

from lockstep.tools.scaling.charts import Figure, figures_of
from lockstep.tools.scaling.formatting import memory, number, ratio, seconds
from lockstep.tools.scaling.report import ScalingReport
from lockstep.tools.scaling.svg import STYLE, STYLE_DARK
from lockstep.tools.scaling.table import ScalingRow, ScalingTable

__all__ = ["page_of"]

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
    "Each setting ran in a process of its own, one after the other. A step's time is the median over blocks of steps within fit, with the "
    "devices at rest at both ends of a block; the first three steps, which compile, are left out; ± is half the distance of the quartiles.",
    "Strong scaling keeps the global batch: each device gets fewer rows. Weak scaling keeps the batch on each device: the global batch grows.",
    "Communication is measured alone, on devices that wait for nobody. What they wait for each other in a real step counts as compute.",
    "Logical CPU devices share the cores of one machine. They show what a strategy costs, not what separate machines would gain.",
    "Keras stands for plain Keras on one device, without a strategy; its input cannot be told from its host there.",
)


def page_of(report: ScalingReport) -> str:
    """The whole page."""
    title = f"Scaling of {report.title}"
    facts = f"{escape(report.machine)}<br>Command: <code>{escape(report.command)}</code>"
    figures = figures_of(report.table, report.outlook)
    notes = [*report.notes, *_METHOD]
    parts = [
        f'<header><h1>{escape(title)}</h1><p class="soft">{facts}</p></header><main>',
        f'<section class="take" aria-label="Recommendation">{_list(report.recommendation)}</section>',
        "<section><h2>All settings</h2>",
        _big_table(report.table) if report.table.rows else "<p>Nothing could be measured.</p>",
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


def _big_table(table: ScalingTable) -> str:
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
