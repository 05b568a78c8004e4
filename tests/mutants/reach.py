"""Map of lines to the tests that execute them: measured once in a run of the tests, and used for each mutant."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.mutants import trace
from tests.mutants.mutant import PACKAGE, ROOT, Mutant

FOLDER = ROOT / "build" / "mutants"
KEPT = FOLDER / "reach.json"


def suite_hash() -> str:
    """Stands for the sources and the tests as they are."""
    found = hashlib.sha256()
    files = [
        ROOT / "conftest.py",
        ROOT / "pyproject.toml",
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    ]
    for path in sorted(files):
        if (ROOT / "tests" / "mutants") not in path.parents:
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def python_path(root: Path) -> str:
    """``PYTHONPATH`` of processes that run a copy of the repository and load :mod:`trace`."""
    path = [trace.startup(FOLDER / "startup"), root / "src", root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(map(str, path))


def measure(arguments: list[str]) -> int:
    """Run the suite, without the nightly set, and keep what it reaches; ``arguments`` go to pytest. Gives its exit code."""
    folder = FOLDER / "lines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environ = os.environ | {
        trace.REACH: str(folder),
        "PYTHONPATH": python_path(ROOT),
        "COVERAGE_CORE": "ctrace",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.recording"]
    command += ["-m", "not nightly"]
    if not any(argument.startswith("-n") for argument in arguments):
        command += ["-n", str(os.cpu_count() or 2), "--dist", "loadgroup"]
    code = subprocess.run([*command, *arguments], cwd=ROOT, env=environ).returncode
    _collect(folder)
    return code


def _collect(folder: Path) -> None:
    """Bring together what all processes have written."""
    tests: dict[str, tuple[float, str]] = {}
    users: dict[str, set[str]] = defaultdict(set)
    reached: dict[tuple[str, int], set[str]] = defaultdict(set)
    for path in folder.glob("lines-*"):
        for line in path.read_text().splitlines():
            match line.split("\t"):
                case ["time", test, seconds, outcome]:
                    tests[test] = float(seconds), outcome
                case ["uses", test, fixture]:
                    users[fixture].add(test)
                case [name, file, numbers] if (ROOT / PACKAGE) in Path(file).parents:
                    short = str(Path(file).relative_to(ROOT / PACKAGE))
                    for number in numbers.split(","):
                        reached[short, int(number)].add(name)
    names = sorted(tests)
    number_of = {name: number for number, name in enumerate(names)}
    lines: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for (file, line), found in sorted(reached.items()):
        own = {test for name in found for test in users.get(name, {name})}
        lines[file][line] = sorted(number_of[test] for test in own if test in number_of)
    KEPT.write_text(
        json.dumps({"suite": suite_hash(), "tests": [[name, *tests[name]] for name in names], "lines": lines})
    )
    passed = sum(outcome == "passed" for _, outcome in tests.values())
    print(f"{len(tests)} tests, of which {passed} passed, reach {len(reached):,} lines: {KEPT.relative_to(ROOT)}")


class Reach:
    """What was measured."""

    def __init__(self) -> None:
        kept = json.loads(KEPT.read_text())
        self.suite = kept["suite"]
        self._names = [name for name, _, _ in kept["tests"]]
        self.seconds = {name: seconds for name, seconds, _ in kept["tests"]}
        self._fit = {name for name, _, outcome in kept["tests"] if outcome == "passed"}
        self._lines = {file: {int(n): set(own) for n, own in lines.items()} for file, lines in kept["lines"].items()}

    def tests_of(self, mutant: Mutant, wide: bool = False) -> list[str]:
        """The tests that reach the statement of a mutant and passed; ``wide``: that reach any line of its file within a function."""
        path, number = mutant.place()
        file = str(path.relative_to(PACKAGE))
        tree = ast.parse((ROOT / path).read_text())
        found = self._of_lines(file, _inner_lines(tree)) if wide else self._of_statement(file, tree, number)
        return [name for name in (self._names[n] for n in sorted(found)) if name in self._fit]

    def _of_lines(self, file: str, lines: set[int]) -> set[int]:
        known = self._lines.get(file, {})
        return set().union(*(known.get(line, set()) for line in lines))

    def _of_statement(self, file: str, tree: ast.Module, number: int) -> set[int]:
        inner = _inner_lines(tree)
        statement = min((n for n in ast.walk(tree) if _covers(n, number)), key=lambda n: n.end_lineno - n.lineno)
        header = _header(statement)
        if isinstance(statement, ast.FunctionDef):  # A default in its signature: whoever calls it is concerned.
            return self._of_lines(file, set(range(statement.body[0].lineno, statement.end_lineno + 1)))
        if number in inner:
            return self._of_lines(file, header)
        # Run when the module is imported: the tests that reach a place that names what is set there.
        names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and _covers(n, number)}
        mentions = {
            n.lineno
            for n in ast.walk(tree)
            if {getattr(n, "id", ""), getattr(n, "attr", "")} & names and n.lineno in inner
        }
        return self._of_lines(file, mentions) or self._of_lines(file, inner)


def _covers(node: ast.AST, number: int) -> bool:
    return isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno <= number <= node.end_lineno


def _header(statement: ast.AST) -> set[int]:
    """The lines of a simple statement, or of a compound one up to its body."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if isinstance(body, list) else statement.end_lineno + 1
    return set(range(statement.lineno, max(end, statement.lineno + 1)))


def _inner_lines(tree: ast.Module) -> set[int]:
    """Lines within functions, which run when these are called."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line for one in functions for line in range(one.body[0].lineno, one.end_lineno + 1)}
