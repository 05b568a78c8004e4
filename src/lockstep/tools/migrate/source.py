"""The source text of a program: its syntax tree, edits that keep all other text, and what imported names stand for."""

import ast
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lockstep._errors import OptionError
from lockstep.tools.migrate.symbol_map import translated

__all__ = [
    "OURS",
    "DottedName",
    "Edit",
    "ImportBindings",
    "Scopes",
    "SourceText",
    "imports_of_ours",
    "is_import_of_ours",
]


@dataclass(frozen=True)
class Edit:
    """Characters from ``start`` up to ``end`` become ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class SourceText:
    """A program.

    Args:
        text: of the whole file.
        path: of the file, for messages.
        for_workers: whether several workers run it: a file that goes with it makes their strategy.
    """

    text: str
    path: str = "script.py"
    for_workers: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The tree of the text.

        Raises:
            OptionError: it is not Python.
        """
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise OptionError(
                f"{self.path}, line {error.lineno}: {error.msg}. The script must be Python 3; of a notebook, export the code first."
            ) from None

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends, as Python counts them."""
        return list(io.StringIO(self.text, newline=""))

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where a node begins and ends in the text; a decorated statement begins at its name."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _at(self, line: int, column: int) -> int:
        """A place as the parser says it: the line from 1, the column in bytes."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_start(self, node: ast.expr | ast.stmt) -> int:
        """Where the line of a node begins, or that of its first decorator."""
        decorators = (
            node.decorator_list if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
        )
        return self._starts[min([node.lineno, *(one.lineno for one in decorators)]) - 1]

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """The edit that puts ``text`` in the place of a node; a comment at its end is left out where another statement follows on the line."""
        start, end = self.span(node)
        if isinstance(node, ast.stmt) and self.text[end:].lstrip(" \t").startswith(";"):
            before, newline, last = text.rpartition("\n")
            text = before + newline + last.partition("  #")[0]
        return Edit(start, end, text)

    def statements(self) -> Iterator[ast.stmt]:
        """All statements, also those inside others."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt))

    def with_edits(self, edits: Iterable[Edit]) -> "SourceText":
        """The program after edits, none of which may overlap; those at the same place come in their order."""
        parts, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            parts += [self.text[at : edit.start], edit.text]
            at = edit.end
        return replace(self, text="".join([*parts, self.text[at:]]))


OURS = ("tensorflow", "keras", "lockstep")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)


class Scopes:
    """The names that a program binds in each scope, but for imports from TensorFlow, Keras and Lockstep.

    Args:
        source: the program.
    """

    def __init__(self, source: SourceText) -> None:
        nodes = list(ast.walk(source.tree))
        self._parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._bound: dict[ast.AST, set[str]] = defaultdict(set)
        for node in nodes:
            for name in _bound_by(node):
                self._bound[next(self._around(node))].add(name)

    def hide(self, node: ast.AST, name: str) -> bool:
        """Whether a scope around a node has bound a name; what a class binds is not seen by its methods."""
        return any(name in self._bound[scope] for scope in self._around(node) if not isinstance(scope, ast.ClassDef))

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The scopes around a node, from within."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, _SCOPES):
                yield node


def is_import_of_ours(node: ast.AST) -> bool:
    """Whether a node is a statement that imports from TensorFlow, Keras or Lockstep."""
    if isinstance(node, ast.Import):
        return any(_is_ours(alias.name) for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module or "")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def _bound_by(node: ast.AST) -> list[str]:
    """The names that a node gives a meaning of the program's own."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ExceptHandler):
        return [node.name] if node.name else []
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names if not _is_ours(alias.name)]
    if isinstance(node, ast.ImportFrom) and not is_import_of_ours(node):
        return [alias.asname or alias.name for alias in node.names]
    return []


@dataclass(frozen=True)
class DottedName:
    """A dotted name in a program, as long as it goes.

    Args:
        node: it.
        name: what it stands for, in full.
        root: its first word.
    """

    node: ast.Attribute | ast.Name
    name: str
    root: str


class ImportBindings:
    """The imports of a program.

    Args:
        source: the program.

    Attributes:
        modules: for each name that an import of TensorFlow, Keras or Lockstep has made, what it stands for.
        unclear: those of them that the program also gives another meaning, with the statement that imports them.
    """

    def __init__(self, source: SourceText) -> None:
        self._source, self._scopes = source, Scopes(source)
        self.modules: dict[str, str] = {}
        self.unclear: dict[str, ast.stmt] = {}
        for name, full, statement in self._imported():
            before = self.modules.setdefault(name, full)
            if self._scopes.hide(statement, name) or translated(before) != translated(full):
                self.unclear[name] = statement

    def _imported(self) -> Iterator[tuple[str, str, ast.stmt]]:
        for statement in imports_of_ours(self._source):
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                if isinstance(statement, ast.ImportFrom):
                    yield alias.asname or alias.name, f"{statement.module}.{alias.name}", statement
                elif first in OURS:
                    yield alias.asname or first, alias.name if alias.asname else first, statement

    @cached_property
    def chains(self) -> list[DottedName]:
        """All dotted names that begin with something imported, each as long as it goes."""
        return [chain for chain in self._chains if self._is_clear(chain.node, chain.root)]

    @cached_property
    def unclear_chains(self) -> list[DottedName]:
        """Those of which that is not sure."""
        return [chain for chain in self._chains if chain.root in self.unclear]

    @cached_property
    def _chains(self) -> list[DottedName]:
        inner = {id(node.value) for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute)}
        found = []
        for node in ast.walk(self._source.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
                words = _words(node)
                if words and words[0] in self.modules:
                    found.append(DottedName(node, ".".join([self.modules[words[0]], *words[1:]]), words[0]))
        return found

    def name_of(self, node: ast.expr) -> str:
        """What an expression stands for in full; empty where it is no imported name."""
        words = _words(node)
        is_known = bool(words) and words[0] in self.modules and self._is_clear(node, words[0])
        return ".".join([self.modules[words[0]], *words[1:]]) if is_known else ""

    def _is_clear(self, node: ast.AST, name: str) -> bool:
        return name not in self.unclear and not self._scopes.hide(node, name)


def imports_of_ours(source: SourceText) -> Iterator[ast.Import | ast.ImportFrom]:
    """The statements that import from TensorFlow, Keras or Lockstep."""
    for node in source.statements():
        if isinstance(node, (ast.Import, ast.ImportFrom)) and is_import_of_ours(node):
            yield node


def _words(node: ast.AST) -> list[str]:
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else []
