"""docs/where.md names files that define what it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs" / "where.md").read_text(), flags=re.MULTILINE
)


def defined(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_where_answers_at_least_twenty_questions():
    assert len(ROWS) >= 20


@pytest.mark.parametrize(("question", "file", "name"), ROWS, ids=lambda value: value[:40])
def test_where_names_a_file_that_defines_the_name(question, file, name):
    assert name in defined(ROOT / "src" / "lockstep" / file), f"{question}: {file} does not define {name}"
