"""Entry points of the scaling report: ``lockstep scale`` for a script, ``lockstep.scaling_report`` for functions."""

import contextlib
import functools
import json
import math
import os
import shlex
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from lockstep._errors import OptionError, file_path, shown
from lockstep.tools.env import describe_machine
from lockstep.tools.scaling.benchmark import measure_all
from lockstep.tools.scaling.html_report import page_of
from lockstep.tools.scaling.prediction import Prediction, PredictionOptions, prediction_for
from lockstep.tools.scaling.results import (
    Budget,
    ScalingSetting,
    ScalingTable,
    SettingFailure,
    SettingResult,
    recommend,
    settings_of,
    table_of,
)
from lockstep.tools.scaling.terminal import progress_reporter, render
from lockstep.tools.scaling.workload import (
    Workload,
    build_and_fit,
    check_data,
    is_measuring,
    workload_of,
)
from lockstep.tools.script_runner import check_exists


class SavedReport(ABC):
    """A report that can be written to files."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the report as values of JSON.

        Returns:
            Dicts, lists, strings, numbers and None.
        """

    @abstractmethod
    def _page(self) -> str:
        """Return the report as one HTML page."""

    def save_json(self, path: str | Path) -> None:
        """Write the report as JSON.

        Args:
            path: path of the file.

        Raises:
            OptionError: the file cannot be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Write the report as one HTML page without external files.

        Args:
            path: path of the file.

        Raises:
            OptionError: the file cannot be written.
        """
        write_text(path, self._page())


@dataclass(frozen=True)
class ScalingReport(SavedReport):
    """The result of ``lockstep.scaling_report`` and ``lockstep scale``; ``print`` shows it.

    Args:
        title: title of what was measured.
        command: that started the measurement.
        machine: that it ran on.
        table: the results of all settings.
        recommendation: sentences.
        outlook: the prediction for more devices; None if no setting could be measured.
        notes: remarks for the reader.

    Example:
        >>> import os, tempfile
        >>> from lockstep.tools.scaling.api import ScalingReport
        >>> from lockstep.tools.scaling.results import table_of
        >>> report = ScalingReport("a net", "lockstep scale net.py", "a laptop", table_of([]), ("Take 1 device.",), None, ())
        >>> report.to_json()["recommendation"]
        ['Take 1 device.']
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.save_json(f"{folder}/figures.json")
        ...     os.listdir(folder)
        ['figures.json']
    """

    title: str
    command: str
    machine: str
    table: ScalingTable
    recommendation: tuple[str, ...]
    outlook: Prediction | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> dict[str, Any]:
        """Return the report as values of JSON.

        Returns:
            Dicts, lists, strings and numbers; None for NaN and infinity, such as the loss of a training that has diverged.
        """
        values = asdict(self)
        for row, written in zip(self.table.rows, values["table"]["rows"], strict=True):
            written |= {"strong_efficiency": row.strong_efficiency, "weak_efficiency": row.weak_efficiency}
        if self.outlook:
            values["outlook"]["error"] = self.outlook.error
            values["outlook"]["checks"] = [
                {**asdict(row.setting), "measured": row.step, "predicted": seconds, "error": error}
                for row, seconds, error in self.outlook.checks
            ]
        plain: dict[str, Any] = _plain(values)
        return plain

    def _page(self) -> str:
        return page_of(self)


