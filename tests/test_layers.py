"""Imports point downward only, and ARCHITECTURE.md says so truly."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"

# From the bottom up: a file may import from its own layer and from those above it in this list.
LAYERS = (
    ("_errors", "_version"),
    ("_keras", "_keras_fit", "_keras_graph", "_keras_layers", "_keras_state", "_logging"),
    ("cluster", "checkpoint"),
    ("topology",),
    ("collectives", "data", "parameters"),
    ("step",),
    ("loops",),
    ("resume", "guard", "monitor", "doctor"),
    ("workers", "asynchronous"),
    ("strategies",),
    ("tuning",),
    ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing"),
    ("launch", "migrate", "report", "scaling"),
    ("cli",),
)


def layer_of(module: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if module in names)


def imports(path: Path) -> set[str]:
    """First words after ``lockstep.`` of everything that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lockstep.")}
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    own = layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for module in imports(path):
        assert layer_of(module) <= own, f"{path.name} imports lockstep.{module}, which lies above it"


def test_neighbours_do_not_know_each_other():
    for one, other in (("collectives", "data"), ("data", "collectives"), ("cluster", "checkpoint")):
        assert all(other not in imports(path) for path in (PACKAGE / one).rglob("*.py"))


def test_the_picture_in_architecture_md_shows_these_layers():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, flags=re.MULTILINE)
    shown = [tuple(re.findall(r"`(\w+)[/`]", names)) for _, names in rows]
    assert tuple(shown) == LAYERS


def test_only_the_seam_touches_the_internals_of_keras():
    for path in FILES:
        if path.name not in ("_keras.py", "_keras_graph.py", "_keras_layers.py", "_keras_state.py"):
            text = path.read_text()
            assert "keras.src" not in text, path
            private = re.findall(r"\b(?:model|layer|variable|optimizer|metric)\._\w+", text)
            assert not private, f"{path.name} reads {private}"
