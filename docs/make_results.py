"""Make docs/results.md: the records of benchmarks/results by the hardware that they are about.

    python docs/make_results.py

tests/test_docs.py compares.
"""

import json
from collections import defaultdict
from pathlib import Path

DOCS = Path(__file__).parent
RECORDS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "results.md"
BEGIN = """<!-- Made by docs/make_results.py from benchmarks/results. -->

# Results by hardware

Figures in these pages come from the records below, which name their command, or from a record that
the page links to. Times are compared within one run only; [performance](performance.md) explains
the most important ones.
"""


def page() -> str:
    """The text of the page."""
    measured, compiled = defaultdict(list), defaultdict(list)
    for file in sorted(RECORDS.glob("*.json")):
        record = json.loads(file.read_text())
        if "title" not in record:  # a list of runs, such as that of the nightly set
            continue
        hardware, versions, date = record["machine"].rstrip(".").split("; ")
        line = f"| [{record['title']}](../benchmarks/results/{file.stem}.md) | {date} | {versions} |"
        targets = {row["target"] for row in record["rows"] if "target" in row}
        for kind in {kind_of(target) for target in targets}:
            compiled[kind].append(line)
        if not targets:
            measured[hardware].append(line)
    parts = [BEGIN, accelerators()]
    parts += [section(f"Compiled for {kind}, not run", compiled[kind]) for kind in sorted(compiled)]
    parts += [section(f"Measured on {hardware}", measured[hardware]) for hardware in sorted(measured)]
    return "\n".join(parts)


def accelerators() -> str:
    """What ``./scripts/accelerator`` has recorded."""
    file = RECORDS / "accelerator.json"
    seen = "Nothing has been measured on a GPU or TPU yet."
    if file.exists():
        seen = f"Measured on {', '.join(json.loads(file.read_text()))}: [record](../benchmarks/results/accelerator.md)."
    return f"## GPUs and TPUs\n\n{seen}\n[One command](accelerators.md) does it on yours.\n"


def kind_of(target: str) -> str:
    """The kind of device in the name of a target, such as ``h100:8``, ``H100 x 8`` or ``v5e 2x2``."""
    kind = target.replace(":", " ").split()[0]
    return f"TPU {kind}" if kind.startswith("v") else f"NVIDIA {kind.upper()}"


def section(title: str, lines: list[str]) -> str:
    """A heading and a table."""
    return "\n".join([f"## {title}\n", "| record | date | versions |", "| --- | --- | --- |", *sorted(lines), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
