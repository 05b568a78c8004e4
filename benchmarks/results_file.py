"""Print a result with machine, versions and command, and write it to ``results/`` as Markdown and JSON."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.tools.env import describe_machine


def write(
    name: str,
    title: str,
    columns: tuple[str, ...],
    rows: list[tuple[object, ...]],
    note: str = "",
    arguments: Sequence[str] | None = None,
) -> None:
    """Write a table as Markdown, with a ``note`` below it, and its rows as JSON.

    ``arguments`` are those of the command that gives these rows; None: those of this one.
    """
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *(sys.argv[1:] if arguments is None else arguments)])
    lines = [columns, ("---",) * len(columns), *rows]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    text = f"# {title}\n\n{describe_machine()}\n\n`{command}`\n\n{table}\n" + (f"\n{note}\n" if note else "")
    print(text)
    folder = Path(__file__).parent / "results"
    (folder / f"{name}.md").write_text(text)
    content = {"title": title, "machine": describe_machine(), "command": command, "note": note}
    content["rows"] = [dict(zip(columns, row, strict=True)) for row in rows]
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
