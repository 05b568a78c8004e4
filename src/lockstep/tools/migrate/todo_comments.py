"""What a program still has of TensorFlow that has no counterpart: a comment above each says what to write."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.tools.migrate.edits import Edit, SourceText
from lockstep.tools.migrate.imports import is_there, thing
from lockstep.tools.migrate.incompatibilities import not_taken
from lockstep.tools.migrate.multi_worker_rules import unlike
from lockstep.tools.migrate.name_resolution import ImportBindings, imports_of_ours
from lockstep.tools.migrate.rewrite_rules import calls, is_claim_of_logits
from lockstep.tools.migrate.symbol_map import translated, why_absent

__all__ = ["TodoComment", "marked", "marks"]

_PREFIX = "# lockstep migrate: "
_LOGITS = "a softmax and from_logits=True: JAX takes the softmax twice where it is one model's; `lockstep doctor` tells"
_EXTENDED = "strategy.extended has no counterpart; see docs/custom_loops.md"
_UNCLEAR = (
    "the script also uses this name for something else, so what begins with it stays: give the import a name of its own"
)


@dataclass(frozen=True)
class TodoComment:
    """Something that is not translated.

    Args:
        line: of the statement, from 1.
        sentence: what it is, and what to write.
    """

    line: int
    sentence: str


def marks(source: SourceText, bindings: ImportBindings) -> list[TodoComment]:
    """What is left in a program, by line; each thing once a statement."""
    first_lines = _FirstLines(source)
    found = {TodoComment(first_lines(node), sentence) for node, sentence in _left(source, bindings)}
    return sorted(found, key=lambda mark: (mark.line, mark.sentence))


def marked(source: SourceText, found: list[TodoComment]) -> SourceText:
    """The program with a comment for each mark that has none yet."""
    edits = []
    for mark in found:
        line = source.lines[mark.line - 1]
        indent = line[: len(line) - len(line.lstrip())]
        comment = f"{indent}{_PREFIX}{mark.sentence}\n"
        above = source.lines[max(0, mark.line - 4) : mark.line - 1]
        start = sum(len(one) for one in source.lines[: mark.line - 1])
        if comment not in above:
            edits.append(Edit(start, start, comment))
    return source.with_edits(edits)


def _left(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    for chain in bindings.chains:
        reason = _reason(chain.name)
        if reason:
            yield chain.node, f"{_short(chain.name)}: {reason}"
    for statement in imports_of_ours(source):
        for alias in statement.names:
            name = f"{statement.module}.{alias.name}" if isinstance(statement, ast.ImportFrom) else alias.name
            if alias.name != "*" and (reason := _reason(name)):
                yield statement, f"{_short(name)}: {reason}"
    for call in calls(source):
        for argument in _unknown_arguments(call, bindings.name_of(call.func)):
            yield (
                call,
                f"{bindings.name_of(call.func)} has no argument {argument!r}: leave it out, or see its documentation",
            )
    yield from not_taken(source, bindings)
    yield from unlike(source, bindings)
    yield from _unclear(bindings)
    constants = [node for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    has_softmax = any(node.value == "softmax" for node in constants)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "extended" and isinstance(node.value, ast.Name):
            yield node, _EXTENDED
        if has_softmax and is_claim_of_logits(node):
            yield node.value, _LOGITS


def _unclear(bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Imports whose names may stand for something else, where more than the import would be translated."""
    for chain in bindings.unclear_chains:
        root = bindings.modules[chain.root]
        if translated(chain.name) != translated(root) + chain.name[len(root) :] or _reason(chain.name):
            yield bindings.unclear[chain.root], f"{chain.root}: {_UNCLEAR}"


def _reason(name: str) -> str | None:
    """Why something cannot be used as it is; None where it can."""
    if name == "tensorflow.config.set_visible_devices":  # It keeps TensorFlow off the accelerators.
        return None
    becomes = translated(name)
    then = name.replace(
        "lockstep.", "tensorflow.distribute.", 1
    )  # An import that is translated already gives such names.
    if known := why_absent(name) or why_absent(becomes) or (why_absent(then) if not is_there(becomes) else None):
        return known
    if becomes.startswith("tensorflow") or is_there(becomes):
        return None
    return f"{'Keras 3' if becomes.startswith('keras') else 'Lockstep'} has no such name"


def _unknown_arguments(call: ast.Call, name: str) -> list[str]:
    """Named arguments of a call that what is called now does not take."""
    try:
        parameters = inspect.signature(thing(name)).parameters if name and not name.startswith("tensorflow") else {}
    except (AttributeError, TypeError, ValueError):  # There is no such thing, or it does not say.
        return []
    takes_any = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [] if takes_any else [one.arg for one in call.keywords if one.arg and one.arg not in parameters]


def _short(name: str) -> str:
    return name.replace("tensorflow", "tf", 1)


class _FirstLines:
    """Gives the first line of the innermost statement around a node, its decorators included."""

    def __init__(self, source: SourceText) -> None:
        self._statements = sorted(source.statements(), key=lambda node: (node.lineno, -(node.end_lineno or 0)))

    def __call__(self, node: ast.AST) -> int:
        line: int = node.lineno  # type: ignore[attr-defined]  # Expressions and keywords' values have one.
        found = line
        for statement in self._statements:
            decorators = statement.decorator_list if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []
            first = min([statement.lineno, *(one.lineno for one in decorators)])
            if first <= line <= (statement.end_lineno or first):
                found = first
        return found
