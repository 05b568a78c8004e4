"""What Keras 3 on JAX does not accept, and no rule can rewrite: each place with what to write."""

import ast
from collections.abc import Iterator

from lockstep.tools.migrate.rewrite_rules import (
    activations_of,
    arguments_of,
    assigned,
    full_name,
    is_constant,
    is_model,
    is_rate,
    made_by,
    method_of,
    values_of,
)
from lockstep.tools.migrate.source import ImportBindings, SourceText
from lockstep.tools.migrate.symbol_map import short, translated, why_absent

Left = Iterator[tuple[ast.AST, str]]

_METHODS = {
    "fit_generator": "write fit, which takes generators",
    "evaluate_generator": "write evaluate, which takes generators",
    "predict_generator": "write predict, which takes generators",
    "predict_classes": "write keras.ops.argmax(model.predict(…), axis=-1), or model.predict(…) > 0.5 for one output",
    "add_metric": "give the metric to compile, or call update_state of a metric that the layer creates",
    "metrics_names": "Keras 3 has one name for all metrics of compile; write model.evaluate(…, return_dict=True)",
}
_DATA_ARGUMENT = "give it to the keras.utils.PyDataset"
_ARGUMENTS = {
    **{
        (method, argument): _DATA_ARGUMENT
        for method in ("fit", "evaluate", "predict")
        for argument in ("max_queue_size", "use_multiprocessing", "workers")
    },
    **dict.fromkeys(
        (("save", "save_format"), ("save_model", "save_format")),
        "leave it out, and let the name end with .keras; model.export writes for a server",
    ),
    ("save_weights", "save_format"): "leave it out, and let the name end with .weights.h5",
    ("compile", "experimental_run_tf_function"): "leave it out",
}
_EXTRACTED = (
    "Keras 3 extracts into another folder, and returns it; "
    "leave the argument out, and write shutil.unpack_archive(archive, folder)"
)
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
_NUMPY = "numpy: an array of JAX has no such method; write keras.ops.convert_to_numpy(…)"
_RATE = "optimizer.lr: if this is an optimizer of Keras, write learning_rate"
_RATE_OF_LOGS = "lr: the logs and the history of Keras 3 call it learning_rate"
_LOGS = ("history", "logs")
_DOUBLE = "float64: JAX computes in float32; set JAX_ENABLE_X64=1 before the start, or write float32"
_SEEDS = "set_random_seed also seeds NumPy and random: call it once, and before the seeds of those"
_RESETS = "reset_states: a metric has reset_state; a model has none, but its recurrent layers have"
_OF_MODELS, _OF_WEIGHTS = (".keras", ".h5", ".hdf5"), (".weights.h5",)
WRITTEN = {  # Endings of the files of each function or method.
    "ModelCheckpoint": (".keras", ".h5"),
    "load_model": _OF_MODELS,
    "load_weights": (".weights.json", *_OF_WEIGHTS, *_OF_MODELS),
    "save": _OF_MODELS,
    "save_model": _OF_MODELS,
    "save_weights": _OF_WEIGHTS,
}
_JOINED = ("Path", "fspath", "join", "str")  # Functions whose result ends as their last argument does.


def find_incompatibilities(source: SourceText, bindings: ImportBindings) -> Left:
    """Find what Keras 3 on JAX does not accept: methods, arguments, TensorFlow within a model, another backend."""
    for attribute in source.nodes(ast.Attribute):
        if attribute.attr in _METHODS:
            yield attribute, f"{attribute.attr}: {_METHODS[attribute.attr]}"
        if is_rate(attribute):
            yield attribute, _RATE
    for constant in source.nodes(ast.Constant):
        if constant.value == "KERAS_BACKEND":
            yield from _other_backend(source, constant)
    for call in source.nodes(ast.Call):
        yield from _arguments(call, full_name(bindings, call))
        yield from _file_names(source, bindings, call)
        if method_of(call) == "numpy" and _is_of_jax(source, bindings, call.func.value):  # type: ignore[attr-defined]  # A method has an owner.
            yield call, _NUMPY
    yield from _names_of_rates(source)
    yield from _seeds(source, bindings)
    yield from _doubles(source, bindings)
    yield from _resets(source, bindings)
    yield from _within_models(source, bindings)


