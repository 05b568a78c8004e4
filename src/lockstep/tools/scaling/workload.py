"""What a child process measures: a script up to its first fit, or a model and data given to ``scaling_report``."""

import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError, shown
from lockstep._keras import trainer
from lockstep._keras.patches import value_in_context
from lockstep._keras.trainer import intercept_fit
from lockstep.data import sources
from lockstep.data.fit_wrapper import callbacks_in
from lockstep.data.sources import InputSource, make_source
from lockstep.tools.scaling.results import Budget
from lockstep.tools.script_runner import Finish, FirstFit, run_until_fit

# A child process cannot receive functions. It imports them by name if they are in a module. If they are in the main script, it
# runs that script again up to the call of ``scaling_report``, where the same functions exist.
_measuring: ContextVar[str | None] = ContextVar("measuring", default=None)


@dataclass(frozen=True)
class Workload:
    """Where a child process finds the training to measure.

    Args:
        kind: "script": run ``path``; "names": import ``build``, ``data`` and ``validation``.
        path: path of a script.
        arguments: arguments of the script.
        build: as ``module:name``.
        data: as ``module:name``, or the path of a file of arrays.
        validation: as ``data``, or None.
        folders: the search path for modules.
    """

    kind: str
    path: str = ""
    arguments: tuple[str, ...] = ()
    build: str = ""
    data: str = ""
    validation: str | None = None
    folders: tuple[str, ...] = ()


def is_measuring() -> bool:
    """Return whether this process is a child that measures a script, in which ``scaling_report`` only trains.

    Raises:
        OptionError: the child imports functions of a module, and that module calls ``scaling_report`` on import.
    """
    if _measuring.get() == "names":
        raise OptionError(
            'scaling_report: called while a module is imported. Fix: put the call under if __name__ == "__main__".'
        )
    return _measuring.get() is not None


def workload_of(build: Callable[[], Any], data: Any, validation: Any, folder: Path) -> Workload | None:
    """Describe how a child process gets the functions and arrays, by files in ``folder``; None if it cannot, as in a notebook."""
    functions = [one for one in (build, data, validation) if callable(one)]
    if all(_import_name(function) for function in functions):
        name, source = _import_name(build) or "", _import_name_or_file("data", data, folder) or ""
        held_out = _import_name_or_file("validation", validation, folder)
        return Workload("names", build=name, data=source, validation=held_out, folders=tuple(sys.path))
    main = sys.modules["__main__"]
    path = vars(main).get("__file__")
    if path and vars(main).get("__spec__") is None and Path(path).is_file():
        return Workload("script", path=path, arguments=tuple(sys.argv[1:]))
    return None


def run_workload(workload: Workload, on_fit: Callable[[FirstFit], None], finish: Finish | None = None) -> None:
    """Run a workload in a child process up to its first fit, and call ``on_fit`` with that; ``finish`` is that of ``run_until_fit``.

    Raises:
        OptionError: no fit was called.
    """
    with value_in_context(_measuring, workload.kind):
        if workload.kind == "script":
            run_until_fit(workload.path, workload.arguments, on_fit, finish)
            return
        sys.path[:] = list(workload.folders)
        build, data = _import(workload.build), _load(workload.data)
        validation = workload.validation and _load(workload.validation)
        with intercept_fit(lambda model, fit, args, kwargs: on_fit(FirstFit(model, fit, args, kwargs, ""))):
            build_and_fit(build, data, validation)


def build_and_fit(build: Callable[[], Any], data: Any, validation: Any) -> None:
    """Build the model and call its fit, which the caller intercepts.

    Raises:
        OptionError: ``build`` or ``data`` returns an unexpected value.
    """
    model = build()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise OptionError(
            f"build: expected a function that returns a compiled model, got {model!r}. Fix: call compile() in it, and return the model."
        )
    arrays = data() if callable(data) else data
    held_out = validation() if callable(validation) else validation
    check_data("data", arrays)
    x, y, *weights = arrays
    model.fit(x, y, sample_weight=weights[0] if weights else None, validation_data=held_out)


def check_data(name: str, data: Any) -> None:
    """Refuse data that are neither a function nor two or three trees of arrays.

    Raises:
        InputError: a part has no rows, or no numbers.
        OptionError: they are something else.
    """
    if callable(data):
        return
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise OptionError(
            f"{name}: expected (x, y) or (x, y, sample_weight), or a function that returns it, got {shown(data)}. Fix: put two or three parts into a tuple."
        )
    for part in (data[0], *(part for part in data[1:] if part is not None)):
        sources.check_data(name, part)


def _import_name(function: Callable[..., Any]) -> str | None:
    """Return ``module:name`` of a function that another process can import, else None."""
    try:
        module, name = function.__module__, function.__qualname__
        found = vars(sys.modules[module]).get(name)
    except (AttributeError, KeyError):
        return None
    return f"{module}:{name}" if module != "__main__" and found is function else None


def _import(name: str) -> Any:
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]


