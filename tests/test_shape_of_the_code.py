"""Habits that hold over the whole package; each limit is stated once."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import statistics
import types
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"
FILES = sorted(PACKAGE.rglob("*.py"))
# Functions that users call for it; programs and commands, for their own process; and a block after which it is as it was.
SET_THE_ENVIRONMENT = ("cpu_devices.py", "cli.py", "cluster_check.py", "env.py")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


def functions():
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                yield f"{path.name}:{node.name}", (node.end_lineno or first) - first + 1


def test_functions_are_short():
    lengths = sorted(length for _, length in functions())
    longest = max(functions(), key=lambda item: item[1])
    assert statistics.median(lengths) <= 9
    assert lengths[len(lengths) * 9 // 10] <= 30
    assert longest[1] <= 45, longest


def test_public_methods_have_a_docstring_which_may_be_inherited():
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    classes = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    own = [kind for kind in classes if kind.__module__.startswith("lockstep.") and not kind.__name__.startswith("_")]
    methods = [(kind, name) for kind in own for name in vars(kind) if not name.startswith("_")]
    without = [f"{kind.__qualname__}.{name}" for kind, name in methods if is_method(kind, name) and not doc(kind, name)]
    assert len(methods) > 500
    assert not without


def is_method(kind, name):
    return isinstance(
        vars(kind)[name], types.FunctionType | property | functools.cached_property | classmethod | staticmethod
    )


def doc(kind, name):
    return any(getattr(vars(each).get(name), "__doc__", None) for each in kind.__mro__)


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"jax\._src", ()),
        (r"^\s*(os\.environ|environment)(\[.*\] = |\.(setdefault|update|pop)\()", SET_THE_ENVIRONMENT),
        (r"jax\.config\.update", ("cpu_devices.py", "jax_init.py")),
        (r"\bassert\b(?!_)", ()),
        (r"\bprint\(", ("demo.py", "cli.py", "translate.py")),
        (r"import (tensorflow|torch)\b", ()),
        (r"\bpickle\b", ()),
        (r"\bTODO\b|\bFIXME\b|NotImplementedError", ()),
    ],
)
def test_what_is_avoided(pattern, allowed):
    found = [
        name for name, text in code_without_comments() if name not in allowed and re.search(pattern, text, re.MULTILINE)
    ]
    assert not found


@functools.cache
def code_without_comments() -> list[tuple[str, str]]:
    return [(path.name, without_docstrings(ast.unparse(tree_of(path)))) for path in FILES]


def without_docstrings(text: str) -> str:
    return re.sub(r'"""[\s\S]*?"""', "", text)


def test_no_two_classes_share_a_name():
    names = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")].append(path.name)
    shared = {name: files for name, files in names.items() if len(files) > 1}
    assert shared == {
        "MultiWorkerMirroredStrategy": shared.get("MultiWorkerMirroredStrategy")
    }  # the older one of experimental


def test_no_two_files_share_a_name():
    names = Counter(path.name for path in FILES)
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "base.py"}


def test_files_do_not_import_each_other_in_a_circle():
    modules = {
        ".".join(("lockstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in FILES
    }
    imports = {name: set(imported_at_the_top(path, modules)) - {name} for name, path in modules.items()}
    while removable := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in removable:
            del imports[name]
    assert not imports, f"these files are in a circle, or import one: {sorted(imports)}"


def imported_at_the_top(path, modules):
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module


def test_programs_outside_of_the_package_import_what_is_there():
    """Benchmarks run rarely, and would not show it."""
    root = Path(__file__).parents[1]
    missing = []
    for path in [
        *(root / "benchmarks").rglob("*.py"),
        *(root / "examples").rglob("*.py"),
        *(root / "docs").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
                module = importlib.import_module(node.module)
                missing += [f"{path}: {node.module}.{each.name}" for each in node.names if not _has(module, each.name)]
    assert not missing


def _has(module, name):
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None


NO_FIX = {  # Class, file and beginning of messages without a fix, by reason
    "Lockstep catches it, and decides or tells what to do": (
        ("CannotSplitError", "execution/", ""),
        ("MixedRowsError", "execution/rowwise/", ""),
        ("ConnectionLostError", "parameter_server/array_transport.py", ""),
        ("RetryableConnectError", "distributed/control/handshake.py", ""),
        ("HandshakeError", "distributed/control/handshake.py", ""),
        ("ProtocolError", "", ""),
        ("ValueError", "_array_encoding.py", ""),
        ("ValueError", "checkpoint/manifest.py", ""),
        ("ValueError", "checkpoint/shards.py", ""),
        ("ValueError", "checkpoint/export_formats.py", "Orbax finds"),
        ("ValueError", "data/random_state.py", ""),
        ("ValueError", "fit/checkpointing/callback_attributes.py", ""),
        ("ValueError", "tools/plan/hardware.py", ""),
    ),
    "the reason for which a process tries again to join": (
        ("JoinRejection", "distributed/control/admission.py", "the chief (…) is of start"),
        ("JoinRejection", "distributed/control/control_server.py", "the job of this chief has failed"),
        ("JoinRejection", "launch/rendezvous_state.py", "another node … has joined"),
        ("JoinRejection", "launch/rendezvous_state.py", "the job of node 0 is ending"),
    ),
    "a phrase, which the caller makes a sentence with a fix": (
        ("TypeError", "_array_encoding.py", "a"),
        ("OSError", "_atomic_files.py", "… has more than"),
    ),
    "as Python, Keras or argparse word it": (
        ("AttributeError", "__init__.py", "module 'lockstep' has no attribute"),
        ("ModuleNotFoundError", "launch/worker_main.py", "No module named"),
        ("TypeError", "custom_loops/distributed_dataset.py", "the number of batches"),
        ("ArgumentTypeError", "cli.py", "expected"),
    ),
    "the text of another error, with its fix or a user's": (
        ("ClusterError", "distributed/attach_to_jax.py", "process … of … of JAX: …"),
        ("ClusterError", "distributed/resolvers/tf_config.py", "TF_CONFIG: …"),
        ("ClusterError", "parameter_server/fit_dispatch.py", "the chief's … has failed: …"),
        ("ClusterError", "parameter_server/function_schedulers.py", "the chief's evaluate has failed: …"),
        ("NonFiniteError", "fit/nan_guard.py", "NanGuard: … The variables are those before this step. …"),
    ),
    "a fault of Lockstep": (
        ("AssertionError", "parameter_server/task_client.py", "the chief has published"),
        ("KeyError", "custom_loops/per_replica.py", "replicas … are in none"),
        ("LookupError", "_keras/patches.py", "The table of patches"),
        ("ScopeError", "parameter_server/function_schedulers.py", "A function was assigned to a process"),
        ("TypeError", "strategies/self_check.py", "… does not shard"),
    ),
}


def test_each_error_message_has_a_fix():
    allowed = [entry for entries in NO_FIX.values() for entry in entries]
    without = {error: [entry for entry in allowed if is_allowed(error, entry)] for error in errors_without_fix()}
    assert not [error for error, entries in without.items() if not entries], 'Fix: end the message with "Fix: …"'
    assert {entry for entries in without.values() for entry in entries} == set(allowed)


def is_allowed(error, entry):
    kind, beginning_of_path, beginning = entry
    return error.kind == kind and error.path.startswith(beginning_of_path) and error.message.startswith(beginning)


RaisedError = namedtuple("RaisedError", "kind path message line")


def errors_without_fix():
    """The errors that are made with a literal message without a fix."""
    for path in FILES:
        for node in nodes_of(path):
            match node:
                case ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind), args=[message, *_]) if re.fullmatch(
                    r"\w*Error|JoinRejection", kind
                ):
                    text = text_of(message)
                    if re.search(r"\w", text.replace("…", "")) and not has_fix(message, texts_by_name(path)):
                        yield RaisedError(kind, path.relative_to(PACKAGE).as_posix(), text, node.lineno)


def text_of(node):
    """The text of a message, with … for each value in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return "…"


def has_fix(node, texts):
    """Whether a message has a fix, or a value in it has one each time that the same file assigns or returns it."""
    match node:
        case ast.Constant(value=str(text)):
            return "Fix: " in text
        case ast.JoinedStr(values=parts):
            return any(has_fix(part, texts) for part in parts)
        case ast.FormattedValue(value=value):
            return has_fix(value, texts)
        case ast.BinOp(left=left, right=right):
            return has_fix(left, texts) or has_fix(right, texts)
        case ast.IfExp(body=body, orelse=other):
            return has_fix(body, texts) and has_fix(other, texts)
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            values = texts.get(name, [])
            return bool(values) and all(has_fix(value, {**texts, name: []}) for value in values)
    return False


@functools.cache
def texts_by_name(path):
    """What a file assigns to each name, what its functions return, and the constants that it imports."""
    found = defaultdict(list)
    for node in nodes_of(path):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name].append(value)
            case ast.FunctionDef(name=name):
                found[name] += [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep."):
            source = (PACKAGE.parent / node.module.replace(".", "/")).with_suffix(".py")
            for name in [alias.name for alias in node.names if alias.name.isupper() and source in FILES]:
                found[name] += texts_by_name(source)[name]
    return found
