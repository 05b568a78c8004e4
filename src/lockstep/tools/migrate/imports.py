"""Names and imports: what TensorFlow's modules are called in Keras and Lockstep, and what a program then has to import."""

import ast
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, imports_of_ours
from lockstep.tools.migrate.symbol_map import translated

__all__ = ["imports", "is_there", "names", "thing"]

_BACKEND = 'os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.\n'
_HIDDEN = '.config.set_visible_devices([], "GPU")  # TensorFlow may read data; the GPUs are for JAX.\n'


def is_there(name: str) -> bool:
    """Whether Keras or Lockstep has something of that full name."""
    try:
        return name.partition(".")[0] in ("keras", "lockstep") and thing(name) is not None
    except AttributeError:
        return False


def thing(name: str) -> Any:
    """What Keras or Lockstep has under a full name; AttributeError where it has nothing."""
    module, _, rest = name.partition(".")
    found = import_module(module)
    return operator.attrgetter(rest)(found) if rest else found


def names(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Dotted names whose import, once it is translated, would not give the right thing."""
    for chain in bindings.chains:
        root = bindings.modules[chain.root]
        becomes, by_import = translated(chain.name), translated(root) + chain.name[len(root) :]
        if (becomes not in (chain.name, by_import) and is_there(becomes)) or (
            becomes == by_import and root == "tensorflow" != translated(root)
        ):
            yield source.replaced(chain.node, becomes)


def imports(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Import statements, and those that are missing after names were translated."""
    used = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    statements = list(imports_of_ours(source))
    written = {statement: _rewritten(statement, used) for statement in statements}
    missing = [name for name in ("keras", "lockstep") if _is_missing(name, source, written)]
    first = next(one for one in source.tree.body if any(node in written for node in ast.walk(one)))
    if first not in written:  # It is a block with an import in it.
        yield Edit(source.line_start(first), source.line_start(first), _head(source, missing, first))
    for statement, lines in written.items():
        head = _head(source, missing, first) if statement is first else ""
        text = head + _between(source, statement).join(lines) + _hiding(source, statement, lines)
        if text != source.segment(statement):
            yield _replaced(source, statement, text)


def _is_missing(name: str, source: SourceText, written: Mapping[ast.Import | ast.ImportFrom, list[str]]) -> bool:
    """Whether a name is used where no import is seen that makes it; what a function imports is seen in it alone."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    around: dict[ast.AST, set[ast.AST]] = defaultdict(set)
    for function in functions:
        for node in ast.walk(function):
            around[node].add(function)
    places = [around[statement] for statement, lines in written.items() if name in _bound(lines)]
    uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == name]
    return not all(any(place <= around[use] for place in places) for use in uses)


def _between(source: SourceText, statement: ast.stmt) -> str:
    """What stands between several imports in the place of one."""
    before = source.text[source.line_start(statement) : source.span(statement)[0]]
    return "; " if before.strip() else f"\n{before}"


def _head(source: SourceText, missing: Sequence[str], first: ast.stmt) -> str:
    """What comes before the first of the imports."""
    before = source.tree.body[: source.tree.body.index(first)]
    aliases = [alias for statement in before if isinstance(statement, ast.Import) for alias in statement.names]
    has_os = any(alias.name == "os" and not alias.asname for alias in aliases)
    needs_backend = "KERAS_BACKEND" not in source.text
    head = f"{'' if has_os else 'import os'}\n\n{_BACKEND}\n".lstrip("\n") if needs_backend else ""
    return head + "".join(f"import {name}\n" for name in missing)


def _hiding(source: SourceText, statement: ast.stmt, lines: list[str]) -> str:
    """TensorFlow that stays must leave the accelerators alone."""
    stays = [line for line in lines if line.split()[:2] == ["import", "tensorflow"]]
    if not stays or "set_visible_devices" in source.text or statement not in source.tree.body:
        return ""
    return f"\n{stays[0].split()[-1]}{_HIDDEN}".rstrip("\n")


def _replaced(source: SourceText, statement: ast.stmt, text: str) -> Edit:
    start, end = source.span(statement)
    if text:
        return source.replaced(statement, text.rstrip("\n"))
    whole_line = source.line_start(statement) == start and source.text[end : end + 1] == "\n"
    return Edit(start, end + 1, "") if whole_line else Edit(start, end, "pass")


def _rewritten(statement: ast.Import | ast.ImportFrom, used: set[str]) -> list[str]:
    """The lines that take the place of an import statement."""
    if isinstance(statement, ast.Import):
        return [line for alias in statement.names for line in _module(alias, used)]
    by_module: dict[str, list[str]] = {}
    for alias in statement.names:
        full = f"{statement.module}.{alias.name}"
        becomes = translated(str(statement.module)) + ".*" if alias.name == "*" else translated(full)
        if not becomes.endswith("*") and not is_there(becomes):
            becomes = full
        module, _, last = becomes.rpartition(".")
        known = alias.asname or alias.name
        by_module.setdefault(module, []).append(last if last == known or last == "*" else f"{last} as {known}")
    return [_line(module, items) for module, items in by_module.items()]


def _line(module: str, items: list[str]) -> str:
    return f"from {module} import {', '.join(items)}" if module else f"import {', '.join(items)}"


def _module(alias: ast.alias, used: set[str]) -> list[str]:
    """The import of one module; none where its name is not used any more."""
    known = alias.asname or alias.name.partition(".")[0]
    if alias.name.partition(".")[0] == "tensorflow" and known not in used:
        return []
    becomes = translated(alias.name) if alias.asname else alias.name
    module, _, last = becomes.rpartition(".")
    if becomes == alias.name or not is_there(becomes):
        becomes = alias.name
    elif module:
        return [_line(module, [last if last == known else f"{last} as {known}"])]
    return [f"import {becomes}" + (f" as {alias.asname}" if alias.asname and alias.asname != becomes else "")]


def _bound(lines: Iterable[str]) -> set[str]:
    """Names that lines of imports make."""
    tree = ast.parse("\n".join(lines))
    aliases = [alias for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
