"""Write ``docs/conformity.md`` from the results of Keras's tests and the tables of behaviours: ``python -m tests.conformity.page``."""

import csv
import json
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from tests.conformity.differences import DIFFERENCES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformity.md"
RESULTS = ROOT / "benchmarks" / "results" / "conformity.json"
BEHAVIOURS = Path(__file__).parent / "behaviours"
WAYS = {"replicas": "2 replicas", "devices": "2 devices", "deterministic": "2 devices with `deterministic=True`"}
TITLES = {
    "strategies": "Strategies and values",
    "inputs": "Inputs, clusters and variables on servers",
    "training": "Training",
}

_BEGIN = """# Conformity with Keras and tf.distribute

`python -m tests.conformity.page` writes this page, and a test compares it with its sources.

## Keras's own tests in a scope

`./scripts/conformity` runs the tests of Keras {keras} as they are, and then in the scope of a
strategy: {ways}. Each cell shows the
numbers of tests that pass / fail / are skipped:

"""
_FAILED = """
Tests that pass without a scope but fail in one, with the cause:

"""
_TENSORFLOW = """
## Behaviours that the tests of tf.distribute check

Each behaviour is listed with the test of Lockstep that checks it, or with the difference: {tests} are
checked by tests, {differences} are different.
"""


def new_failures(results: dict) -> list[tuple[str, str, str]]:
    """Return way, name and reason of the tests that pass plainly and fail in a scope."""
    plain = results["plain"]["not passed"]
    return [
        (way, name, reason)
        for way in _known(results)
        for name, reason in results[way]["not passed"].items()
        if name not in plain
    ]


def _known(results: dict) -> list[str]:
    """Return the ways that have been run."""
    return [way for way in WAYS if way in results]


def why(way: str, name: str) -> str | None:
    """Return the known cause of a failure."""
    return next((cause for pattern, cause in DIFFERENCES if re.search(pattern, f"{way}: {name}")), None)


def unexplained(results: dict) -> list[tuple[str, str, str]]:
    """Return the new failures without a known cause."""
    return [failure for failure in new_failures(results) if why(*failure[:2]) is None] if "plain" in results else []


def behaviours() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table."""
    return {name: list(csv.DictReader((BEHAVIOURS / f"{name}.csv").read_text().splitlines())) for name in TITLES}


def page() -> str:
    """Return the whole page."""
    results = json.loads(RESULTS.read_text())
    text = _BEGIN.format(keras=results["keras"], ways=", ".join(WAYS[way] for way in _known(results)))
    text += _table_of_keras(results) + _FAILED + _causes(results)
    rows = behaviours()
    of_tests = sum(row["where"].startswith("tests/") for own in rows.values() for row in own)
    text += _TENSORFLOW.format(tests=of_tests, differences=sum(map(len, rows.values())) - of_tests)
    return text + "".join(_table_of_behaviours(TITLES[name], own) for name, own in rows.items())


def _table_of_keras(results: dict) -> str:
    ways = ["plain", *_known(results)]
    heads = ["tests of Keras", "tests", "without a scope", *(WAYS[way] for way in ways[1:])]
    folders = {f"`{folder}`": f"{folder}/" for folder in results["plain"]["tests"]} | {"all": ""}
    lines = [heads, ["---"] * len(heads)]
    for shown, folder in folders.items():
        counts = [_counts(results[way], folder) for way in ways]
        lines.append([shown, str(sum(counts[0])), *(" / ".join(map(str, each)) for each in counts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _counts(result: dict, folder: str) -> tuple[int, int, int]:
    """Return how many tests of a folder, or of all, have passed, failed and been skipped."""
    tests = sum(count for name, count in result["tests"].items() if f"{name}/".startswith(folder))
    others = [outcome for name, outcome in result["not passed"].items() if name.startswith(folder)]
    skipped = others.count("skipped")
    return tests - len(others), len(others) - skipped, skipped


def _causes(results: dict) -> str:
    found = defaultdict(lambda: defaultdict(list))
    for way, name, reason in new_failures(results):
        found[why(way, name) or f"Not known: {_cell(reason)}"][name].append(WAYS[way])
    lines = []
    for cause, names in sorted(found.items()):
        lines.append(_item("- ", cause))
        lines += [_item("  - ", f"`{name}` ({', '.join(ways)})") for name, ways in sorted(names.items())]
    return "\n".join(lines or ["- Nothing."]) + "\n"


def _item(mark: str, text: str) -> str:
    """Return an item of a list, in lines of at most 100 columns where words allow it."""
    return textwrap.fill(
        text,
        100,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table_of_behaviours(title: str, rows: list[dict[str, str]]) -> str:
    lines = [f"\n### {title}\n\n| behaviour | test in TensorFlow | in Lockstep |\n| --- | --- | --- |\n"]
    for row in rows:
        where = row["where"]
        shown = f"`{where.removeprefix('tests/')}`" if where.startswith("tests/") else _cell(where)
        lines.append(f"| {_cell(row['behaviour'])} | {_cell(row['source'])} | {shown} |\n")
    return "".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"([|*_<>\[\]])", r"\\\1", text.strip())


if __name__ == "__main__":
    PAGE.write_text(page())
