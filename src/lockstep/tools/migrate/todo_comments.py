"""Find what needs manual work after the translation, and add comments with advice to the program."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.tools.migrate.imports import exists, resolve
from lockstep.tools.migrate.rewrite_rules import calls, full_name, is_claim_of_logits, worker_differences
from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, relevant_imports
from lockstep.tools.migrate.symbol_map import translated, why_absent

__all__ = ["TodoComment", "add_comments", "find_incompatibilities", "find_todos"]

_PREFIX = "# lockstep migrate: "
_LOGITS = (
    "a softmax and from_logits=True: if both are of one model, JAX applies softmax twice; check with `lockstep doctor`"
)
_EXTENDED = "strategy.extended has no counterpart; see docs/custom_loops.md"
_AMBIGUOUS = (
    "the script also uses this name for something else, so names that begin with it stay: give the import another name"
)


@dataclass(frozen=True)
class TodoComment:
    """A comment about something that is not translated.

    Args:
        line: of the statement, from 1.
        sentence: what it is, and what to write.
    """

    line: int
    sentence: str


def find_todos(source: SourceText, bindings: ImportBindings) -> list[TodoComment]:
    """Find what needs manual work, by line; each sentence once per statement."""
    first_lines = _FirstLines(source)
    found = {TodoComment(first_lines(node), sentence) for node, sentence in _find_all(source, bindings)}
    return sorted(found, key=lambda mark: (mark.line, mark.sentence))


def add_comments(source: SourceText, found: list[TodoComment]) -> SourceText:
    """Add a comment above each statement, unless it has that comment already."""
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


def _find_all(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    for chain in bindings.chains:
        reason = _reason(chain.name)
        if reason:
            yield chain.node, f"{_short(chain.name)}: {reason}"
    for statement in relevant_imports(source):
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
    yield from find_incompatibilities(source, bindings)
    yield from worker_differences(source, bindings)
    yield from _ambiguous(bindings)
    constants = [node for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    has_softmax = any(node.value == "softmax" for node in constants)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "extended" and isinstance(node.value, ast.Name):
            yield node, _EXTENDED
        if has_softmax and is_claim_of_logits(node):
            yield node.value, _LOGITS


def _ambiguous(bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Find ambiguous imports that keep names below them from being translated."""
    for chain in bindings.ambiguous_chains:
        root = bindings.modules[chain.root]
        if translated(chain.name) != translated(root) + chain.name[len(root) :] or _reason(chain.name):
            yield bindings.ambiguous[chain.root], f"{chain.root}: {_AMBIGUOUS}"


def _reason(name: str) -> str | None:
    """Return what to write instead of a name; None if it may stay."""
    if name == "tensorflow.config.set_visible_devices":  # The translation inserts it itself.
        return None
    becomes = translated(name)
    then = name.replace("lockstep.", "tensorflow.distribute.", 1)  # From an import that is already translated.
    if known := why_absent(name) or why_absent(becomes) or (why_absent(then) if not exists(becomes) else None):
        return known
    if becomes.startswith("tensorflow") or exists(becomes):
        return None
    return f"{'Keras 3' if becomes.startswith('keras') else 'Lockstep'} has no such name"


def _unknown_arguments(call: ast.Call, name: str) -> list[str]:
    """Return the named arguments of a call that the translated function does not accept."""
    try:
        parameters = inspect.signature(resolve(name)).parameters if name and not name.startswith("tensorflow") else {}
    except (AttributeError, TypeError, ValueError):  # No such object, or no signature.
        return []
    takes_any = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [] if takes_any else [one.arg for one in call.keywords if one.arg and one.arg not in parameters]


def _short(name: str) -> str:
    return name.replace("tensorflow", "tf", 1)


class _FirstLines:
    """Lookup of the first line of the innermost statement around a node, including its decorators."""

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


Left = Iterator[tuple[ast.AST, str]]

_METHODS = {
    "fit_generator": "write fit, which takes generators",
    "evaluate_generator": "write evaluate, which takes generators",
    "predict_generator": "write predict, which takes generators",
}
_DATA_ARGUMENT = "give it to the keras.utils.PyDataset"
_ARGUMENTS = {
    **{
        (method, argument): _DATA_ARGUMENT
        for method in ("fit", "evaluate", "predict")
        for argument in ("max_queue_size", "use_multiprocessing", "workers")
    },
    ("save", "save_format"): "leave it out, and let the name end with .keras; model.export writes for a server",
}
_DECAY = "decay: write a schedule, such as keras.optimizers.schedules.InverseTimeDecay"
_WITHIN = "within a model TensorFlow's functions do not work on JAX: write keras.ops"
_COMPUTING = (
    "Model",
    "models",
    "layers",
    "losses",
    "metrics",
    "regularizers",
    "constraints",
    "initializers",
    "optimizers",
)
_BACKEND = 'KERAS_BACKEND: write "jax"'


def find_incompatibilities(source: SourceText, bindings: ImportBindings) -> Left:
    """Find what Keras 3 on JAX does not accept: methods, arguments, TensorFlow within a model, another backend."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in _METHODS:
            yield node, f"{node.attr}: {_METHODS[node.attr]}"
        if isinstance(node, ast.Constant) and node.value == "KERAS_BACKEND":
            yield from _other_backend(source, node)
    for call in calls(source):
        yield from _arguments(call, full_name(bindings, call))
    yield from _within_models(source, bindings)


def _arguments(call: ast.Call, name: str) -> Left:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    for keyword in call.keywords:
        reason = _ARGUMENTS.get((method, keyword.arg or ""))
        if reason:
            yield call, f"{method}({keyword.arg}=…): {reason}"
        if keyword.arg == "decay" and name.startswith("keras.optimizers."):
            yield call, _DECAY


def _within_models(source: SourceText, bindings: ImportBindings) -> Left:
    inside = {id(node) for part in _models(source, bindings) for node in ast.walk(part)}
    for chain in bindings.chains:
        is_of_tensorflow = translated(chain.name).startswith("tensorflow.") and not why_absent(chain.name)
        if id(chain.node) in inside and is_of_tensorflow:
            yield chain.node, f"{chain.name.replace('tensorflow', 'tf', 1)}: {_WITHIN}"


def _models(source: SourceText, bindings: ImportBindings) -> Iterator[ast.AST]:
    """Iterate over the classes and functions that compute within a step, as far as the source shows it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            bases = [translated(bindings.name_of(base)).split(".") for base in node.bases]
            if any(base[0] == "keras" and base[1:] and base[1] in _COMPUTING for base in bases):
                yield node
        elif isinstance(node, ast.Call) and full_name(bindings, node) == "keras.layers.Lambda":
            yield node


def _other_backend(source: SourceText, constant: ast.Constant) -> Left:
    """Find assignments of the variable ``KERAS_BACKEND`` to another backend than JAX."""
    for node in ast.walk(source.tree):
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and any(constant is _key(target) for target in node.targets):
            value = node.value
        elif isinstance(node, ast.Call) and len(node.args) == 2 and node.args[0] is constant:
            value = node.args[1] if isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault" else None
        if isinstance(value, ast.Constant) and value.value != "jax":
            yield constant, _BACKEND


def _key(target: ast.expr) -> ast.expr | None:
    return target.slice if isinstance(target, ast.Subscript) else None
