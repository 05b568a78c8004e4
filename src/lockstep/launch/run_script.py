"""The user's program as ``__main__``: what it sees is what it sees under plain ``python program.py`` or ``python -m``."""

import builtins
import importlib.abc
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

__all__ = ["run_module", "run_script"]


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a file as ``python script arguments…`` does."""
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = _new_main(path, SourceFileLoader("__main__", path))
    _run(main, code, [script, *arguments], [sys.executable, script, *arguments])


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m name arguments…`` does, or a package's ``__main__``."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else _code_of(spec)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    main = _new_main(spec.origin, spec.loader)
    main.__spec__, main.__package__, main.__cached__ = spec, spec.parent, spec.cached  # type: ignore[attr-defined]
    _run(main, code, [spec.origin or name, *arguments], [sys.executable, "-m", name, *arguments])


def _code_of(spec: ModuleSpec) -> CodeType | None:
    loader = spec.loader
    return loader.get_code(spec.name) if isinstance(loader, importlib.abc.InspectLoader) else None


def _new_main(path: str | None, loader: object) -> ModuleType:
    main = ModuleType("__main__")
    names = {
        "__annotations__": {},
        "__builtins__": builtins,
        "__cached__": None,
        "__file__": path,
        "__loader__": loader,
    }
    before = vars(sys.modules["__main__"])  # Which of them there are depends on the version of Python.
    vars(main).update({name: value for name, value in names.items() if name in before})
    return main


def _run(main: ModuleType, code: CodeType, arguments: list[str], command: list[str]) -> None:
    sys.argv, sys.orig_argv = arguments, command
    sys.modules["__main__"] = main
    exec(code, vars(main))
