"""Draw mutants by rule: a sample of the lines of nine packages, deterministic for given sources."""

import ast
import random
from pathlib import Path

from tests.mutants.mutant import PACKAGE, ROOT, Mutant, write_drawn
from tests.mutants.rules import changes

PACKAGES = (
    "execution",
    "data",
    "collectives",
    "devices",
    "checkpoint",
    "fit",
    "distributed",
    "parameter_server",
    "custom_loops",
)
SEED = 20250917
COUNT = 115
LEAST = 5  # of a package
WEAK = (
    "None is returned",
    "two arguments swapped",
    "two values swapped",
)  # Mostly an error of Python at once: fewer of them.
WEAK_SHARE = 0.25


def draw(taken: set[tuple[str, str]], root: Path = ROOT) -> list[Mutant]:
    """``COUNT`` mutants, by the number of lines of each package with code, at most one of a line.

    Args:
        taken: file and text of lines that have a fault already.
        root: of the repository.
    """
    generator = random.Random(SEED)
    files = {package: sorted((root / PACKAGE / package).rglob("*.py")) for package in PACKAGES}
    found: list[Mutant] = []
    for package, quota in _quotas({name: sum(map(_code_lines, own)) for name, own in files.items()}).items():
        by_line: dict[tuple[Path, int], list] = {}
        for path in files[package]:
            for change in changes(path.read_text()):
                is_left_out = change.rule in WEAK and generator.random() > WEAK_SHARE
                if not is_left_out and (str(path.relative_to(root / PACKAGE)), change.old) not in taken:
                    by_line.setdefault((path, change.line), []).append(change)
        for path, line in sorted(generator.sample(sorted(by_line), quota)):
            change = generator.choice(by_line[path, line])
            above = path.read_text().split("\n")[: line - 1]
            occurrence = sum(text.strip() == change.old for text in above)
            file, number = str(path.relative_to(root / PACKAGE)), len(found) + 1
            found.append(Mutant(f"drawn-{number:03}", file, change.old, change.new, change.rule, occurrence, line))
    return found


def _quotas(lines: dict[str, int]) -> dict[str, int]:
    quotas = {name: max(LEAST, COUNT * count // sum(lines.values())) for name, count in lines.items()}
    by_size = sorted(lines, key=lines.__getitem__, reverse=True)
    while sum(quotas.values()) != COUNT:
        step = 1 if sum(quotas.values()) < COUNT else -1
        quotas[by_size[0]] += step
        by_size.append(by_size.pop(0))
    return quotas


def _code_lines(path: Path) -> int:
    """Lines on which a statement begins, docstrings left out."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))
    return len(
        {node.lineno for node in nodes if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))}
    )


def redraw() -> None:
    """Draw anew and keep what was drawn."""
    from tests.mutants.by_hand import FAULTS

    write_drawn(draw({(fault.file, fault.old) for fault in FAULTS}))
