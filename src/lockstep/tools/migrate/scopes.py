"""Where a name of a program means something of the program's own, and not what an import has made of it."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from lockstep.tools.migrate.edits import SourceText

__all__ = ["OURS", "Scopes", "is_import_of_ours"]

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