def _arguments(call: ast.Call, name: str) -> Left:
    method = method_of(call)
    for keyword in call.keywords:
        reason = _ARGUMENTS.get((method, keyword.arg or ""))
        if reason:
            yield call, f"{method}({keyword.arg}=…): {reason}"
        if keyword.arg == "decay" and name.startswith("keras.optimizers."):
            yield call, _DECAY
    first = call.args[0] if call.args else None
    if method == "add_weight" and isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield call, "add_weight: the first argument is the shape; write name=…"
    given = arguments_of(call, name) if name == "keras.utils.get_file" else {}
    for argument in ("extract", "untar"):
        if argument in given and not is_constant(given[argument], False):
            yield call, f"get_file({argument}=…): {_EXTRACTED}"


def _is_of_jax(source: SourceText, bindings: ImportBindings, value: ast.expr, follows: bool = True) -> bool:
    """Return whether a value is the result of a metric or of a strategy's method, also by a name or a function."""
    made = assigned(source, value) or value
    if not isinstance(made, ast.Call) or full_name(bindings, made):
        return False
    if isinstance(made.func, ast.Name) and follows:
        called = [one for one in source.nodes(ast.FunctionDef) if one.name == made.func.id]
        returned = [node.value for one in called for node in ast.walk(one) if isinstance(node, ast.Return)]
        return any(_is_of_jax(source, bindings, one, follows=False) for one in returned if one is not None)
    given = [ast.unparse(one).strip("'\"").rpartition(".")[2].upper() for one in values_of(made)]
    is_reduction = method_of(made) == "reduce" and ("SUM" in given or "MEAN" in given)  # Datasets have reduce, too.
    return is_reduction or method_of(made) in ("gather", "result", "run")


def _names_of_rates(source: SourceText) -> Left:
    """Find the word ``lr`` for the learning rate: in logs, and as an attribute of an optimizer."""
    for entry in source.nodes(ast.Subscript):
        if isinstance(entry.ctx, ast.Load) and is_constant(entry.slice, "lr") and _is_log(entry.value):
            yield entry, _RATE_OF_LOGS
    for call in source.nodes(ast.Call):
        words = [is_constant(one, "lr") for one in call.args]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and words[:1] == [True]:
            yield from [(call, _RATE_OF_LOGS)] if _is_log(call.func.value) else []
        elif ast.unparse(call.func) in ("getattr", "hasattr", "setattr") and words[1:2] == [True]:
            yield from [(call, _RATE)] if is_rate(ast.Attribute(call.args[0], "lr")) else []