def _import_name_or_file(name: str, one: Any, folder: Path) -> str | None:
    if one is None:
        return None
    if callable(one):
        return _import_name(one)
    if not isinstance(one, tuple | list) or not all(isinstance(part, np.ndarray) for part in one):
        raise OptionError(
            f"{name}: expected NumPy arrays (x, y), or a function that returns them, got {shown(one)}. Fix: convert them with numpy.asarray."
        )
    kept = folder / f"{name}.npz"
    np.savez(kept, *one)
    return str(kept)


def _load(name: str) -> Any:
    if not name.endswith(".npz"):
        return _import(name)
    with np.load(name) as arrays:
        return tuple(arrays[key] for key in arrays.files)


HELD_OUT = 0.1  # of the rows, if the script has no validation data
# Of fit; a setting determines the others.
_KEPT_ARGUMENTS = ("shuffle", "class_weight", "steps_per_epoch")


@dataclass(frozen=True)
class TrainingTask:
    """The training of one setting.

    Args:
        data: x, y and sample weights, as ``fit`` takes them.
        first: the first batch, as Keras's loop would get it.
        validation: data for ``evaluate``, in the same form; None without validation data.
        validation_steps: number of steps of ``evaluate``.
        options: further arguments of ``fit``.
        batch: rows of a batch.
        steps_per_epoch: None if unknown.
        has_own_batches: whether the input has batches already, so that ``batch`` cannot be chosen.
        notes: differences from the call in the script.
    """

    data: tuple[Any, Any, Any]
    first: Any
    validation: tuple[Any, Any, Any] | None
    validation_steps: int | None
    options: dict[str, Any]
    batch: int
    steps_per_epoch: int | None
    has_own_batches: bool
    notes: tuple[str, ...]


def training_task(first: FirstFit, batch: int, budget: Budget) -> TrainingTask:
    """Prepare a script's call of ``fit``: cut data, find validation data, select callbacks.

    The global batch size is for arrays; another input keeps its own batches.

    Raises:
        OptionError: there are fewer rows than a batch has.
    """
    given = first.arguments
    data = (given.get("x"), given.get("y"), given.get("sample_weight"))
    options = {name: given[name] for name in _KEPT_ARGUMENTS if name in given}
    options["callbacks"], notes = _select_callbacks(callbacks_in(given))
    source = _source(data, given, batch)
    if not source.is_arrays:
        return _task_of_batches(source, data, given, options, budget, notes)
    return _task_of_arrays(data, given, options, batch, budget, notes)


def _source(data: Any, given: Any, batch: int) -> InputSource:
    steps, weights = given.get("steps_per_epoch"), given.get("class_weight")
    return make_source(*data, batch_size=batch, steps_per_epoch=steps, class_weight=weights)


def _task_of_arrays(data: Any, given: Any, options: Any, batch: int, budget: Budget, notes: list[str]) -> TrainingTask:
    data = jax.tree.map(np.asarray, data)
    validation, note, data = _validation_of(given, data)
    rows = _count(data)
    used = min(rows, budget.rows or rows)
    steps = used // batch
    if not steps:
        raise OptionError(f"Batch size {batch}: only {used} rows to train on. Fix: choose a smaller batch.")
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
        has_own_batches=False,
        notes=(*notes, *note),
    )


def _task_of_batches(
    source: InputSource, data: Any, given: Any, options: Any, budget: Budget, notes: list[str]
) -> TrainingTask:
    first = next(source.batches())  # Takes one batch of a generator, which trains on the others.
    notes = [*notes, "the input already has batches; only these are measured"]
    held_out = given.get("validation_data")
    validation = None if held_out is None else trainer.unpack_x_y_sample_weight(held_out)
    if validation is None:
        notes.append("no validation data, so accuracy is not measured")
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
        has_own_batches=True,
        notes=tuple(notes),
    )


def _validation_of(given: Any, data: Any) -> tuple[Any, list[str], Any]:
    """Return validation data, a note about them, and the data left to train on."""
    if given.get("validation_data") is not None:
        return trainer.unpack_x_y_sample_weight(given["validation_data"]), [], data
    rows = _count(data)
    fraction = given.get("validation_split") or 0.0
    kept = int(rows * (1 - (fraction or HELD_OUT)))
    held_out = _rows(data, slice(kept, None))
    note = [] if fraction else [f"the last {HELD_OUT:.0%} of the rows are held out for evaluation"]
    return held_out, note, _rows(data, slice(kept))


def _rows(data: Any, chosen: slice) -> Any:
    return jax.tree.map(lambda array: array[chosen], data)


def _count(data: Any) -> int:
    return len(jax.tree.leaves(data)[0])


def _select_callbacks(given: list[Any]) -> tuple[list[Any], list[str]]:
    """Return the callbacks that set the learning rate, and a note about the others."""
    kept = [one for one in given if isinstance(one, keras.callbacks.LearningRateScheduler)]
    left_out = sorted({type(one).__name__ for one in given if one not in kept})
    return kept, [f"callbacks left out while measuring: {', '.join(left_out)}"] if left_out else []
