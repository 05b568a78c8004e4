"""What the names of a program stand for: ``tf.keras.Model`` is ``tensorflow.keras.Model`` after ``import tensorflow as tf``."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep.tools.migrate.edits import SourceText
from lockstep.tools.migrate.scopes import OURS, Scopes, is_import_of_ours
from lockstep.tools.migrate.symbol_map import translated

__all__ = ["DottedName", "ImportBindings", "imports_of_ours"]


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
