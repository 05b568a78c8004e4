"""The two doors: a script, or a function that builds a model and data to train it on."""

import contextlib
import functools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from lockstep._errors import OptionError
from lockstep.tools.commands.env import describe_machine
from lockstep.tools.scaling.html_report import page_of
from lockstep.tools.scaling.report import Question, ReportData, outlook_of
from lockstep.tools.scaling.results import Budget, SettingFailure, SettingResult, settings_of
from lockstep.tools.scaling.subprocess_runner import measure_all
from lockstep.tools.scaling.table import recommend, table_of
from lockstep.tools.scaling.terminal import render, telling
from lockstep.tools.scaling.workload import FunctionWorkload, Workload, is_in_child, program_of, train_given

__all__ = ["ScalingReport", "refuse_unwritable", "report_of", "scale_script", "scaling_report"]


@dataclass(frozen=True)
class ScalingReport(ReportData):
    """What ``lockstep.scaling_report`` and ``lockstep scale`` give; ``print`` shows it.

    Args:
        title: what was measured.
        command: that did it.
        machine: where.
        table: what each setting gave.
        recommendation: sentences.
        outlook: what more devices would do; None where nothing could be measured.
        notes: what the reader must know.

    Example:
        >>> import os, tempfile
        >>> from lockstep.tools.scaling.api import ScalingReport
        >>> from lockstep.tools.scaling.table import table_of
        >>> report = ScalingReport("a net", "lockstep scale net.py", "a laptop", table_of([]), ("Take 1 device.",), None, ())
        >>> report.to_json()["recommendation"]
        ['Take 1 device.']
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.save_json(f"{folder}/figures.json")
        ...     os.listdir(folder)
        ['figures.json']
    """

    def __str__(self) -> str:
        return render(self)

    def save_json(self, path: str | Path) -> None:
        """Write it as JSON.

        Args:
            path: of the file.

        Raises:
            OptionError: the file cannot be written.
        """
        _write(path, json.dumps(self.to_json(), indent=1) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Write it as one page that needs nothing else.

        Args:
            path: of the file.

        Raises:
            OptionError: the file cannot be written.
        """
        _write(path, page_of(self))


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


def report_of(
    title: str, command: str, found: Sequence[SettingResult | SettingFailure], question: Question
) -> ScalingReport:
    """The report of what was measured.

    Args:
        title: what it was.
        command: that did it.
        found: what each setting gave.
        question: what the prediction is for.
    """
    table = table_of(found)
    notes = list(dict.fromkeys(note for row in table.rows for note in row.measured.notes))
    return ScalingReport(
        title, command, describe_machine(), table, tuple(recommend(table)), outlook_of(table, question), tuple(notes)
    )


def refuse_unwritable(paths: Iterable[str | Path | None]) -> None:
    """Find out before something takes long whether its files can be written; None is no file.

    Raises:
        OptionError: one cannot.
    """
    for path in (one for one in paths if one is not None):
        is_new = not Path(path).exists()
        with _refused(path):
            Path(path).open("ab").close()
            if is_new:
                Path(path).unlink()


def _write(path: str | Path, text: str) -> None:
    with _refused(path):
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _refused(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error.strerror or error}. Give a file in a folder in which files can be written."
        ) from error
