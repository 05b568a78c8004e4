"""What a child process measures: a script up to its first fit, or a model and data given to ``scaling_report``."""

import importlib
import inspect
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep._keras import adapters
from lockstep._keras.fit_interception import intercept_fit
from lockstep.data.sources import AdapterSource, InputSource, make_source
from lockstep.tools.run_until_fit import FirstFit, run_until_fit
from lockstep.tools.scaling.results import Budget

__all__ = [
    "FunctionWorkload",
    "TrainingTask",
    "Workload",
    "is_in_child",
    "program_of",
    "run_program",
    "train_given",
    "work_of",
]

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
        with intercept_fit(lambda model, fit, args, kwargs: look(FirstFit(model, fit, args, kwargs, ""))):
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


HELD_OUT = 0.1  # of the rows, where the script has no validation data
_NOT_OURS = ("x", "y", "sample_weight", "batch_size", "epochs", "initial_epoch", "verbose", "callbacks", "self")
_OF_VALIDATION = ("validation_data", "validation_split", "validation_batch_size", "validation_steps", "validation_freq")


@dataclass(frozen=True)
class TrainingTask:
    """One training.

    Args:
        data: x, y and sample weights, as ``fit`` takes them.
        first: the first batch, as the loop would have it.
        validation: the same for ``evaluate``; None where there are none.
        validation_steps: of ``evaluate``.
        options: further arguments of ``fit``.
        batch: rows of a batch.
        steps_per_epoch: None where nobody knows.
        epochs: passes over the data.
        has_own_batches: whether ``batch`` is the input's, and cannot be chosen.
        notes: what was done differently from what the script says.
    """

    data: tuple[Any, Any, Any]
    first: Any
    validation: tuple[Any, Any, Any] | None
    validation_steps: int | None
    options: dict[str, Any]
    batch: int
    steps_per_epoch: int | None
    epochs: int
    has_own_batches: bool
    notes: tuple[str, ...]


def work_of(found: FirstFit, batch: int, budget: Budget) -> TrainingTask:
    """What is trained with batches of ``batch`` rows.

    Args:
        found: the call of the script.
        batch: rows of the global batch; an input that is no arrays keeps its own.
        budget: how much.

    Raises:
        OptionError: there are fewer rows than a batch has.
    """
    given = inspect.signature(keras.Model.fit).bind(found.model, *found.args, **found.kwargs).arguments
    data = (given.get("x"), given.get("y"), given.get("sample_weight"))
    options = {name: value for name, value in given.items() if name not in (*_NOT_OURS, *_OF_VALIDATION)}
    callbacks, notes = _chosen_callbacks(given.get("callbacks"))
    options["callbacks"] = callbacks
    source = _source(data, given, batch)
    if not (isinstance(source, AdapterSource) and source.is_arrays):
        return _of_batches(source, data, given, options, budget, notes)
    return _of_arrays(data, given, options, batch, budget, notes)


def _source(data: Any, given: Any, batch: int | None) -> InputSource:
    steps, weights = given.get("steps_per_epoch"), given.get("class_weight")
    return make_source(
        *data, batch_size=batch, steps_per_epoch=steps, class_weight=weights, pending=lambda generator: deque()
    )


def _of_arrays(data: Any, given: Any, options: Any, batch: int, budget: Budget, notes: list[str]) -> TrainingTask:
    data = jax.tree.map(np.asarray, data)
    validation, note, data = _validation_of(given, data)
    rows = _count(data)
    used = min(rows, budget.rows or rows)
    steps = used // batch
    if not steps:
        raise OptionError(f"A batch of {batch} rows is more than the {used} rows to train on. Choose a smaller batch.")
    if steps * batch < rows:
        notes = [*notes, f"{steps * batch:,} of {rows:,} rows are used: whole batches only"]
    options.pop("steps_per_epoch", None)
    cut = _rows(data, slice(steps * batch))
    first = next(_source(cut, {**given, "steps_per_epoch": None}, batch).batches())
    return TrainingTask(
        data=cut,
        first=first,
        validation=validation,
        validation_steps=given.get("validation_steps") if given.get("validation_data") is not None else None,
        options=options | {"batch_size": batch},
        batch=batch,
        steps_per_epoch=steps,
        epochs=budget.epochs,
        has_own_batches=False,
        notes=(*notes, *note),
    )


def _of_batches(
    source: InputSource, data: Any, given: Any, options: Any, budget: Budget, notes: list[str]
) -> TrainingTask:
    first = next(source.batches())  # Of a generator it is one batch less; it trains on the others.
    notes = [*notes, "the input comes in batches of its own; only these are measured"]
    validation = _three(given["validation_data"]) if given.get("validation_data") is not None else None
    if validation is None:
        notes.append("there is no validation data, so nothing is said of accuracy")
    steps = given.get("steps_per_epoch") or source.num_batches
    most = budget.rows and max(1, budget.rows // _count(first))
    if most and (steps is None or most < steps):
        steps = options["steps_per_epoch"] = most
    return TrainingTask(
        data=data,
        first=first,
        validation=validation,
        validation_steps=given.get("validation_steps"),
        options=options,
        batch=_count(first),
        steps_per_epoch=steps,
        epochs=budget.epochs,
        has_own_batches=True,
        notes=tuple(notes),
    )


def _validation_of(given: Any, data: Any) -> tuple[Any, list[str], Any]:
    """Validation data, a note about them, and what is left to train on."""
    if given.get("validation_data") is not None:
        return _three(given["validation_data"]), [], data
    rows = _count(data)
    fraction = given.get("validation_split") or 0.0
    kept = int(rows * (1 - (fraction or HELD_OUT)))
    held_out = _rows(data, slice(kept, None))
    note = [] if fraction else [f"the last {HELD_OUT:.0%} of the rows are held out to evaluate on"]
    return held_out, note, _rows(data, slice(kept))


def _three(data: Any) -> tuple[Any, Any, Any]:
    found: tuple[Any, Any, Any] = adapters.unpack_x_y_sample_weight(data)
    return found


def _rows(data: Any, chosen: slice) -> Any:
    return jax.tree.map(lambda array: array[chosen], data)


def _count(data: Any) -> int:
    return len(jax.tree.leaves(data)[0])


def _chosen_callbacks(callbacks: Any) -> tuple[list[Any], list[str]]:
    """Those that set the learning rate step by step or epoch by epoch, and a note about the others."""
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    kept = [one for one in given if isinstance(one, keras.callbacks.LearningRateScheduler)]
    left_out = sorted({type(one).__name__ for one in given if one not in kept})
    return kept, [f"callbacks left out while measuring: {', '.join(left_out)}"] if left_out else []
