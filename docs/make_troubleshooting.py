"""Writes the list of messages in ``troubleshooting.md`` from the sources: ``python docs/make_troubleshooting.py``.

A message is the text that an error of ``_errors.py`` is made with, and the text of a failure or refusal that another process raises as
a ClusterError. Values in it stand as their names. Where a function makes an error out of a text that it is given, each of its calls is
a message. What stands before the marker in the page is written by hand. ``tests/test_troubleshooting.py`` holds the page to this.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.distributed.control.failures import Failure, FailureKind

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "troubleshooting.md"
MARKER = "<!-- From here on docs/make_troubleshooting.py writes the page. -->\n"

_BASE = "LockstepError"
# What is no error itself and becomes a ClusterError in another process: the argument that is the text.
_CARRIERS = {"Failure": 4, "Refusal": 0, "abort": 0, "_break": 0}
_TOPICS = {
    "asynchronous": "Workers at their own pace, and the coordinator: [parameter servers](parameter_servers.md), [coordinator](coordinator.md)",
    "checkpoint": "Checkpoints on disk: [resume](resume.md)",
    "cluster": "Meeting and going on together: [clusters](clusters.md), [several machines](several_machines.md)",
    "collectives": "How gradients meet: [collectives](collectives.md)",
    "datasets": "The data of the examples: [examples](../examples/README.md)",
    "data": "Inputs: [inputs](inputs.md)",
    "doctor": "The doctor: [doctor](doctor.md)",
    "guard": "NaN and Inf: [NaN guard](nan_guard.md)",
    "keras": "What of Keras is relied on: [versions](versions.md)",
    "launch": "`lockstep run`: [launching](launching.md)",
    "loops": "Loops of one's own: [custom loops](custom_loops.md)",
    "migrate": "`lockstep migrate`: [migrating](migrating.md)",
    "monitor": "Watching a run: [monitoring](monitoring.md)",
    "parameters": "Variables on servers: [parameter servers](parameter_servers.md)",
    "errors": "Numbers and names as arguments",
    "report": "`lockstep demo`, `env`, `top` and `checkpoint`: [monitoring](monitoring.md), [resume](resume.md)",
    "resume": "Going on after an end: [resume](resume.md)",
    "scaling": "`lockstep scale`: [scaling](scaling.md)",
    "step": "The step",
    "strategies": "Strategies and scopes",
    "testing": "The check of a cross-device operation: [collectives](collectives.md)",
    "topology": "Devices: [performance](performance.md), [determinism](determinism.md)",
    "tuning": "Batch and learning rate: [which batch](batch_size.md)",
    "workers": "Processes as trainers: [several machines](several_machines.md)",
}

_EXIT_CODES = """## Exit codes

What a worker ends with, and with it `lockstep run`. [Launching](launching.md#exit-codes) has those of the launcher itself (2, 128 + n).
"""
_LOST = """## A worker is lost

All others end, and say in their last lines what has become of it, and what to do:
"""
_MESSAGES = """## Messages

Names in italics, and …, stand for values. Everything is a `lockstep.LockstepError`; the [reference](reference/errors.rst) has the tree.
"""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    """A message of the library.

    Args:
        error: name of its class.
        topic: the package, or the file at the top, that makes it.
        text: with the names of its values in asterisks.
    """

    error: str
    topic: str
    text: str


@dataclass(frozen=True)
class _Place:
    """A call with what is around it."""

    path: Path
    tree: ast.Module
    function: _Function | None
    call: ast.Call


def errors() -> dict[str, str]:
    """The first sentence about each class of error, by name."""
    classes = [node for node in ast.parse((PACKAGE / "_errors.py").read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: str(ast.get_docstring(node)).splitlines()[0] for node in classes if node.name != _BASE}


def messages() -> list[Message]:
    """All messages, in the order of the files."""
    calls, found = _calls(), []
    for name, index in {**dict.fromkeys(errors(), 0), **_CARRIERS}.items():
        for place in calls[name]:
            error = name if name in errors() else "ClusterError"
            texts = _texts(place, index, calls)
            found += [(place.path, Message(error, _topic(place.path), text)) for text in texts if _says_something(text)]
    return [message for _, message in sorted(dict.fromkeys(found), key=lambda item: item[0])]


def page(written: str) -> str:
    """The page anew: what is written by hand in ``written``, then the list."""
    head, _, _ = written.partition(MARKER)
    by_error: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for message in messages():
        by_error[message.error][message.topic].append(message.text)
    parts = []
    for error, sentence in sorted(errors().items()):
        parts.append(f"### {error}\n\n{sentence}\n")
        parts += [f"{_heading(topic)}\n\n{_listed(texts)}" for topic, texts in sorted(by_error[error].items())]
    return f"{head}{MARKER}\n{_EXIT_CODES}\n{_codes()}\n{_LOST}\n{_lost()}\n{_MESSAGES}\n" + "\n".join(parts)


def _heading(topic: str) -> str:
    title, _, links = _TOPICS[topic].partition(": ")
    return f"**{title}** ({links})" if links else f"**{title}**"


def _codes() -> str:
    """A row for each code, as ``exit_codes.py`` has it."""
    lines = (PACKAGE / "cluster" / "exit_codes.py").read_text().splitlines()
    rows = [found.groups() for line in lines if (found := re.fullmatch(r"([A-Z_]+) = (\d+)(?:  # (.*))?", line))]
    table = "".join(f"| {code} | {name.lower().replace('_', ' ')} | {why or ''} |\n" for name, code, why in rows)
    return f"| code | | |\n| --- | --- | --- |\n{table}"


def _lost() -> str:
    """A row for each failure of a worker that is no error of the program."""
    cures = {kind: Failure(kind, 0, "", 0, "").cure for kind in FailureKind}
    rows = "".join(f"| {kind} | {_escaped(cure)} |\n" for kind, cure in cures.items() if cure)
    return f"| | |\n| --- | --- |\n{rows}"


def _listed(texts: list[str]) -> str:
    return "".join(f"- {text}\n" for text in sorted(set(texts)))


def _topic(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").lstrip("_").partition("_")[0]


def _says_something(text: str) -> bool:
    """Whether more than values is left: else it passes on what somebody else has said."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\*[^*]+\*", "", text))) > 1


