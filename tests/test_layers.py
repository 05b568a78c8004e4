"""Imports point downward only, and ARCHITECTURE.md says so truly."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"

# From the bottom up: a file may import from its own layer and from those above it in this list.
LAYERS = (
    ("_array_encoding", "_errors", "_atomic_files", "_padded_array", "_version"),
    ("_keras", "_logging"),
    ("distributed/cluster", "distributed/resolvers", "distributed/control", "checkpoint"),
    ("devices",),
    ("collectives", "data"),
    ("execution",),
    ("custom_loops",),
    ("fit", "doctor"),
    ("distributed", "parameter_server"),
    ("strategies",),
    ("tuning",),
    ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing"),
    ("launch", "tools"),
    ("cli", "__main__"),
)
NUMBERS = {name: number for number, names in enumerate(LAYERS) for name in names}


def package_of(module: str) -> str:
    """The entry of ``LAYERS`` that a module such as ``execution/spmd`` belongs to: a subpackage before its package."""
    parts = module.split("/")
    return next(name for n in (2, 1) if (name := "/".join(parts[:n])) in NUMBERS)


def imports(path: Path) -> set[str]:
    """The entries of ``LAYERS`` that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("lockstep.")}
    return {package_of(name.removeprefix("lockstep.").replace(".", "/")) for name in found}


def package_imports() -> dict[str, set[str]]:
    """Which entries of ``LAYERS`` each entry imports."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        own = package_of(path.relative_to(PACKAGE).as_posix().removesuffix(".py"))
        found.setdefault(own, set()).update(imports(path) - {own})
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    own = NUMBERS[package_of(path.relative_to(PACKAGE).as_posix().removesuffix(".py"))]
    for package in imports(path):
        assert NUMBERS[package] <= own, f"{path.name} imports lockstep/{package}, which lies above it"


def test_neighbours_do_not_know_each_other():
    for one, other in (("collectives", "data"), ("data", "collectives"), ("distributed/control", "checkpoint")):
        files = [*(PACKAGE / one).rglob("*.py")]
        assert files
        assert not [path for path in files if other in imports(path)]


def test_the_picture_in_architecture_md_shows_these_layers():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, flags=re.MULTILINE)
    shown = [tuple(re.findall(r"`([\w/]+?)/?`", names)) for _, names in rows]
    assert tuple(shown) == LAYERS


def test_the_files_in_the_boxes_of_architecture_md_exist():
    boxes = re.findall(r"^```\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"\w*[a-z][_/][\w/]+", "\n".join(boxes))) - {"train_step", "shard_map"}  # functions
    assert len(named) > 10
    assert not [name for name in named if not [*PACKAGE.rglob(f"{name}.py"), *PACKAGE.rglob(name)]]


@pytest.mark.slow
def test_the_picture_of_the_packages_is_drawn_from_these_imports():
    picture = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
    assert picture["PICTURE"].read_text() == picture["picture"](), "Fix: python docs/make_architecture.py"


def test_only_the_seam_touches_the_internals_of_keras():
    for path in FILES:
        if path.parent.name != "_keras":
            text = path.read_text()
            assert "keras.src" not in text, path
            private = re.findall(r"\b(?:model|layer|variable|optimizer|metric)\._\w+", text)
            assert not private, f"{path.name} reads {private}"
