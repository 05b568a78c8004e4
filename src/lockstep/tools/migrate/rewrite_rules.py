"""Rewrite rules besides names: each yields edits of the program, and only if the meaning is certain."""

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from lockstep.tools.migrate.source import Edit, ImportBindings, SourceText, parameters_of
from lockstep.tools.migrate.symbol_map import ACTIVATIONS, STRATEGY_METHODS, translated

_REDUCTIONS = ("none", "sum", "sum_over_batch_size")
_BEFORE_CACHE = ("batch", "prefetch", "shuffle")
_LOGITS = (
    "a {0} and from_logits=True: if both are of one model, TensorFlow takes what is before the {0} for logits, "
    "and JAX what is behind it; {1}, and check with `lockstep doctor`"
)
_SIZES = {  # Arguments of layers that must be Python integers in Keras 3.
    "Dense": ("units",),
    "Embedding": ("input_dim", "output_dim"),
    "GRU": ("units",),
    "MultiHeadAttention": ("num_heads", "key_dim"),
    "RepeatVector": ("n",),
    "SimpleRNN": ("units",),
}
_OF_ARRAYS = ("argmax", "argmin", "max", "min", "numpy", "prod", "sum")  # Methods that return NumPy scalars.
_SYNCHRONIZED = "keras.layers.experimental.SyncBatchNormalization"


def full_name(bindings: ImportBindings, call: ast.Call) -> str:
    """Return the translated full name of the called function; empty if it is not imported."""
    return bindings.translated(bindings.name_of(call.func))


def arguments_of(call: ast.Call, name: str) -> dict[str, ast.expr]:
    """Return the arguments of a call of ``name`` by their names; those after ``*`` have none."""
    names = [parameter for parameter in parameters_of(name) if parameter != "self"]
    given = takewhile(lambda value: not isinstance(value, ast.Starred), call.args)
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return dict(zip(names, given, strict=False)) | named


def activations_of(call: ast.Call, name: str) -> list[ast.expr]:
    """Return the arguments of a call of ``name`` that are activations."""
    return [value for argument, value in arguments_of(call, name).items() if argument.endswith("activation")]


def made_by(source: SourceText, bindings: ImportBindings, *modules: str) -> set[str]:
    """Return the names and attributes to which the program assigns calls of these modules of Keras, as text."""
    return {
        ast.unparse(target)
        for node in source.nodes(ast.Assign)
        if isinstance(node.value, ast.Call)
        if full_name(bindings, node.value).startswith(tuple(f"keras.{module}" for module in modules))
        for target in node.targets
    }


def assigned(source: SourceText, value: ast.expr) -> ast.expr | None:
    """Return what the program assigns to a name or an attribute, if it does so exactly once."""
    name = ast.unparse(value) if isinstance(value, (ast.Name, ast.Attribute)) else ""
    made = [
        node.value for node in source.nodes(ast.Assign) if any(ast.unparse(target) == name for target in node.targets)
    ]
    return made[0] if len(made) == 1 else None


def _renamed(source: SourceText, node: ast.Attribute, new: str) -> Edit:
    """Return the edit that renames the last word of an attribute."""
    end = source.span(node)[1]
    return Edit(end - len(node.attr), end, new)


def _appended(source: SourceText, call: ast.Call, text: str) -> Edit:
    """Return the edit that adds an argument after the last one of a call, before its comment and its final comma."""
    end = source.span(call)[1] - 1
    if not (call.args or call.keywords):
        return Edit(end, end, text)
    at = max([source.span(one)[1] for one in call.args] + [source.span(one)[1] for one in call.keywords])
    marks = re.finditer(r"#.*|\)", source.text[at:end])
    at += max((mark.end() for mark in marks if mark[0] == ")"), default=0)  # The argument may be in brackets.
    return Edit(at, at, f", {text}")


