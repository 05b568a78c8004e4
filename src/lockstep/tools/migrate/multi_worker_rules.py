"""What programs for several workers need besides names: a task from outside, and one order of rows on all of them."""

import ast
from collections.abc import Iterator

from lockstep.tools.migrate.edits import Edit, SourceText
from lockstep.tools.migrate.name_resolution import ImportBindings
from lockstep.tools.migrate.rewrite_rules import calls
from lockstep.tools.migrate.symbol_map import translated

__all__ = ["is_for_workers", "shuffled_alike", "task_from_outside", "unlike"]

_STRATEGY = "MultiWorkerMirroredStrategy"
_ALIKE = "all workers must read the same rows in the same order"
_SEED = f"shuffle: {_ALIKE}; if this is a data set, write seed=1"
_TASK = "TF_CONFIG: lockstep run sets that of each worker; write os.environ.setdefault('TF_CONFIG', …)"
_SEEDED = ("list_files", "shuffle_and_repeat")  # functions of tf.data that shuffle
_DRAWS = "tensorflow.random."
_DRAWN_ALIKE = ("Generator", "set_seed", "get_global_generator", "experimental")


def is_for_workers(bindings: ImportBindings) -> bool:
    """Whether a program makes the strategy of several workers."""
    return any(translated(chain.name).endswith(f".{_STRATEGY}") for chain in bindings.chains)


def task_from_outside(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """``os.environ["TF_CONFIG"] = …`` with a task that is written there becomes a default: ``lockstep run`` sets that of each worker."""
    if not any(map(_is_task, ast.walk(source.tree))):
        return
    for node in ast.walk(source.tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Subscript) and _is_entry(target):
            text = f'{source.segment(target.value)}.setdefault("TF_CONFIG", {source.segment(node.value)})'
            yield source.replaced(node, f"{text}  # lockstep run has set it for each worker.")


def _is_task(node: ast.AST) -> bool:
    """Whether a part of a program is ``{"type": …, "index": 0}`` with a number."""
    if not isinstance(node, ast.Dict):
        return False
    given = {
        key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
    }
    return "type" in given and isinstance(given.get("index"), ast.Constant)


def _is_entry(target: ast.Subscript) -> bool:
    is_named = isinstance(target.slice, ast.Constant) and target.slice.value == "TF_CONFIG"
    return is_named and ast.unparse(target.value).endswith("environ")


def shuffled_alike(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """``shuffle(1024)`` of a data set gets a seed, with which it gives the same order on all workers."""
    if source.for_workers or is_for_workers(bindings):
        for call in _without_seed(source):
            if _is_of_data(source, bindings, call):
                end = source.span(call)[1] - 1
                before = source.text[:end].rstrip()
                yield Edit(len(before), end, " seed=1" if before.endswith(",") else ", seed=1")


def unlike(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Where that is not sure, and what else workers would do each in their own way."""
    if not (source.for_workers or is_for_workers(bindings)):
        return
    for call in _without_seed(source):
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id not in ("np", "numpy", "random", "rng"):
            yield call, _SEED
    is_seeded = any(bindings.name_of(call.func).endswith((".set_seed", ".set_random_seed")) for call in calls(source))
    has_task = any(map(_is_task, ast.walk(source.tree)))
    for call in calls(source):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in _SEEDED and "seed" not in given and not any(map(_is_false, (*call.args, given.get("shuffle")))):
            yield call, f"{name}: {_ALIKE}; write seed=1"
        elif _is_false(given.get("deterministic")):
            yield call, f"deterministic=False: {_ALIKE}; leave it out"
        elif has_task and name in ("update", "putenv") and "TF_CONFIG" in ast.unparse(call):
            yield call, _TASK
        elif _draws(bindings.name_of(call.func)) and "seed" not in given and not is_seeded:
            yield call, f"tf.random: {_ALIKE}; write tf.random.set_seed(1) at the top of the script"


def _draws(name: str) -> bool:
    own = name.removeprefix(_DRAWS)
    return own != name and not own.startswith(("stateless", *_DRAWN_ALIKE))


def _is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _without_seed(source: SourceText) -> Iterator[ast.Call]:
    """The calls ``.shuffle(rows)``; the second argument of a data set's is the seed."""
    for call in calls(source):
        names = {keyword.arg for keyword in call.keywords}
        is_shuffle = isinstance(call.func, ast.Attribute) and call.func.attr == "shuffle"
        if is_shuffle and len(call.args) < 2 and not names & {"seed", None} and (call.args or "buffer_size" in names):
            yield call


def _is_of_data(source: SourceText, bindings: ImportBindings, call: ast.Call) -> bool:
    """Whether a call belongs to a chain of ``tf.data``, or its argument is a number of rows."""
    if call.args and isinstance(call.args[0], ast.Constant):
        return isinstance(call.args[0].value, int)
    if call.keywords:
        return True
    node: ast.expr = call
    while isinstance(node, (ast.Call, ast.Attribute)):
        if bindings.name_of(node).startswith("tensorflow.data."):
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False
