"""What a program says to Keras that Keras 3 on JAX does not take: methods, arguments, TensorFlow within a model, another backend."""

import ast
from collections.abc import Iterator

from lockstep.tools.migrate.edits import SourceText
from lockstep.tools.migrate.name_resolution import ImportBindings
from lockstep.tools.migrate.rewrite_rules import calls, full_name
from lockstep.tools.migrate.symbol_map import translated, why_absent

__all__ = ["not_taken"]

Left = Iterator[tuple[ast.AST, str]]

_METHODS = {
    "fit_generator": "write fit, which takes generators",
    "evaluate_generator": "write evaluate, which takes generators",
    "predict_generator": "write predict, which takes generators",
}
_OF_THE_DATA = "give it to the keras.utils.PyDataset"
_ARGUMENTS = {
    **{
        (method, argument): _OF_THE_DATA
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


def not_taken(source: SourceText, bindings: ImportBindings) -> Left:
    """Parts of a program, and what to write in their place."""
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
    """The classes and functions of a program that compute within a step, as far as that is sure."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            bases = [translated(bindings.name_of(base)).split(".") for base in node.bases]
            if any(base[0] == "keras" and base[1:] and base[1] in _COMPUTING for base in bases):
                yield node
        elif isinstance(node, ast.Call) and full_name(bindings, node) == "keras.layers.Lambda":
            yield node


def _other_backend(source: SourceText, constant: ast.Constant) -> Left:
    """Where the program sets the variable of the environment to something else than JAX."""
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
