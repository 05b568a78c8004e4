"""Habits that hold over the whole package; each limit is stated once."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import statistics
import types
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"
FILES = sorted(PACKAGE.rglob("*.py"))
# Functions that users call for it; programs and commands, for their own process; and a block after which it is as it was.
SET_THE_ENVIRONMENT = ("cpu_devices.py", "cli.py", "cluster_check.py", "env.py")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


def functions():
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                yield f"{path.name}:{node.name}", (node.end_lineno or first) - first + 1


def test_functions_are_short():
    lengths = sorted(length for _, length in functions())
    longest = max(functions(), key=lambda item: item[1])
    assert statistics.median(lengths) <= 9
    assert lengths[len(lengths) * 9 // 10] <= 30
    assert longest[1] <= 45, longest


def test_public_methods_have_a_docstring_which_may_be_inherited():
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    classes = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    own = [kind for kind in classes if kind.__module__.startswith("lockstep.") and not kind.__name__.startswith("_")]
    methods = [(kind, name) for kind in own for name in vars(kind) if not name.startswith("_")]
    without = [f"{kind.__qualname__}.{name}" for kind, name in methods if is_method(kind, name) and not doc(kind, name)]
    assert len(methods) > 500
    assert not without


def is_method(kind, name):
    return isinstance(
        vars(kind)[name], types.FunctionType | property | functools.cached_property | classmethod | staticmethod
    )


def doc(kind, name):
    return any(getattr(vars(each).get(name), "__doc__", None) for each in kind.__mro__)


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"jax\._src", ()),
        (r"^\s*(os\.environ|environment)(\[.*\] = |\.(setdefault|update|pop)\()", SET_THE_ENVIRONMENT),
        (r"jax\.config\.update", ("cpu_devices.py", "jax_init.py")),
        (r"\bassert\b(?!_)", ()),
        (r"\bprint\(", ("demo.py", "cli.py", "translate.py")),
        (r"import (tensorflow|torch)\b", ()),
        (r"\bpickle\b", ()),
        (r"\bTODO\b|\bFIXME\b|NotImplementedError", ()),
    ],
)
def test_what_is_avoided(pattern, allowed):
    found = [
        name for name, text in code_without_comments() if name not in allowed and re.search(pattern, text, re.MULTILINE)
    ]
    assert not found


@functools.cache
def code_without_comments() -> list[tuple[str, str]]:
    return [(path.name, without_docstrings(ast.unparse(tree_of(path)))) for path in FILES]


def without_docstrings(text: str) -> str:
    return re.sub(r'"""[\s\S]*?"""', "", text)


def test_no_two_classes_share_a_name():
    names = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")].append(path.name)
    shared = {name: files for name, files in names.items() if len(files) > 1}
    assert shared == {
        "MultiWorkerMirroredStrategy": shared.get("MultiWorkerMirroredStrategy")
    }  # the older one of experimental


def test_no_two_files_share_a_name():
    names = Counter(path.name for path in FILES)
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "base.py"}


def test_files_do_not_import_each_other_in_a_circle():
    modules = {
        ".".join(("lockstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in FILES
    }
    imports = {name: set(imported_at_the_top(path, modules)) - {name} for name, path in modules.items()}
    while removable := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in removable:
            del imports[name]
    assert not imports, f"these files are in a circle, or import one: {sorted(imports)}"


def imported_at_the_top(path, modules):
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module


def test_programs_outside_of_the_package_import_what_is_there():
    """Benchmarks run rarely, and would not show it."""
    root = Path(__file__).parents[1]
    missing = []
    for path in [
        *(root / "benchmarks").rglob("*.py"),
        *(root / "examples").rglob("*.py"),
        *(root / "docs").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
                module = importlib.import_module(node.module)
                missing += [f"{path}: {node.module}.{each.name}" for each in node.names if not _has(module, each.name)]
    assert not missing


def _has(module, name):
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None
