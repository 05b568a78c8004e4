"""The two doors: a script, or a function that builds a model and data to train it on."""

import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from lockstep._errors import OptionError
from lockstep.tools.scaling.report import Question, ScalingReport, refuse_unwritable, report_of
from lockstep.tools.scaling.results import Budget, settings_of
from lockstep.tools.scaling.subprocess_runner import measure_all
from lockstep.tools.scaling.terminal import telling
from lockstep.tools.scaling.workload import FunctionWorkload, Workload, is_in_child, program_of, train_given

__all__ = ["scale_script", "scaling_report"]


def scale_script(
    path: str,
    arguments: Sequence[str],
    devices: Sequence[int],
    batch: Sequence[int],
    budget: Budget,
    question: Question,
    *,
    command: str,
    outputs: Sequence[str | None] = (),
) -> ScalingReport:
    """Measure what a script trains; see :func:`scaling_report`.

    Args:
        path: of the script.
        arguments: that it gets.
        devices: numbers of devices.
        batch: global batches; empty: the batches that the input has.
        budget: how much each setting trains.
        question: what the prediction is for.
        command: as it was typed.
        outputs: files that the report will be written to.

    Raises:
        OptionError: there is no such script, an argument is out of its range, or a file cannot be written.
    """
    if not Path(path).is_file():
        raise OptionError(f"{path}: there is no such file. Give the script that trains the model.")
    refuse_unwritable(outputs)
    program = Workload("script", path=path, arguments=tuple(arguments))
    return _measured(program, devices, batch, budget, question, Path(path).name, command)


def scaling_report(
    build: Callable[[], Any],
    data: Any,
    *,
    devices: Sequence[int] = (1, 2),
    batch: Sequence[int] = (64, 128, 256, 512),
    epochs: int = 1,
    rows: int | None = None,
    validation: Any = None,
    bandwidth: float | str = "100GbE",
    latency: float | None = None,
    devices_per_machine: int | None = None,
    limit: float = 600.0,
    output: str | Path | None = None,
) -> ScalingReport:
    """Measure what more devices and other batches do for a model, recommend a setting, and predict up to 1,024 devices.

    Each setting runs in a fresh process, which imports ``build`` and ``data`` where these are in a module. Where they are in the main
    script, it runs that again up to this call, so what stands before this call happens once for each setting.

    Args:
        build: gives a compiled model.
        data: ``(x, y)`` or ``(x, y, sample_weight)``, arrays ``(rows, …)``; or a function that gives them.
        devices: numbers of devices, for example ``(1, 2, 4)``; one device is always measured, to compare with.
        batch: rows of the global batches.
        epochs: passes over the data for each setting.
        rows: of the data that are used at most.
        validation: as ``data``, to evaluate on; by default the last tenth of the rows, which is not trained on then.
        bandwidth: between machines, for the prediction: GB/s, or "10GbE", "100GbE", "infiniband", "nvlink", "pcie".
        latency: between machines in microseconds; by default what goes with the name, else 30.
        devices_per_machine: for the prediction; by default 8 accelerators, or one CPU.
        limit: seconds for each setting; one that needs more is a row that says so.
        output: where the page goes, if it is wanted.

    Returns:
        The report: ``print`` shows it, ``save_html`` and ``save_json`` write it.

    Raises:
        OptionError: an argument is out of its range, another process cannot come to ``build`` and ``data``, or ``output`` cannot be written.

    Example:
        >>> import lockstep
        >>> lockstep.scaling_report(build=None, data=None)
        Traceback (most recent call last):
        lockstep._errors.OptionError: build: expected a function that gives a compiled model, got None.
    """
    if not callable(build):
        raise OptionError(f"build: expected a function that gives a compiled model, got {build!r}.")
    if is_in_child():
        train_given(FunctionWorkload(build, data, validation))
    budget, question = Budget(epochs, rows, limit), Question(bandwidth, latency, devices_per_machine)
    refuse_unwritable([output])
    named = build.func if isinstance(build, functools.partial) else build
    title = named.__qualname__ if isinstance(named, FunctionType | MethodType | type) else type(named).__name__
    with tempfile.TemporaryDirectory() as folder:
        program = program_of(FunctionWorkload(build, data, validation), Path(folder))
        if program is None:
            raise OptionError(
                "scaling_report: each setting runs in a process of its own, and that cannot come to functions which were typed into a notebook "
                "or a console. Put build and data into a module and import them from there."
            )
        command = shlex.join(sys.orig_argv)
        report = _measured(program, devices, batch, budget, question, title, command)
    if output is not None:
        report.save_html(output)
    return report


def _measured(
    program: Workload,
    devices: Sequence[int],
    batch: Sequence[int],
    budget: Budget,
    question: Question,
    title: str,
    command: str,
) -> ScalingReport:
    settings = settings_of(devices, batch)
    with telling(len(settings)) as tell:
        found = measure_all(program, settings, budget, os.environ, tell)
    return report_of(title, command, found, question)