def _is_log(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in _LOGS


def _seeds(source: SourceText, bindings: ImportBindings) -> Left:
    """Find calls of ``set_random_seed``, which was ``tf.random.set_seed``, that undo other seeds: in a loop, or below theirs."""
    loops = [loop for kind in (ast.For, ast.While) for loop in source.nodes(kind)]
    repeated = {node for loop in loops for node in ast.walk(loop)}
    others = [call for call in source.nodes(ast.Call) if ast.unparse(call.func).endswith("random.seed")]
    for call in source.nodes(ast.Call):
        if full_name(bindings, call) == "keras.utils.set_random_seed":
            seed = list(map(ast.unparse, values_of(call)))
            above = (list(map(ast.unparse, values_of(one))) for one in others if one.lineno < call.lineno)
            if call in repeated or any(one != seed for one in above):
                yield call, _SEEDS


def _doubles(source: SourceText, bindings: ImportBindings) -> Left:
    """Find calls of Keras with the type float64, unless the program lets JAX compute in it."""
    if any(constant.value in ("jax_enable_x64", "JAX_ENABLE_X64") for constant in source.nodes(ast.Constant)):
        return
    for call in source.nodes(ast.Call):
        is_double = any(is_constant(one, "float64") for one in values_of(call))
        if is_double and full_name(bindings, call).startswith("keras."):
            yield call, _DOUBLE


def _resets(source: SourceText, bindings: ImportBindings) -> Left:
    """Find calls of ``reset_states`` that may be a metric's, unless the program defines such a method itself."""
    if any(function.name == "reset_states" for function in source.nodes(ast.FunctionDef)):
        return
    layers = made_by(source, bindings, "layers.")
    for node in source.nodes(ast.Attribute):
        if node.attr == "reset_states" and ast.unparse(node.value) not in layers:
            yield node, _RESETS


def _file_names(source: SourceText, bindings: ImportBindings, call: ast.Call) -> Left:
    """Find names of files that Keras 3 refuses for their ending."""
    name = full_name(bindings, call)
    if not name and isinstance(call.func, ast.Attribute):
        is_other = call.func.attr == "save" and not is_model(source, bindings, call.func.value)
        name = "" if is_other else f"keras.Model.{call.func.attr}"
    function = name.rpartition(".")[2]
    if function not in WRITTEN:
        return
    given, endings = arguments_of(call, name), WRITTEN[function]
    weights_only = given.get("save_weights_only")
    if isinstance(weights_only, ast.Constant) and weights_only.value:
        endings = _OF_WEIGHTS
    is_known = (weights_only is None or isinstance(weights_only, ast.Constant)) and "save_format" not in given
    path = given.get("filepath")
    made = path and assigned(source, path)
    values = [made.body, made.orelse] if isinstance(made, ast.IfExp) else [made]
    ends = [_end_of(path)] if _end_of(path) else list(map(_end_of, values))
    if is_known and not all(any(end.endswith(one) or one.endswith(end) for one in endings) for end in ends):
        yield call, f"{function}: the name of the file must end with {' or '.join(endings)}"


def _end_of(value: ast.expr | None) -> str:
    """Return the last characters of a text or a path, as far as the source shows them."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return _end_of(value.values[-1]) if value.values else ""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Div)):
        return _end_of(value.right)
    if isinstance(value, ast.Call) and value.args:
        function = ast.unparse(value.func).rpartition(".")[2]
        return _end_of(value.args[-1]) if function in _JOINED else ""
    return ""


def _within_models(source: SourceText, bindings: ImportBindings) -> Left:
    inside = {id(node) for part in _models(source, bindings) for node in ast.walk(part)}
    for chain in bindings.chains:
        is_of_tensorflow = translated(chain.name).startswith("tensorflow.") and not why_absent(chain.name)
        if id(chain.node) in inside and is_of_tensorflow:
            yield chain.node, f"{short(chain.name)}: {_WITHIN}"


def _models(source: SourceText, bindings: ImportBindings) -> Iterator[ast.AST]:
    """Iterate over the classes and functions that compute within a step, as far as the source shows it."""
    for own in source.nodes(ast.ClassDef):
        bases = [translated(bindings.name_of(base)).split(".") for base in own.bases]
        if any(base[0] == "keras" and base[1:] and base[1] in _COMPUTING for base in bases):
            yield own
    for call in source.nodes(ast.Call):
        if (name := full_name(bindings, call)).startswith("keras.layers."):
            yield from [call] if name == "keras.layers.Lambda" else activations_of(call, name)


def _other_backend(source: SourceText, constant: ast.Constant) -> Left:
    """Find assignments of the variable ``KERAS_BACKEND`` to another backend than JAX."""
    for node in source.nodes(ast.AST):
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and any(constant is _key(target) for target in node.targets):
            value = node.value
        elif isinstance(node, ast.Call) and len(node.args) == 2 and node.args[0] is constant:
            value = node.args[1] if isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault" else None
        if isinstance(value, ast.Constant) and value.value != "jax":
            yield constant, _BACKEND


def _key(target: ast.expr) -> ast.expr | None:
    return target.slice if isinstance(target, ast.Subscript) else None
