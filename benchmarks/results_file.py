"""Prints a result with machine, versions and command, and keeps it in ``results/``."""

import os
import sys
from pathlib import Path

from lockstep.report.machine import describe_machine


def write(name: str, title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Write a table as Markdown."""
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    lines = [columns, ("---",) * len(columns), *rows]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    text = f"# {title}\n\n{describe_machine()}\n\n`{command}`\n\n{table}\n"
    print(text)
    (Path(__file__).parent / "results" / f"{name}.md").write_text(text)