def _plain(value: Any) -> Any:
    """Convert to values of JSON, which has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scale_script(
    path: str,
    arguments: Sequence[str],
    devices: Sequence[int],
    batch: Sequence[int],
    budget: Budget,
    options: PredictionOptions,
    *,
    command: str,
    outputs: Sequence[str | None] = (),
) -> ScalingReport:
    """Measure the training of a script; see :func:`scaling_report`. ``command`` is for the report, which is to be written to ``outputs``.

    Raises:
        OptionError: the script does not exist, an argument is out of its range, or a file cannot be written.
    """
    settings = settings_of(devices, batch)
    check_exists(path)
    check_writable(outputs)
    workload = Workload("script", path=path, arguments=tuple(arguments))
    return _measure(workload, settings, budget, options, Path(path).name, command)


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
    """Measure a model on several numbers of devices and batch sizes, recommend a setting, and predict up to 1,024 devices.

    Each setting runs in a fresh process. If ``build`` and ``data`` are in a module, the process imports them. If they are in the main
    script, the process runs that script again up to this call, so code before this call runs once for each setting.

    Args:
        build: returns a compiled model.
        data: ``(x, y)`` or ``(x, y, sample_weight)``, arrays ``(rows, …)``; or a function that returns them.
        devices: numbers of devices, for example ``(1, 2, 4)``; one device is always measured as the baseline.
        batch: rows of the global batches.
        epochs: passes over the data for each setting.
        rows: the largest number of rows to use.
        validation: validation data, as ``data``; by default the last tenth of the rows, which is then not trained on.
        bandwidth: between machines, for the prediction: GB/s, or "10GbE", "100GbE", "infiniband", "nvlink", "pcie".
        latency: between machines in microseconds; by default that of the named network, else 30.
        devices_per_machine: for the prediction; by default 8 accelerators, or one CPU.
        limit: seconds for each setting; a setting that needs more is reported as failed.
        output: file for the HTML page; None writes no page.

    Returns:
        The report; ``print`` shows it, ``save_html`` and ``save_json`` write it.

    Raises:
        OptionError: an argument is out of its range, another process cannot import ``build`` and ``data``, or ``output`` cannot be written.

    Example:
        >>> import lockstep
        >>> lockstep.scaling_report(build=None, data=None)
        Traceback (most recent call last):
        lockstep._errors.OptionError: build: expected a function that returns a compiled model, got None. Fix: pass the function, not its result.
    """
    if not callable(build):
        raise OptionError(
            f"build: expected a function that returns a compiled model, got {shown(build)}. Fix: pass the function, not its result."
        )
    if is_measuring():
        build_and_fit(build, data, validation)
    settings = settings_of(devices, batch)
    check_data("data", data)
    if validation is not None:
        check_data("validation", validation)
    budget, options = Budget(epochs, rows, limit), PredictionOptions(bandwidth, latency, devices_per_machine)
    check_writable([output if output is None else file_path("output", output)])
    named = build.func if isinstance(build, functools.partial) else build
    title = named.__qualname__ if isinstance(named, FunctionType | MethodType | type) else type(named).__name__
    with tempfile.TemporaryDirectory() as folder:
        workload = workload_of(build, data, validation, Path(folder))
        if workload is None:
            raise OptionError(
                "scaling_report: each setting runs in a new process, which cannot import functions that were typed into a notebook or a console. "
                "Fix: put build and data into a module and import them from there."
            )
        report = _measure(workload, settings, budget, options, title, shlex.join(sys.orig_argv))
    if output is not None:
        report.save_html(output)
    return report


def _measure(
    workload: Workload,
    settings: Sequence[ScalingSetting],
    budget: Budget,
    options: PredictionOptions,
    title: str,
    command: str,
) -> ScalingReport:
    with progress_reporter(len(settings)) as report:
        results = measure_all(workload, settings, budget, os.environ, report)
    return report_of(title, command, results, options)


def report_of(
    title: str, command: str, results: Sequence[SettingResult | SettingFailure], options: PredictionOptions
) -> ScalingReport:
    """Build the report of settings that a command has measured."""
    table = table_of(results)
    notes = list(dict.fromkeys(note for row in table.rows for note in row.measured.notes))
    return ScalingReport(
        title, command, describe_machine(), table, tuple(recommend(table)), prediction_for(table, options), tuple(notes)
    )


def check_writable(paths: Iterable[str | Path | None]) -> None:
    """Check before a long measurement that its output files can be written; None is skipped.

    Raises:
        OptionError: a file cannot be written.
    """
    for path in (path for path in paths if path is not None):
        with _write_errors(path):
            is_new = not os.path.lexists(path)
            Path(path).open("ab").close()
            if is_new:
                Path(path).unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a report.

    Raises:
        OptionError: the file cannot be written.
    """
    with _write_errors(path):
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _write_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error.strerror or error}. Fix: give a file in a writable folder."
        ) from error
