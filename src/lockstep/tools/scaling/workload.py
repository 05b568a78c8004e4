"""What is measured: a script up to its first fit, or what somebody gave to ``lockstep.scaling_report``, in a child process.

A child cannot be handed functions. So it imports them by their names, where they are in a module; where they are in the main
script, it runs that again as Python would, until the call of ``scaling_report``, and is at the same place with the same functions.
"""

import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep._keras.fit_interception import fits_taken
from lockstep.tools.run_until_fit import FirstFit, run_until_fit

__all__ = ["FunctionWorkload", "Workload", "is_in_child", "program_of", "run_program", "train_given"]

_measuring: ContextVar[str | None] = ContextVar("measuring", default=None)


@dataclass(frozen=True)
class Workload:
    """What a child does to have something to measure.

    Args:
        kind: "script": runs ``path``; "names": imports ``build``, ``data`` and ``validation``.
        path: of a script.
        arguments: of the script.
        build: as ``module:name``.
        data: likewise, or the path of a file of arrays.
        validation: likewise, or None.
        folders: where modules are looked for.
    """

    kind: str
    path: str = ""
    arguments: tuple[str, ...] = ()
    build: str = ""
    data: str = ""
    validation: str | None = None
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class FunctionWorkload:
    """What somebody gave to ``scaling_report``: see there."""

    build: Callable[[], Any]
    data: Any
    validation: Any


def is_in_child() -> bool:
    """Whether this process measures a script, so that ``scaling_report`` is only to train.

    Raises:
        OptionError: it measures functions of a module, and that module asks for a report when it is imported.
    """
    if _measuring.get() == "names":
        raise OptionError(
            'scaling_report: it is called while a module is imported. Put the call under if __name__ == "__main__".'
        )
    return _measuring.get() is not None


def program_of(given: FunctionWorkload, folder: Path) -> Workload | None:
    """How a child comes to the functions and arrays that were given; None where it cannot, as in a notebook.

    Args:
        given: what it needs.
        folder: for files of arrays.
    """
    functions = [one for one in (given.build, given.data, given.validation) if callable(one)]
    if all(_name_of(function) for function in functions):
        parts = [_named_or_kept(one, folder / name) for one, name in ((given.data, "data"), (given.validation, "val"))]
        build = _name_of(given.build) or ""
        return Workload("names", build=build, data=parts[0] or "", validation=parts[1], folders=tuple(sys.path))
    main = sys.modules["__main__"]
    path = vars(main).get("__file__")
    if path and vars(main).get("__spec__") is None and Path(path).is_file():
        return Workload("script", path=path, arguments=tuple(sys.argv[1:]))
    return None


def run_program(program: Workload, look: Callable[[FirstFit], None]) -> None:
    """Run a program up to its first fit, in a child, and hand that to ``look``.

    Raises:
        OptionError: there is no fit.
    """
    token = _measuring.set(program.kind)
    try:
        if program.kind == "script":
            run_until_fit(program.path, program.arguments, look)
            return
        sys.path[:] = list(program.folders)
        build, data = _imported(program.build), _loaded(program.data)
        given = FunctionWorkload(build, data, program.validation and _loaded(program.validation))
        with fits_taken(lambda model, fit, args, kwargs: look(FirstFit(model, fit, args, kwargs, ""))):
            train_given(given)
    finally:
        _measuring.reset(token)


def train_given(given: FunctionWorkload) -> None:
    """Build the model and call its fit, for whoever takes that call.

    Raises:
        OptionError: what was given is something else.
    """
    model = given.build()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise OptionError(f"build: expected a function that gives a compiled model, got {model!r}.")
    arrays = given.data() if callable(given.data) else given.data
    validation = given.validation() if callable(given.validation) else given.validation
    if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 3):
        raise OptionError(
            f"data: expected (x, y) or (x, y, sample_weight), or a function that gives it, got {arrays!r:.100}."
        )
    x, y, *weights = arrays
    model.fit(x, y, sample_weight=weights[0] if weights else None, validation_data=validation)


def _name_of(function: Callable[..., Any]) -> str | None:
    """``module:name`` of a function that another process can import."""
    try:
        module, name = function.__module__, function.__qualname__
        found = vars(sys.modules[module]).get(name)
    except (AttributeError, KeyError):
        return None
    return f"{module}:{name}" if module != "__main__" and found is function else None


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]


def _named_or_kept(one: Any, path: Path) -> str | None:
    if one is None:
        return None
    if callable(one):
        return _name_of(one)
    if not isinstance(one, tuple | list) or not all(isinstance(part, np.ndarray) for part in one):
        raise OptionError("data: expected NumPy arrays (x, y), or a function that gives what is to be trained on.")
    kept = path.with_suffix(".npz")
    np.savez(kept, *one)
    return str(kept)


def _loaded(name: str) -> Any:
    if not name.endswith(".npz"):
        return _imported(name)
    with np.load(name) as arrays:
        return tuple(arrays[key] for key in arrays.files)