# Where errors are made.


def _calls() -> dict[str, list[_Place]]:
    """Every call in the package, by the last part of what is called."""
    found: dict[str, list[_Place]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function, call in _within(tree, None):
            found[_last_name(call.func)].append(_Place(path, tree, function, call))
    return found


def _within(node: ast.AST, function: _Function | None) -> Iterator[tuple[_Function | None, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        yield from _within(child, child if isinstance(child, _Function) else function)


def _texts(place: _Place, index: int, calls: Mapping[str, list[_Place]], depth: int = 0) -> list[str]:
    """What an argument of a call may say; several texts where it is put together from what the function is given."""
    given = _argument(place.call, index)
    if given is None:
        return []
    if isinstance(given, ast.Call) and (helper := _function(place.tree, _last_name(given.func))) is not None:
        returned = [node.value for node in ast.walk(helper) if isinstance(node, ast.Return) and node.value is not None]
        return [_text(value, place.tree, helper, {}) for value in returned]
    used = {node.id for node in ast.walk(given) if isinstance(node, ast.Name)}
    parameters = _parameters(place.function)
    for position, name in enumerate(parameters):
        if name in used and depth < 2 and place.function is not None:
            inner = [other for other in calls[place.function.name] if _is_seen(place, other)]
            said = [text for other in inner for text in _texts(other, position, calls, depth + 1) if _is_prose(text)]
            if said:
                return [_text(given, place.tree, place.function, {name: text}) for text in said]
    return [_text(given, place.tree, place.function, {})]


def _is_seen(place: _Place, other: _Place) -> bool:
    name = place.function.name if place.function else ""
    return place.path == other.path or (not name.startswith("_") and place.path.parent == other.path.parent)


def _is_prose(text: str) -> bool:
    return " " in re.sub(r"\*[^*]+\*", "", text).strip()


def _argument(call: ast.Call, index: int) -> ast.expr | None:
    return call.args[index] if len(call.args) > index and not isinstance(call.args[index], ast.Starred) else None


def _parameters(function: _Function | None) -> list[str]:
    names = [] if function is None else [argument.arg for argument in function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _function(tree: ast.Module, name: str) -> _Function | None:
    return next((node for node in ast.walk(tree) if isinstance(node, _Function) and node.name == name), None)


# What an expression says.


def _text(value: ast.expr, tree: ast.Module, function: _Function | None, known: Mapping[str, str]) -> str:
    def of(inner: ast.expr) -> str:
        return _text(inner, tree, function, known)

    match value:
        case ast.Constant(value=str(text)):
            return _escaped(text)
        case ast.JoinedStr(values=values):
            return "".join(of(part) for part in values)
        case ast.FormattedValue(value=inner):
            return of(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return of(left) + of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return of(body) or of(orelse)
        case ast.Call(func=ast.Attribute(value=inner, attr="strip" | "rstrip" | "capitalize")):
            return of(inner)
        case ast.Name(id=name):
            assigned = None if name in known else _assigned(name, tree, function)
            return known.get(name, _field(name)) if assigned is None else of(assigned)
        case ast.Attribute(attr=name) if name != "__name__":
            return _field(name)
    return "…"


def _assigned(name: str, tree: ast.Module, function: _Function | None) -> ast.expr | None:
    """The text that a name stands for: of the function, or of the file."""
    for scope in ([] if function is None else ast.walk(function), tree.body):
        for node in scope:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and _is_text(node.value):
                return node.value
    return None


def _is_text(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_text(value.body) and _is_text(value.orelse)
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _field(name: str) -> str:
    return f"*{name.strip('_').replace('_', ' ')}*"


def _escaped(text: str) -> str:
    """As Markdown; options of commands are code, as two hyphens would become a dash."""
    parts = re.split(r"(--[a-z][a-z_-]*)", " ".join(text.split("\n")))
    return "".join(
        f"`{part}`" if part.startswith("--") else re.sub(r"([\\`*_\[\]<>|])", r"\\\1", part) for part in parts
    )


def _last_name(called: ast.expr) -> str:
    return ast.unparse(called).rpartition(".")[2] if isinstance(called, ast.Name | ast.Attribute) else ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
