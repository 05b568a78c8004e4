"""Rewrite names and imports of TensorFlow to those of Keras and Lockstep, and add missing imports."""

import ast
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, relevant_imports
from lockstep.tools.migrate.symbol_map import translated

__all__ = ["exists", "resolve", "rewrite_imports", "rewrite_names"]

_BACKEND = 'os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.\n'
_HIDDEN = '.config.set_visible_devices([], "GPU")  # TensorFlow may read data; the GPUs are for JAX.\n'


def exists(name: str) -> bool:
    """Return whether Keras or Lockstep has an object of that full name."""
    try:
        return name.partition(".")[0] in ("keras", "lockstep") and resolve(name) is not None
    except AttributeError:
        return False


def resolve(name: str) -> Any:
    """Import and return the object of a full name.

    Raises:
        AttributeError: there is no such object.
    """
    module, _, rest = name.partition(".")
    found = import_module(module)
    return operator.attrgetter(rest)(found) if rest else found


def rewrite_names(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite the dotted names that the translated imports would not resolve correctly."""
    for chain in bindings.chains:
        root = bindings.modules[chain.root]
        becomes, by_import = translated(chain.name), translated(root) + chain.name[len(root) :]
        if (becomes not in (chain.name, by_import) and exists(becomes)) or (
            becomes == by_import and root == "tensorflow" != translated(root)
        ):
            yield source.replaced(chain.node, becomes)


def rewrite_imports(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite import statements, and add those that the translated names need."""
    used = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    statements = list(relevant_imports(source))
    written = {statement: _rewrite_import(statement, used) for statement in statements}
    missing = [name for name in ("keras", "lockstep") if _is_missing(name, source, written)]
    first = next(one for one in source.tree.body if any(node in written for node in ast.walk(one)))
    if first not in written:  # A block that contains an import.
        yield Edit(source.line_start(first), source.line_start(first), _head(source, missing, first))
    for statement, lines in written.items():
        head = _head(source, missing, first) if statement is first else ""
        text = head + _separator(source, statement).join(lines) + _hide_gpus(source, statement, lines)
        if text != source.segment(statement):
            yield _replace_import(source, statement, text)


def _is_missing(name: str, source: SourceText, written: Mapping[ast.Import | ast.ImportFrom, list[str]]) -> bool:
    """Return whether a name is used outside of the scope of its imports; the import of a function is visible only there."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    around: dict[ast.AST, set[ast.AST]] = defaultdict(set)
    for function in functions:
        for node in ast.walk(function):
            around[node].add(function)
    places = [around[statement] for statement, lines in written.items() if name in _bound_names(lines)]
    uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == name]
    return not all(any(place <= around[use] for place in places) for use in uses)


def _separator(source: SourceText, statement: ast.stmt) -> str:
    """Return the separator of the imports that replace one import."""
    before = source.text[source.line_start(statement) : source.span(statement)[0]]
    return "; " if before.strip() else f"\n{before}"


def _head(source: SourceText, missing: Sequence[str], first: ast.stmt) -> str:
    """Return the lines to insert before the first import."""
    before = source.tree.body[: source.tree.body.index(first)]
    aliases = [alias for statement in before if isinstance(statement, ast.Import) for alias in statement.names]
    has_os = any(alias.name == "os" and not alias.asname for alias in aliases)
    needs_backend = "KERAS_BACKEND" not in source.text
    head = f"{'' if has_os else 'import os'}\n\n{_BACKEND}\n".lstrip("\n") if needs_backend else ""
    return head + "".join(f"import {name}\n" for name in missing)


def _hide_gpus(source: SourceText, statement: ast.stmt, lines: list[str]) -> str:
    """Return a line that hides the GPUs from TensorFlow if the program still imports it."""
    stays = [line for line in lines if line.split()[:2] == ["import", "tensorflow"]]
    if not stays or "set_visible_devices" in source.text or statement not in source.tree.body:
        return ""
    return f"\n{stays[0].split()[-1]}{_HIDDEN}".rstrip("\n")


def _replace_import(source: SourceText, statement: ast.stmt, text: str) -> Edit:
    start, end = source.span(statement)
    if text:
        return source.replaced(statement, text.rstrip("\n"))
    whole_line = source.line_start(statement) == start and source.text[end : end + 1] == "\n"
    return Edit(start, end + 1, "") if whole_line else Edit(start, end, "pass")


def _rewrite_import(statement: ast.Import | ast.ImportFrom, used: set[str]) -> list[str]:
    """Return the lines that replace an import statement."""
    if isinstance(statement, ast.Import):
        return [line for alias in statement.names for line in _import_lines(alias, used)]
    by_module: dict[str, list[str]] = {}
    for alias in statement.names:
        full = f"{statement.module}.{alias.name}"
        becomes = translated(str(statement.module)) + ".*" if alias.name == "*" else translated(full)
        if not becomes.endswith("*") and not exists(becomes):
            becomes = full
        module, _, last = becomes.rpartition(".")
        known = alias.asname or alias.name
        by_module.setdefault(module, []).append(last if last == known or last == "*" else f"{last} as {known}")
    return [_import_line(module, items) for module, items in by_module.items()]


def _import_line(module: str, items: list[str]) -> str:
    return f"from {module} import {', '.join(items)}" if module else f"import {', '.join(items)}"


def _import_lines(alias: ast.alias, used: set[str]) -> list[str]:
    """Return the import of one module; none if its name is unused."""
    known = alias.asname or alias.name.partition(".")[0]
    if alias.name.partition(".")[0] == "tensorflow" and known not in used:
        return []
    becomes = translated(alias.name) if alias.asname else alias.name
    module, _, last = becomes.rpartition(".")
    if becomes == alias.name or not exists(becomes):
        becomes = alias.name
    elif module:
        return [_import_line(module, [last if last == known else f"{last} as {known}"])]
    return [f"import {becomes}" + (f" as {alias.asname}" if alias.asname and alias.asname != becomes else "")]


def _bound_names(lines: Iterable[str]) -> set[str]:
    """Return the names that lines of imports bind."""
    tree = ast.parse("\n".join(lines))
    aliases = [alias for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
