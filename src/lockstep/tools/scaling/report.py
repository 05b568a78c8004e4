"""What comes out: the table, the prediction, and what to take; as text, as JSON and as a page."""

import contextlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep._errors import OptionError, whole_number
from lockstep.collectives.cost_model import Network
from lockstep.tools.commands.machine import describe_machine
from lockstep.tools.scaling.prediction import (
    Predicted,
    StepModel,
    errors_of,
    link_between,
    model_of,
    network_for,
    series_of,
)
from lockstep.tools.scaling.recommendation import choose, recommend
from lockstep.tools.scaling.results import SettingFailure, SettingResult
from lockstep.tools.scaling.table import ScalingRow, ScalingTable, table_of

__all__ = ["Outlook", "Question", "ScalingReport", "refuse_unwritable", "report_of"]

_TELLING = 3  # settings; with fewer the formula has as many constants, and meets them all


@dataclass(frozen=True)
class Question:
    """What a prediction is for.

    Args:
        bandwidth: between machines in GB/s, or a name such as "100GbE".
        latency: between machines in µs; None: what goes with the name.
        devices_per_machine: None: 8 accelerators, or 1 CPU.
    """

    bandwidth: float | str = "100GbE"
    latency: float | None = None
    devices_per_machine: int | None = None

    def __post_init__(self) -> None:
        link_between(self.bandwidth, self.latency)
        if self.devices_per_machine is not None:
            whole_number("devices_per_machine", self.devices_per_machine)


@dataclass(frozen=True)
class Outlook:
    """What was predicted.

    Args:
        model: what a step costs.
        network: between the devices.
        strong: steps with one global batch.
        weak: steps with one batch a device.
        checks: settings that were measured, their predicted seconds a step, and the relative error.
        described: what the prediction assumes.
    """

    model: StepModel
    network: Network
    strong: tuple[Predicted, ...]
    weak: tuple[Predicted, ...]
    checks: tuple[tuple[ScalingRow, float, float], ...]
    described: str

    @property
    def error(self) -> str:
        """A sentence on how far the same formula is from what was measured."""
        errors = sorted(abs(error) for _, _, error in self.checks)
        if len(errors) < _TELLING:
            settings = "the one setting that was" if len(errors) == 1 else f"the {len(errors)} settings that were"
            return f"It was fitted to {settings} measured, too few to say how far it is off"
        return (
            f"On the {len(errors)} settings that were measured the same formula is off by {statistics.median(errors):.0%} in the median, "
            f"at most {errors[-1]:.0%}"
        )


@dataclass(frozen=True)
class ScalingReport:
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
        >>> from lockstep.tools.scaling.report import ScalingReport
        >>> from lockstep.tools.scaling.table import table_of
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
    outlook: Outlook | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        from lockstep.tools.scaling.terminal import render

        return render(self)

    def to_json(self) -> dict[str, Any]:
        """All of it as values of JSON.

        Returns:
            Dicts, lists, texts and numbers; None where there is no number, as for the loss of a training that has diverged.
        """
        values = asdict(self)
        for row, shown in zip(self.table.rows, values["table"]["rows"], strict=True):
            shown |= {"strong_efficiency": row.strong_efficiency, "weak_efficiency": row.weak_efficiency}
        if self.outlook:
            values["outlook"]["error"] = self.outlook.error
            values["outlook"]["checks"] = [
                {**asdict(row.setting), "measured": row.step, "predicted": seconds, "error": error}
                for row, seconds, error in self.outlook.checks
            ]
        plain: dict[str, Any] = _plain(values)
        return plain

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
        from lockstep.tools.scaling.html_report import page_of

        _write(path, page_of(self))


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
        title, command, describe_machine(), table, tuple(recommend(table)), _outlook(table, question), tuple(notes)
    )


def _outlook(table: ScalingTable, question: Question) -> Outlook | None:
    model, chosen = model_of(table.rows), choose(table)
    if model is None or chosen is None:
        return None
    platform = chosen.measured.platform
    between = link_between(question.bandwidth, question.latency)
    network = network_for(model, platform, between, question.devices_per_machine)
    batch, share = chosen.setting.batch, -(-chosen.setting.batch // chosen.setting.devices)
    link = "the link that was measured here" if model.link else "the same"
    described = (
        f"{network.devices_per_machine} device{'s' * (network.devices_per_machine > 1)} a machine; between machines "
        f"{1e-9 / between.seconds_per_byte:g} GB/s and {1e6 * between.latency:g} µs, within one {link}; "
        f"{model.gradient_bytes:,} bytes of gradients by {model.algorithm}; strong: {batch:,} rows in all, weak: {share:,} on each device"
    )
    return Outlook(
        model,
        network,
        tuple(series_of(model, batch, network, is_weak=False)),
        tuple(series_of(model, share, network, is_weak=True)),
        tuple(errors_of(model, table.rows)),
        described,
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


def _plain(value: Any) -> Any:
    """Values of JSON, which knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
