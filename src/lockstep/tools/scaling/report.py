"""The content of a scaling report: the table, the prediction and the recommendation; as values of JSON."""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from lockstep._errors import whole_number
from lockstep.collectives.cost_model import Network
from lockstep.tools.scaling.prediction import (
    Predicted,
    StepModel,
    errors_of,
    link_between,
    model_of,
    network_for,
    series_of,
)
from lockstep.tools.scaling.table import ScalingRow, ScalingTable, choose

__all__ = ["Outlook", "Question", "ReportData", "outlook_of"]

_MIN_CHECKS = 3  # settings; with fewer the formula has as many constants as data and fits them exactly


@dataclass(frozen=True)
class Question:
    """Options of a prediction.

    Args:
        bandwidth: between machines in GB/s, or a name such as "100GbE".
        latency: between machines in µs; None: that of the named network, or 30.
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
    """A prediction for more devices.

    Args:
        model: the costs of a step.
        network: between the devices.
        strong: predicted steps at a fixed global batch.
        weak: predicted steps at a fixed batch per device.
        checks: measured settings with their predicted seconds per step and the relative error.
        described: the assumptions, in words.
    """

    model: StepModel
    network: Network
    strong: tuple[Predicted, ...]
    weak: tuple[Predicted, ...]
    checks: tuple[tuple[ScalingRow, float, float], ...]
    described: str

    @property
    def error(self) -> str:
        """A sentence about the error of the formula on the measured settings."""
        errors = sorted(abs(error) for _, _, error in self.checks)
        if len(errors) < _MIN_CHECKS:
            settings = "the one measured setting" if len(errors) == 1 else f"the {len(errors)} measured settings"
            return f"The formula was fitted to {settings}, too few to estimate its error"
        return (
            f"On the {len(errors)} measured settings the error of the formula is {statistics.median(errors):.0%} in the median, "
            f"at most {errors[-1]:.0%}"
        )


@dataclass(frozen=True)
class ReportData:
    """The content of a report, which the terminal and the HTML page render.

    Args:
        title: of what was measured.
        command: that started the measurement.
        machine: that it ran on.
        table: the results of all settings.
        recommendation: sentences.
        outlook: the prediction for more devices; None if no setting could be measured.
        notes: remarks for the reader.
    """

    title: str
    command: str
    machine: str
    table: ScalingTable
    recommendation: tuple[str, ...]
    outlook: Outlook | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as values of JSON.

        Returns:
            Dicts, lists, strings and numbers; None for NaN and infinity, such as the loss of a training that has diverged.
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


def outlook_of(table: ScalingTable, question: Question) -> Outlook | None:
    """Return the prediction for more devices; None if nothing was measured under a strategy."""
    model, chosen = model_of(table.rows), choose(table)
    if model is None or chosen is None:
        return None
    platform = chosen.measured.platform
    between = link_between(question.bandwidth, question.latency)
    network = network_for(model, platform, between, question.devices_per_machine)
    batch, share = chosen.setting.batch, -(-chosen.setting.batch // chosen.setting.devices)
    link = "the link measured here" if model.link else "the same"
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


def _plain(value: Any) -> Any:
    """Convert to values of JSON, which has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
