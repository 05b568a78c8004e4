"""Several logical devices made of one: on CPUs Lockstep makes them, on a GPU replicas are logical."""

import ast
from collections.abc import Iterator

from lockstep.tools.migrate.edits import Edit, SourceText
from lockstep.tools.migrate.name_resolution import ImportBindings
from lockstep.tools.migrate.rewrite_rules import calls, full_name

__all__ = ["logical_devices", "memory_growth"]

_SET = (
    "tensorflow.config.set_logical_device_configuration",
    "tensorflow.config.experimental.set_virtual_device_configuration",
)
_LIST = ("tensorflow.config.list_physical_devices", "tensorflow.config.experimental.list_physical_devices")
_GROWTH = "tensorflow.config.experimental.set_memory_growth"


def logical_devices(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """Have the one statement that makes logical devices say it in Lockstep's way."""
    found = [node for node in source.statements() if _called(node, bindings) in _SET]
    if len(found) != 1:
        return
    call = found[0].value  # type: ignore[attr-defined]  # _called has looked.
    platform, number = _platform(source, bindings, call), _count(call)
    if platform == "CPU" and number:
        yield source.replaced(found[0], f"lockstep.config.set_logical_cpu_devices({number})")
    strategies = [one for one in calls(source) if full_name(bindings, one) == "lockstep.MirroredStrategy"]
    if platform == "GPU" and number and len(strategies) == 1 and not (strategies[0].args or strategies[0].keywords):
        end = source.span(strategies[0])[1]
        yield source.replaced(found[0], "pass  # Replicas are logical: the strategy has them.")
        yield Edit(end - 1, end - 1, f'["gpu:0"], replicas={number}')


def memory_growth(source: SourceText, bindings: ImportBindings) -> Iterator[Edit]:
    """JAX has an environment variable for that."""
    for node in source.statements():
        if _called(node, bindings) == _GROWTH:
            yield source.replaced(node, "pass  # On JAX: export XLA_PYTHON_CLIENT_PREALLOCATE=false")


def _called(node: ast.stmt, bindings: ImportBindings) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return bindings.name_of(node.value.func)
    return ""


def _count(call: ast.Call) -> int:
    """How many devices a list of configurations makes; 0 where it is not written out."""
    given = call.args[1] if len(call.args) > 1 else None
    if isinstance(given, ast.List):
        return len(given.elts)
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Mult) and isinstance(given.left, ast.List):
        times = given.right.value if isinstance(given.right, ast.Constant) else 0
        return len(given.left.elts) * times if isinstance(times, int) else 0
    return 0


def _platform(source: SourceText, bindings: ImportBindings, call: ast.Call) -> str:
    """``"CPU"`` or ``"GPU"``, where the program lists the devices of one of them under the name that is used here."""
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)} if call.args else set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id in names for to in node.targets):
            for listed in (one for one in ast.walk(node.value) if isinstance(one, ast.Call)):
                kind = [*listed.args, *(keyword.value for keyword in listed.keywords)]
                if bindings.name_of(listed.func) in _LIST and len(kind) == 1 and isinstance(kind[0], ast.Constant):
                    return str(kind[0].value)
    return ""
