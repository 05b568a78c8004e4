"""Results of a scaling run, and their numbers as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep._errors import OptionError, sequence_of, shown, whole_number
from lockstep._errors import seconds as seconds_of_wait
from lockstep._logging import counted
from lockstep.collectives.cost_model import AllReduceMeasurement

MOST_DEVICES = 1024


@dataclass(frozen=True)
class ScalingSetting:
    """Number of devices and batch size of one measurement.

    Args:
        devices: number of devices; 0: plain Keras on one device, without a strategy.
        batch: rows of the global batch.
    """

    devices: int
    batch: int

    @property
    def name(self) -> str:
        """Text for people: ``2 devices, batch 64``."""
        what = "plain Keras" if not self.devices else counted(self.devices, "device")
        return f"{what}, batch {self.batch}"


@dataclass(frozen=True)
class Budget:
    """How much one setting trains.

    Args:
        epochs: passes over the data.
        rows: the largest number of rows to use; None: all.
        limit: seconds for the process of one setting.
    """

    epochs: int = 1
    rows: int | None = None
    limit: float = 600.0

    def __post_init__(self) -> None:
        whole_number("epochs", self.epochs)
        if self.rows is not None:
            whole_number("rows", self.rows)
        seconds_of_wait("limit", self.limit)


@dataclass(frozen=True)
class CurvePoint:
    """A point of a learning curve.

    Args:
        rows: number trained on so far.
        seconds: of training so far, without compilation and evaluation.
        value: of the metric on the validation data.
    """

    rows: int
    seconds: float
    value: float


@dataclass(frozen=True)
class SettingResult:
    """The result of one setting.

    Args:
        setting: devices and batch.
        has_own_batches: whether the input has batches already, so that the batch size cannot be chosen.
        rows_per_epoch: number trained on in an epoch.
        blocks: seconds per step of each block of steps.
        bare: seconds of the compiled step on one placed batch, outside Keras's loop.
        taking: seconds per step spent waiting for or reading batches; None in plain Keras.
        all_reduce: seconds of an all-reduce of arrays with the shapes of the gradients.
        gradient_bytes: size of those arrays.
        algorithm: name of the formula of :mod:`lockstep.collectives.cost_model` for the all-reduce.
        links: all-reduces of vectors of several sizes on these devices; seconds less those of a program without them.
        memory: peak bytes of the process, or of a device if that is an accelerator.
        metric: name of the metric of ``curve``; None without validation data.
        is_higher_better: whether larger values of the metric are better.
        curve: values of the metric.
        platform: of the devices, such as "cpu".
        notes: remarks for the reader.
    """

    setting: ScalingSetting
    has_own_batches: bool
    rows_per_epoch: int
    blocks: tuple[float, ...]
    bare: float
    taking: float | None
    all_reduce: float
    gradient_bytes: int
    algorithm: str
    links: tuple[AllReduceMeasurement, ...]
    memory: int
    metric: str | None
    is_higher_better: bool
    curve: tuple[CurvePoint, ...]
    platform: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SettingFailure:
    """A setting that could not be measured.

    Args:
        setting: devices and batch.
        reason: one sentence.
        ends_all: whether no other setting can be measured, either.
    """

    setting: ScalingSetting
    reason: str
    ends_all: bool = False


def settings_of(devices: Sequence[int], batch: Sequence[int]) -> list[ScalingSetting]:
    """Return all settings in the order of measurement: those of one batch size, which are compared, run one after the other.

    Raises:
        OptionError: a number is out of its range, or a sequence is empty.
    """
    for name, numbers in (("devices", devices), ("batch", batch)):
        if not sequence_of(name, numbers, "whole numbers such as (1, 2)"):
            raise OptionError(f"{name}: expected whole numbers such as (1, 2), got {shown(numbers)}.")
        for number in numbers:
            whole_number(name, number, most=MOST_DEVICES if name == "devices" else None)
    counts = sorted({1, *devices})
    return [ScalingSetting(count, rows) for rows in sorted(set(batch)) for count in (0, *counts)]


def from_json(values: Mapping[str, Any]) -> SettingResult | SettingFailure:
    """Convert values of JSON to a result; the inverse of ``asdict``."""
    setting = ScalingSetting(**values["setting"])
    if "reason" in values:
        return SettingFailure(setting, values["reason"], values["ends_all"])
    converted = {
        "setting": setting,
        "curve": tuple(CurvePoint(**point) for point in values["curve"]),
        "links": tuple(AllReduceMeasurement(**link) for link in values["links"]),
        "blocks": tuple(values["blocks"]),
        "notes": tuple(values["notes"]),
    }
    return SettingResult(**{**values, **converted})


_MEGABYTE = 1e6


def seconds(value: float) -> str:
    """Format seconds with a suitable unit."""
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (600.0, 1.0, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 60:,.0f} min"


def ratio(value: float | None) -> str:
    """Format a factor, such as a speed-up."""
    return "–" if value is None else f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def share(part: float, whole: float) -> str:
    """Format a part of a whole as a percentage."""
    return f"{part / whole:.0%}"


def number(value: float | None) -> str:
    """Format the value of a metric."""
    return "–" if value is None else f"{value:.4g}"


def memory(value: int) -> str:
    """Format bytes as megabytes."""
    return f"{value / _MEGABYTE:,.0f} MB"
