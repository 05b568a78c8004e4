"""The text of a program and its tree, and edits of the text that leave everything else as it is."""

import ast
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lockstep._errors import OptionError

__all__ = ["Edit", "SourceText"]


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