def aliases(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Replace ``keras = tf.keras`` by ``import keras``."""
    for node in source.nodes(ast.Assign):
        module = translated(bindings.name_of(node.value))
        if module in ("keras", "lockstep") and [ast.unparse(target) for target in node.targets] == [module]:
            yield source.replaced(node, f"import {module}")


def activations(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite activations: ``activation=tf.nn.relu`` becomes ``activation="relu"``."""
    for call in source.nodes(ast.Call):
        for value in activations_of(call, full_name(bindings, call)):
            name = bindings.name_of(value)
            short = name.removeprefix("tensorflow.nn.")
            if short != name and short in ACTIVATIONS and source.can_quote(value):
                yield source.replaced(value, f'"{short}"')


def reductions(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite reductions: ``reduction=tf.keras.losses.Reduction.NONE`` becomes ``reduction="none"``."""
    for chain in bindings.chains:
        enumeration, _, member = translated(chain.name).rpartition(".")
        is_word = enumeration == "keras.losses.Reduction" and member.lower() in _REDUCTIONS
        if is_word and source.can_quote(chain.node):
            yield source.replaced(chain.node, f'"{member.lower()}"')


def strategy_methods(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rename old methods of a strategy: ``experimental_run_v2`` becomes ``run``."""
    for node in source.nodes(ast.Attribute):
        if node.attr in STRATEGY_METHODS:
            yield _renamed(source, node, STRATEGY_METHODS[node.attr])


def metric_resets(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rename ``reset_states`` of metrics to ``reset_state``; layers keep the name."""
    metrics = made_by(source, bindings, "metrics.")
    for node in source.nodes(ast.Attribute):
        if node.attr == "reset_states" and ast.unparse(node.value) in metrics:
            yield _renamed(source, node, "reset_state")
    for own in source.nodes(ast.ClassDef):
        methods = {method.name for method in own.body if isinstance(method, ast.FunctionDef)}
        is_metric = any(translated(bindings.name_of(base)).startswith("keras.metrics.") for base in own.bases)
        if is_metric and "reset_states" in methods and "reset_state" not in methods:
            yield from _own_resets(source, own)


def _own_resets(source: SourceText, metric: ast.ClassDef) -> Iterator[Edit]:
    for node in ast.walk(metric):
        if isinstance(node, ast.FunctionDef) and node.name == "reset_states":
            start = source.text.index(node.name, source.span(node)[0])
            yield Edit(start, start + len(node.name), "reset_state")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("self.reset_states", "super().reset_states"):
            yield _renamed(source, node, "reset_state")


_SETTINGS = ("args", "cfg", "conf", "config", "flags", "hparams", "params")  # Their ``lr`` is no optimizer's.


def learning_rates(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rename ``model.optimizer.lr`` to ``model.optimizer.learning_rate``."""
    optimizers = made_by(source, bindings, "optimizers.")
    for node in source.nodes(ast.Attribute):
        of = node.value
        is_of_model = isinstance(of, ast.Attribute) and of.attr == "optimizer" and is_model(source, bindings, of.value)
        if node.attr == "lr" and (ast.unparse(of) in optimizers or (is_of_model and is_rate(node))):
            yield _renamed(source, node, "learning_rate")


def is_rate(attribute: ast.Attribute) -> bool:
    """Return whether an attribute is ``lr`` of what is called an optimizer, and no setting such as ``config.optimizer.lr``."""
    *owners, last = ast.unparse(attribute).lower().split(".")
    return last == "lr" and owners[-1].endswith(("optim", "optimizer")) and {*_SETTINGS}.isdisjoint(owners)


def is_model(source: SourceText, bindings: ImportBindings, owner: ast.expr) -> bool:
    """Return whether an expression is a model of Keras, by its name, its assignment or its training."""
    text = ast.unparse(owner)
    is_trained = any(ast.unparse(call.func) in (f"{text}.compile", f"{text}.fit") for call in source.nodes(ast.Call))
    made = made_by(source, bindings, "Model", "Sequential", "applications.", "models.")
    return text.endswith("model") or is_trained or text in made


def one_device_strategy(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Replace ``OneDeviceStrategy(device)`` by a mirrored strategy of one device."""
    for call in source.nodes(ast.Call):
        is_it = bindings.name_of(call.func) == "tensorflow.distribute.OneDeviceStrategy"
        given = values_of(call)
        if is_it and len(given) == 1 and bindings.is_import_at(call, "lockstep"):
            yield source.replaced(call, f"lockstep.MirroredStrategy([{source.segment(given[0])}])")


def add_n(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Replace ``tf.add_n(model.losses)`` by ``sum(model.losses)``, as the losses are arrays of JAX."""
    for call in source.nodes(ast.Call):
        is_it = bindings.name_of(call.func) == "tensorflow.add_n" and len(call.args) == 1 and not call.keywords
        if is_it and all(bindings.is_import_at(call, name) for name in ("sum", "*")):  # Nothing else is called sum.
            yield source.replaced(call.func, "sum")


def batch_normalization(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Replace ``SyncBatchNormalization`` by ``BatchNormalization(synchronized=True)``."""
    for call in source.nodes(ast.Call):
        if full_name(bindings, call) == _SYNCHRONIZED and bindings.is_import_at(call, "keras"):
            yield source.replaced(call.func, "keras.layers.BatchNormalization")
            yield _appended(source, call, "synchronized=True")


def old_arguments(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rename arguments: ``lr`` of an optimizer to ``learning_rate``, ``backup_dir`` to ``directory``."""
    for call in source.nodes(ast.Call):
        for keyword in call.keywords:
            old, new = keyword.arg, _new_argument(full_name(bindings, call), keyword.arg)
            if old and new:
                start = source.span(keyword)[0]
                yield Edit(start, start + len(old), new)


def _new_argument(name: str, argument: str | None) -> str | None:
    if name.startswith("keras.optimizers.") and argument == "lr":
        return "learning_rate"
    return "directory" if name == "lockstep.callbacks.BackupAndRestore" and argument == "backup_dir" else None


def integer_sizes(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Convert sizes of layers to ``int``: ``Embedding(np.max(x) + 1, 16)``; Keras 3 accepts no integers of NumPy there."""
    for call in source.nodes(ast.Call):
        name = full_name(bindings, call)
        sizes = _SIZES.get(name.removeprefix("keras.layers."), ())
        for argument, value in arguments_of(call, name).items():
            if argument in sizes and _is_of_numpy(source, bindings, value):
                yield source.replaced(value, f"int({source.segment(value)})")


def _is_of_numpy(source: SourceText, bindings: ImportBindings, value: ast.expr, follows: bool = True) -> bool:
    if isinstance(value, ast.BinOp):
        return any(_is_of_numpy(source, bindings, part, follows) for part in (value.left, value.right))
    if isinstance(value, ast.Call):
        is_method = isinstance(value.func, ast.Attribute) and value.func.attr in _OF_ARRAYS
        return (is_method and not bindings.name_of(value.func)) or _is_numpy(source, value.func)
    if isinstance(value, ast.Subscript):
        return _is_of_numpy(source, bindings, value.value, follows)
    made = assigned(source, value) if isinstance(value, ast.Name) and follows else None
    return made is not None and _is_of_numpy(source, bindings, made, follows=False)


def _is_numpy(source: SourceText, function: ast.expr) -> bool:
    """Return whether a function belongs to NumPy, under the name by which the program imports it."""
    imported = [alias for node in source.nodes(ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in imported if alias.name == "numpy"}
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in names


def cache_first(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Move ``cache()`` before shuffle, batch and prefetch, where it caches rows; the order of a shuffle stays that of the first pass.

    Splits by take and skip, and labels that are read apart from predictions, may need that order.
    """
    for call, methods in _late_caches(source):
        start, end = source.span(methods[0])[1], source.span(call)[1]
        if "#" in source.text[start : source.span(call.func)[1]]:  # A comment stays on its line.
            start = source.text.rindex(".", start, source.span(call.func)[1])
        before = source.span(_owner(methods[-1]))[1]
        yield Edit(before, before, source.text[start:end])
        yield Edit(start, end, "")
        yield from (_with_one_order(source, method) for method in methods if method_of(method) == "shuffle")


def _with_one_order(source: SourceText, shuffle: ast.Call) -> Edit:
    """Return the edit that sets ``reshuffle_each_iteration=False``, the third argument."""
    named = {keyword.arg: keyword.value for keyword in shuffle.keywords}
    given = shuffle.args[2] if len(shuffle.args) > 2 else named.get("reshuffle_each_iteration")
    return source.replaced(given, "False") if given else _appended(source, shuffle, "reshuffle_each_iteration=False")


def _late_caches(source: SourceText) -> Iterator[tuple[ast.Call, list[ast.Call]]]:
    """Iterate over the calls of ``cache()`` with the calls of shuffle, batch and prefetch before them, from the last.

    A cache in a file stays: the file may be there, with the rows of that place. So does one after calls with ``*`` or ``**``.
    """
    for call in source.nodes(ast.Call):
        methods, is_in_memory = [], not (call.args or call.keywords)
        before = _owner(call) if method_of(call) == "cache" and is_in_memory else None
        while isinstance(before, ast.Call) and method_of(before) in _BEFORE_CACHE:
            methods.append(before)
            before = _owner(before)
        if methods and not any(map(_is_unpacked, methods)):
            yield call, methods


def _is_unpacked(call: ast.Call) -> bool:
    """Return whether a call has arguments after ``*`` or ``**``."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


def method_of(call: ast.Call) -> str:
    """Return the name of the called method; empty if a name is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _owner(call: ast.Call) -> ast.expr:
    """Return the object whose method is called."""
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


def logits(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Set ``from_logits=False`` if the only model of the program ends with the loss's own activation, and is compiled with the loss.

    TensorFlow takes what is before a softmax or a sigmoid for logits, JAX what is behind it.
    """
    claims = list(_claims_of_logits(source, bindings))
    if len(claims) == 1 and list(_last_activations(source, bindings)) == [claims[0][1]]:
        claim = claims[0][0]
        if any(claim in values_of(loss) for loss in _losses_of_sequential(source, bindings)):
            yield source.replaced(claim, "False")


def _losses_of_sequential(source: SourceText, bindings: ImportBindings) -> Iterator[ast.Call]:
    """Iterate over the objects of Keras's losses that a call ``compile`` of a sequential model makes."""
    for call in source.nodes(ast.Call):
        if method_of(call) == "compile" and _is_sequential(source, bindings, _owner(call)):
            made = [value for value in values_of(call) if isinstance(value, ast.Call)]
            names = [full_name(bindings, value).removeprefix("keras.losses.") for value in made]
            yield from (value for value, name in zip(made, names, strict=True) if name[:1].isupper())


def _is_sequential(source: SourceText, bindings: ImportBindings, model: ast.expr) -> bool:
    """Return whether the program assigns to a name only sequential models, or what its functions that make one return."""
    functions = {one.name: one for one in source.nodes(ast.FunctionDef)}
    name = ast.unparse(model)
    assignments = (node for node in source.nodes(ast.Assign) if name in map(ast.unparse, node.targets))
    values = [node.value for node in assignments]

    def makes_one(value: ast.expr) -> bool:
        function = functions.get(ast.unparse(value.func)) if isinstance(value, ast.Call) else None
        made = ast.walk(function) if function else [value]
        return any(isinstance(one, ast.Call) and full_name(bindings, one) in _SEQUENTIAL for one in made)

    return bool(values) and all(map(makes_one, values))


def values_of(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def activated_logits(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Find ``from_logits=True`` in a program with an activation that a model may end with, with what to write."""
    ends = set(_last_activations(source, bindings))
    for claim, own in _claims_of_logits(source, bindings):
        for activation in ("sigmoid", "softmax"):
            is_of_loss = activation == own or activation == "softmax"
            is_gate = not is_of_loss and activation not in ends  # A sigmoid is often within a model.
            if not is_gate and _has_activation(source, bindings, activation):
                write = "write from_logits=False" if activation == own else f"leave the {activation} out"
                yield claim, _LOGITS.format(activation, write)


_MODELS = ("keras.Model", "keras.models.Model")
_SEQUENTIAL = ("keras.Sequential", "keras.models.Sequential")


def _claims_of_logits(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.expr, str]]:
    """Iterate over the values of ``from_logits=True``, with the activation whose result the loss takes without it."""
    for call in source.nodes(ast.Call):
        names = [bindings.name_of(one).lower() for one in (call.func, *call.args)]  # partial(loss, from_logits=True)
        value = arguments_of(call, full_name(bindings, call)).get("from_logits")
        if value is not None and is_constant(value, True):
            yield value, "sigmoid" if any("binary" in name for name in names) else "softmax"


def _has_activation(source: SourceText, bindings: ImportBindings, activation: str) -> bool:
    """Return whether a program names an activation by a string, in a model of its own class, or by a layer that is called or ends a list.

    Elsewhere, such a function or layer makes probabilities of what a model returns, or attention.
    """
    named = {id(one.node) for one in bindings.chains if one.name.rpartition(".")[2].lower() == activation}
    inside = {id(node) for model in _own_models(source, bindings) for node in ast.walk(model)}
    lists = [node.elts for node in source.nodes(ast.List)]
    made = [node.func for node in source.nodes(ast.Call)]  # As in Softmax()(x).
    made += [one[-1] for one in lists if one and all(isinstance(each, ast.Call) for each in one)]
    layers = [one.func for one in made if isinstance(one, ast.Call)]
    words = [node.value for node in source.nodes(ast.Constant)]
    return activation in words or bool(named & inside) or any(id(layer) in named for layer in layers)


def _own_models(source: SourceText, bindings: ImportBindings) -> list[ast.ClassDef]:
    """Return the classes of a program that are models, also by way of other ones, in their order."""
    found: dict[str, ast.ClassDef] = {}
    for node in source.nodes(ast.ClassDef):
        is_own = any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        if is_own or any(translated(bindings.name_of(base)) in _MODELS for base in node.bases):
            found[node.name] = node
    return list(found.values())


def _last_activations(source: SourceText, bindings: ImportBindings) -> Iterator[str]:
    """Return the last activation of each sequential model, as far as the source shows it; other models give an empty string."""
    for call in source.nodes(ast.Call):
        if full_name(bindings, call) not in _SEQUENTIAL:
            continue
        if call.args and isinstance(call.args[0], ast.List) and call.args[0].elts:
            yield _activation(call.args[0].elts[-1])
        else:
            added = [one for one in source.nodes(ast.Call) if method_of(one) == "add"]
            last = max(added, key=lambda one: one.lineno, default=None)
            yield _activation(last.args[0]) if last and last.args else ""
    bases = [base for node in source.nodes(ast.ClassDef) for base in node.bases]
    made = [bindings.name_of(one) for one in (*bases, *(call.func for call in source.nodes(ast.Call)))]
    if any(translated(name) in _MODELS for name in made):
        yield ""


def _activation(layer: ast.expr) -> str:
    if not isinstance(layer, ast.Call):
        return ""
    given = {keyword.arg: keyword.value for keyword in layer.keywords}.get("activation")
    value = given or (layer.args[1] if len(layer.args) > 1 else None)
    return str(value.value) if isinstance(value, ast.Constant) else ""


_SET = (
    "tensorflow.config.set_logical_device_configuration",
    "tensorflow.config.experimental.set_virtual_device_configuration",
)
_LIST = ("tensorflow.config.list_physical_devices", "tensorflow.config.experimental.list_physical_devices")
_GROWTH = "tensorflow.config.experimental.set_memory_growth"


def logical_devices(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Rewrite the statement that creates logical devices, if there is exactly one."""
    found = [(statement, call) for statement, call in _call_statements(source) if bindings.name_of(call.func) in _SET]
    if len(found) != 1:
        return
    statement, call = found[0]
    platform, number = _platform(source, bindings, call), _count(call)
    if platform == "CPU" and number and bindings.is_import_at(call, "lockstep"):
        yield source.replaced(statement, f"lockstep.config.set_logical_cpu_devices({number})")
    strategies = [one for one in source.nodes(ast.Call) if full_name(bindings, one) == "lockstep.MirroredStrategy"]
    is_alone = len(strategies) == 1 and not (strategies[0].args or strategies[0].keywords)
    if platform == "GPU" and number > 1 and is_alone and _is_first(source, call):
        yield source.replaced(statement, "pass  # The strategy has all replicas on gpu:0, and uses no other GPU.")
        yield _appended(source, strategies[0], f'["gpu:0"], replicas={number}')


def memory_settings(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Replace the statements that set how much memory of a GPU is taken by a comment; the strategy keeps all GPUs."""
    for statement, call in _call_statements(source):
        if bindings.name_of(call.func) in _SET and _is_limit(call):
            text = "pass  # On JAX: export XLA_PYTHON_CLIENT_MEM_FRACTION=0.25, the part of a GPU's memory to take"
            yield source.replaced(statement, text)
        if bindings.name_of(call.func) == _GROWTH:
            yield source.replaced(statement, "pass  # On JAX: export XLA_PYTHON_CLIENT_PREALLOCATE=false")


def _is_limit(call: ast.Call) -> bool:
    """Return whether a call makes one logical device with a limit of its memory."""
    given = call.args[1] if len(call.args) > 1 else None
    only = given.elts[0] if isinstance(given, ast.List) and len(given.elts) == 1 else None
    return isinstance(only, ast.Call) and bool(only.args or only.keywords)


def _call_statements(source: SourceText) -> Iterator[tuple[ast.Expr, ast.Call]]:
    """Iterate over the statements that only call a function, with the call."""
    for statement in source.nodes(ast.Expr):
        if isinstance(statement.value, ast.Call):
            yield statement, statement.value


def _count(call: ast.Call) -> int:
    """Return the number of devices in a list of configurations; 0 if the source does not show it."""
    given = call.args[1] if len(call.args) > 1 else None
    if isinstance(given, ast.List):
        return len(given.elts)
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Mult) and isinstance(given.left, ast.List):
        times = given.right.value if isinstance(given.right, ast.Constant) else 0
        return len(given.left.elts) * times if isinstance(times, int) else 0
    return 0


def _is_first(source: SourceText, call: ast.Call) -> bool:
    """Return whether the argument of the call is the first device of a list."""
    device = assigned(source, call.args[0]) or call.args[0]
    return isinstance(device, ast.Subscript) and is_constant(device.slice, 0)


def _platform(source: SourceText, bindings: ImportBindings, call: ast.Call) -> str:
    """Return ``"CPU"`` or ``"GPU"`` if the argument of the call is a list of such devices; else an empty string."""
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)} if call.args else set()
    for node in source.nodes(ast.Assign):
        if any(isinstance(to, ast.Name) and to.id in names for to in node.targets):
            for listed in (one for one in ast.walk(node.value) if isinstance(one, ast.Call)):
                kind = values_of(listed)
                if bindings.name_of(listed.func) in _LIST and len(kind) == 1 and isinstance(kind[0], ast.Constant):
                    return str(kind[0].value)
    return ""


_SAME_ORDER = "all workers must read the same rows in the same order"
_SEED = f"shuffle: {_SAME_ORDER}; if this is a data set, write seed=1"
_TASK = "TF_CONFIG: lockstep run sets it for each worker; write os.environ.setdefault('TF_CONFIG', …)"
_TASKS = (
    "TF_CONFIG: lockstep run sets it for each worker; if this line starts workers, leave it out, "
    "and start them with: lockstep run -n 2 train.py"
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SEEDED = ("list_files", "shuffle_and_repeat")  # functions of tf.data that shuffle
_OF_SHUFFLE = {"buffer_size", "name", "reshuffle_each_iteration"}  # Its arguments besides the seed.
_DRAWS, _DRAWS_OF_IMAGES = "tensorflow.random.", "tensorflow.image.random_"
_SEEDED_DRAWS = ("Generator", "set_seed", "get_global_generator", "experimental")


def is_for_workers(bindings: ImportBindings, strategy: str = "MultiWorkerMirroredStrategy") -> bool:
    """Return whether a program creates this strategy for several workers."""
    return any(translated(chain.name).endswith(f".{strategy}") for chain in bindings.chains)


def task_as_default(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Turn an assignment of ``TF_CONFIG`` with a literal task into a default, as ``lockstep run`` sets it for each worker."""
    found = list(_assignments_of_tasks(source))
    for node, entry in found:
        if len(found) == 1 and _is_for_one_task(source, node):
            text = f'{source.segment(entry.value)}.setdefault("TF_CONFIG", {source.segment(node.value)})'
            yield source.replaced(node, f"{text}  # lockstep run sets it for each worker.")


def _assignments_of_tasks(source: SourceText) -> Iterator[tuple[ast.Assign, ast.Subscript]]:
    """Iterate over the assignments of ``TF_CONFIG``, with their targets, in a program with a literal task."""
    if any(map(_is_task, source.nodes(ast.Dict))):
        for node in source.nodes(ast.Assign):
            target = node.targets[0] if len(node.targets) == 1 else None
            if isinstance(target, ast.Subscript) and _is_entry(target):
                yield node, target


def _is_for_one_task(source: SourceText, node: ast.Assign) -> bool:
    """Return whether an assignment always has the literal task: in no loop, nor in a function that may get another one."""
    around = [
        one for one in source.nodes(ast.stmt) if isinstance(one, (*_LOOPS, *_FUNCTIONS)) and node in ast.walk(one)
    ]
    return not any(isinstance(one, _LOOPS) or _may_get_task(source, one) for one in around)


def _may_get_task(source: SourceText, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function may set other tasks than the literal one: it has arguments, or several calls, and no literal task."""
    called = [one for one in source.nodes(ast.Call) if isinstance(one.func, ast.Name) and one.func.id == function.name]
    has_arguments = bool(ast.unparse(function.args))
    return (has_arguments or len(called) != 1) and not any(map(_is_task, ast.walk(function)))


def _is_task(node: ast.AST) -> bool:
    """Return whether a node is a dict ``{"type": …, "index": 0}`` with a literal index."""
    if not isinstance(node, ast.Dict):
        return False
    given = {
        key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
    }
    return "type" in given and isinstance(given.get("index"), ast.Constant)


def _is_entry(target: ast.Subscript) -> bool:
    return is_constant(target.slice, "TF_CONFIG") and ast.unparse(target.value).endswith("environ")


def seed_shuffles(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Add a seed to ``shuffle(1024)`` of a data set, so that all workers get the same order."""
    if source.for_workers or is_for_workers(bindings):
        for call in _without_seed(source):
            if _is_of_data(source, bindings, call):
                yield _appended(source, call, "seed=1")


def worker_differences(source: SourceText, bindings: ImportBindings) -> Iterator[tuple[ast.AST, str]]:
    """Find calls that may give different data on each worker, with what to write."""
    if not (source.for_workers or is_for_workers(bindings)):
        return
    for call in _without_seed(source):
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id not in ("np", "numpy", "random", "rng"):
            yield call, _SEED
    for node, _ in _assignments_of_tasks(source):
        yield node, _TASKS
    is_seeded = any(
        bindings.name_of(call.func).endswith((".set_seed", ".set_random_seed")) for call in source.nodes(ast.Call)
    )
    has_task = any(map(_is_task, source.nodes(ast.Dict)))
    for call in source.nodes(ast.Call):
        name = method_of(call)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        is_unshuffled = any(is_constant(one, False) for one in (*call.args, given.get("shuffle")))
        if name in _SEEDED and "seed" not in given and not is_unshuffled:
            yield call, f"{name}: {_SAME_ORDER}; write seed=1"
        elif "shuffle_files" in given and not is_constant(given["shuffle_files"], False):
            yield call, f"shuffle_files=True: {_SAME_ORDER}; leave it out"
        elif is_constant(given.get("deterministic"), False):
            yield call, f"deterministic=False: {_SAME_ORDER}; leave it out"
        elif has_task and name in ("update", "putenv") and "TF_CONFIG" in ast.unparse(call):
            yield call, _TASK
        elif _draws(bindings.name_of(call.func)) and "seed" not in given and not is_seeded:
            module = bindings.name_of(call.func).split(".")[1]
            yield call, f"tf.{module}: {_SAME_ORDER}; write tf.random.set_seed(1) at the top of the script"


def _draws(name: str) -> bool:
    own = name.removeprefix(_DRAWS)
    is_random = own != name and not own.startswith(("stateless", *_SEEDED_DRAWS))
    return is_random or name.startswith(_DRAWS_OF_IMAGES)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Return whether a node is this word, number or text."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def _without_seed(source: SourceText) -> Iterator[ast.Call]:
    """Iterate over calls ``.shuffle(rows)`` of data sets without a seed, which would be the second argument."""
    for call in source.nodes(ast.Call):
        names = {keyword.arg for keyword in call.keywords}
        is_shuffle = method_of(call) == "shuffle" and names <= _OF_SHUFFLE
        if is_shuffle and len(call.args) < 2 and (call.args or "buffer_size" in names):
            yield call


def _is_of_data(source: SourceText, bindings: ImportBindings, call: ast.Call) -> bool:
    """Return whether a call is in a chain of ``tf.data``, or its argument is a number of rows."""
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
