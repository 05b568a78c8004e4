"""What the names of a program stand for: ``tf.keras.Model`` is ``tensorflow.keras.Model`` after ``import tensorflow as tf``."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep.migrate.source import Source

__all__ = ["Bindings", "Chain", "imports_of_ours"]

_OURS = ("tensorflow", "keras", "lockstep")


@dataclass(frozen=True)
class Chain:
    """A dotted name in a program, as long as it goes.

    Args:
        node: it.
        name: what it stands for, in full.
        root: its first word.
    """

    node: ast.Attribute | ast.Name
    name: str
    root: str


class Bindings:
    """The imports of a program.

    Args:
        source: the program.

    Attributes:
        modules: for each name that an import of TensorFlow, Keras or Lockstep has made, what it stands for.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        assigned = {
            node.id
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        self.modules = {name: full for name, full in self._imported() if name not in assigned}

    def _imported(self) -> Iterator[tuple[str, str]]:
        for statement in imports_of_ours(self._source):
            for alias in statement.names:
                if isinstance(statement, ast.ImportFrom):
                    yield alias.asname or alias.name, f"{statement.module}.{alias.name}"
                elif alias.asname:
                    yield alias.asname, alias.name
                else:
                    first = alias.name.partition(".")[0]
                    yield first, first

    @cached_property
    def chains(self) -> list[Chain]:
        """All dotted names that begin with something imported, each as long as it goes."""
        inner = {id(node.value) for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute)}
        found = []
        for node in ast.walk(self._source.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
                words = _words(node)
                if words and words[0] in self.modules:
                    found.append(Chain(node, ".".join([self.modules[words[0]], *words[1:]]), words[0]))
        return found

    def name_of(self, node: ast.expr) -> str:
        """What an expression stands for in full; empty where it is no imported name."""
        words = _words(node)
        return ".".join([self.modules[words[0]], *words[1:]]) if words and words[0] in self.modules else ""


def imports_of_ours(source: Source) -> Iterator[ast.Import | ast.ImportFrom]:
    """The statements that import from TensorFlow, Keras or Lockstep."""
    for node in source.statements():
        if (isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in _OURS for alias in node.names)) or (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _OURS
        ):
            yield node


def _words(node: ast.AST) -> list[str]:
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else []
