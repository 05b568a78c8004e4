"""Results of a scaling run: speed-up, efficiency and shares of a step, which setting is recommended, and the rows of the table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import numpy as np

from lockstep._errors import OptionError, seconds, sequence_of, shown, whole_number
from lockstep._logging import counted
from lockstep.collectives.cost_model import AllReduceMeasurement

MAX_DEVICES = 1024


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

    @property
    def cells(self) -> tuple[str, str]:
        """Number of devices and batch size, for a table."""
        return str(self.devices or "Keras"), str(self.batch)


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
        seconds("limit", self.limit)


@dataclass(frozen=True)
class CurvePoint:
    """A point of a learning curve.

    Args:
        rows: number trained on so far.
        seconds: seconds of training so far, without compilation and evaluation.
        value: value of the metric on the validation data.
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
        platform: platform of the devices, such as "cpu".
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
            raise OptionError(
                f"{name}: expected whole numbers such as (1, 2), got {shown(numbers)}. Fix: give at least one."
            )
        for number in numbers:
            whole_number(name, number, maximum=MAX_DEVICES if name == "devices" else None)
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


def format_seconds(value: float) -> str:
    """Format seconds with a suitable unit."""
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (600.0, 1.0, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 60:,.0f} min"


def format_ratio(value: float | None) -> str:
    """Format a factor, such as a speed-up."""
    return "–" if value is None else f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def format_number(value: float | None) -> str:
    """Format the value of a metric."""
    return "–" if value is None else f"{value:.4g}"


def format_memory(value: int) -> str:
    """Format bytes as megabytes."""
    return f"{value / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Shares:
    """Seconds of a step by cause; their sum is the step."""

    compute: float
    communication: float
    input: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.communication + self.input + self.host


@dataclass(frozen=True)
class ScalingRow:
    """One row of the table.

    Args:
        setting: devices and global batch.
        measured: the result that the row is computed from.
        step: median seconds of a step over the blocks.
        low: first quartile of the blocks.
        high: third quartile of the blocks.
        epoch: seconds per epoch.
        rows_per_second: over all devices.
        strong: speed-up over one device with the same global batch; None without such a row.
        weak: speed-up in rows per second over one device with the same batch per device; None without such a row.
        shares: seconds of a step by cause.
        at_rows: metric after equal rows.
        at_time: metric after equal time.
    """

    setting: ScalingSetting
    measured: SettingResult
    step: float
    low: float
    high: float
    epoch: float
    rows_per_second: float
    strong: float | None
    weak: float | None
    shares: Shares
    at_rows: float | None
    at_time: float | None

    @property
    def per_device(self) -> float:
        """Batch rows per device."""
        return self.setting.batch / max(1, self.setting.devices)

    @property
    def strong_efficiency(self) -> float | None:
        """Speed-up at the same global batch, divided by the number of devices."""
        return None if self.strong is None else self.strong / self.setting.devices

    @property
    def weak_efficiency(self) -> float | None:
        """Speed-up at the same batch per device, divided by the number of devices."""
        return None if self.weak is None else self.weak / self.setting.devices

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a share of the median."""
        return (self.high - self.low) / 2 / self.step


@dataclass(frozen=True)
class ScalingTable:
    """The results of all settings.

    Args:
        rows: rows of the measured settings, in order.
        failed: the settings that could not be measured.
        metric: name of the metric of ``at_rows`` and ``at_time``; None if no setting was evaluated.
        is_higher_better: whether larger values of the metric are better.
        equal_rows: number of rows after which settings are compared: the smallest of all settings.
        equal_seconds: seconds of training after which settings are compared: the shortest of all settings.
    """

    rows: tuple[ScalingRow, ...]
    failed: tuple[SettingFailure, ...]
    metric: str | None
    is_higher_better: bool
    equal_rows: int
    equal_seconds: float


def table_of(results: Sequence[SettingResult | SettingFailure]) -> ScalingTable:
    """Compute the table from the results of all settings."""
    measured = [one for one in results if isinstance(one, SettingResult) and one.blocks]
    failed = [one for one in results if isinstance(one, SettingFailure)]
    failed += [
        SettingFailure(one.setting, "Too few steps to time. Fix: train longer, or choose a smaller batch.")
        for one in results
        if isinstance(one, SettingResult) and not one.blocks
    ]
    curves = [one.curve for one in measured if one.curve]
    equal_rows = min((curve[-1].rows for curve in curves), default=0)
    equal_seconds = min((curve[-1].seconds for curve in curves), default=0.0)
    rows = tuple(_row(one, measured, equal_rows, equal_seconds) for one in measured)
    metrics = [one.metric for one in measured if one.metric]
    higher = next((one.is_higher_better for one in measured if one.metric), True)
    return ScalingTable(rows, tuple(failed), metrics[0] if metrics else None, higher, equal_rows, equal_seconds)


def _row(one: SettingResult, others: Sequence[SettingResult], equal_rows: int, equal_seconds: float) -> ScalingRow:
    step, devices = statistics.median(one.blocks), one.setting.devices
    low, _, high = statistics.quantiles(one.blocks, n=4, method="inclusive") if len(one.blocks) > 1 else [step] * 3
    speed = one.setting.batch / step
    baselines = {
        other.setting.batch: other.setting.batch / statistics.median(other.blocks)
        for other in others
        if other.setting.devices == 1
    }
    # An input of unknown length may have been cut at the time limit; the longest run is closest to its length.
    rows = max(other.rows_per_epoch for other in others if other.setting.batch == one.setting.batch)
    same_batch = baselines.get(one.setting.batch) if devices else None
    same_share = baselines.get(one.setting.batch // devices) if devices and one.setting.batch % devices == 0 else None
    return ScalingRow(
        setting=one.setting,
        measured=one,
        step=step,
        low=low,
        high=high,
        epoch=step * rows / one.setting.batch,
        rows_per_second=speed,
        strong=speed / same_batch if same_batch else None,
        weak=speed / same_share if same_share else None,
        shares=shares_of(step, one.bare, one.all_reduce, one.taking or 0.0),
        at_rows=value_at(one.curve, equal_rows, by_rows=True),
        at_time=value_at(one.curve, equal_seconds, by_rows=False),
    )


def shares_of(step: float, bare: float, all_reduce: float, taking: float) -> Shares:
    """Divide the seconds of a step by cause.

    Args:
        step: seconds within ``fit``.
        bare: seconds of the compiled step alone.
        all_reduce: seconds of the all-reduce of the gradients alone.
        taking: seconds of getting a batch; the part that overlaps with the devices' work costs nothing.
    """
    busy = min(step, bare)
    communication = min(all_reduce, busy)
    idle = step - busy
    waiting = min(taking, idle)
    return Shares(busy - communication, communication, waiting, idle - waiting)


def value_at(curve: Sequence[CurvePoint], place: float, *, by_rows: bool) -> float | None:
    """Return the metric at a number of rows or seconds, by linear interpolation; None outside of the curve."""
    places = [point.rows if by_rows else point.seconds for point in curve]
    if not places or not places[0] <= place <= places[-1]:
        return None
    return float(np.interp(place, places, [point.value for point in curve]))


TOLERANCE = 0.005  # absolute, if higher is better; else RELATIVE of the best
RELATIVE = 0.02
_UNSTEADY = 0.25  # spread of a row above which its figures are unreliable
_NEGLIGIBLE = 0.05  # share of an epoch below which more devices are not worth it
_NAMES = {"compute": "compute", "communication": "communication", "input": "getting batches", "host": "the host's work"}


def choose(table: ScalingTable) -> ScalingRow | None:
    """Return the fastest row whose metric after equal rows is within a tolerance of the best; fewer devices if about as fast."""
    rows = [row for row in table.rows if row.setting.devices]
    good = [row for row in rows if _is_within_tolerance(row, table)] or rows
    if not good:
        return None
    fastest = min(row.epoch for row in good)
    return min(
        (row for row in good if row.epoch <= fastest * (1 + _NEGLIGIBLE)),
        key=lambda row: (row.setting.devices, row.epoch),
    )


def _is_within_tolerance(row: ScalingRow, table: ScalingTable) -> bool:
    best = _best_metric(table)
    if best is None or row.at_rows is None:
        return best is None
    return abs(row.at_rows - best) <= _tolerance(best, table)


def _best_metric(table: ScalingTable) -> float | None:
    values = [row.at_rows for row in table.rows if row.setting.devices and _is_finite(row.at_rows)]
    return (max if table.is_higher_better else min)(values, default=None)


def _is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a metric is a finite number; a training that has diverged has none."""
    return value is not None and math.isfinite(value)


def _tolerance(best: float, table: ScalingTable) -> float:
    return TOLERANCE if table.is_higher_better else RELATIVE * abs(best)


def recommend(table: ScalingTable) -> list[str]:
    """Write sentences: which setting to take and why, the effect of more devices and other batches, and the overhead of the strategy."""
    chosen = choose(table)
    if chosen is None:
        return ["No setting could be measured; the reasons are in the table."]
    return [
        _describe_choice(chosen, table),
        *_compare_devices(chosen, table.rows),
        *_compare_equal_time(chosen, table),
        *_report_input(chosen),
        *_report_overhead(table.rows),
        *_report_spread(table.rows),
    ]


def _describe_choice(chosen: ScalingRow, table: ScalingTable) -> str:
    text = f"Take {chosen.setting.name}: {format_seconds(chosen.epoch)} per epoch, {chosen.rows_per_second:,.0f} rows/s"
    best = _best_metric(table)
    if best is None or chosen.at_rows is None:
        return f"{text}, the fastest. Its effect on accuracy is unknown."
    left_out = [
        row
        for row in table.rows
        if row.setting.devices and not _is_within_tolerance(row, table) and row.epoch < chosen.epoch
    ]
    reason = (
        f"{text}, the fastest setting whose {table.metric} after {table.equal_rows:,} rows is within "
        f"{_tolerance(best, table):.3g} of the best ({chosen.at_rows:.4g}; best {best:.4g})."
    )
    if not left_out:
        return reason
    faster = min(left_out, key=lambda row: row.epoch)
    return (
        f"{reason} Faster, but worse after as many rows: {faster.setting.name} ({format_seconds(faster.epoch)} per epoch, "
        f"{table.metric} {faster.at_rows:.4g})."
    )


def _compare_devices(chosen: ScalingRow, rows: Sequence[ScalingRow]) -> list[str]:
    """Compare one device with the largest number of devices at the chosen batch."""
    same = [row for row in rows if row.setting.batch == chosen.setting.batch and row.setting.devices]
    one = next((row for row in same if row.setting.devices == 1), None)
    most = max(same, key=lambda row: row.setting.devices)
    if one is None or most is one:
        return []
    ratio = one.epoch / most.epoch
    is_clear = abs(ratio - 1) > one.spread + most.spread
    unsure = "" if is_clear else " The difference is within the spread of the blocks: measure on a quiet machine."
    if ratio > 1:
        text = f"{most.setting.devices} devices are {ratio:.2f} times as fast as one at this batch"
        return [f"{text}, an efficiency of {ratio / most.setting.devices:.0%}: {_describe_shares(most)}.{unsure}"]
    text = f"{most.setting.devices} devices are slower than one at this batch ({1 / ratio:.2f} times the time)"
    return [f"{text}: {_describe_shares(most)}.{unsure}{_explain_compute(one, most)}"]


def _describe_shares(row: ScalingRow) -> str:
    parts = [(name, seconds / row.step) for name, seconds in asdict(row.shares).items() if name != "compute"]
    causes = [
        f"{share:.0%} of a step is {_NAMES[name]}"
        for name, share in sorted(parts, key=lambda part: -part[1])
        if share >= 0.05
    ]
    return ", ".join(causes) or f"{row.shares.compute / row.step:.0%} of a step is compute"


def _explain_compute(one: ScalingRow, most: ScalingRow) -> str:
    if most.measured.platform != "cpu" or most.shares.compute < one.shares.compute:
        return ""
    return " The compute is not faster either: logical CPU devices share the cores that one device already uses."


def _compare_equal_time(chosen: ScalingRow, table: ScalingTable) -> list[str]:
    """Name the setting with the best metric after equal time, if it is not the chosen one."""
    known = [row for row in table.rows if row.setting.devices and _is_finite(row.at_time)]
    if not known or not _is_finite(chosen.at_time):
        return []
    furthest = (max if table.is_higher_better else min)(known, key=lambda row: row.at_time or 0.0)
    if furthest is chosen or abs((furthest.at_time or 0) - chosen.at_time) <= _tolerance(chosen.at_time, table):
        return []
    return [
        f"After equal time ({format_seconds(table.equal_seconds)} of training) {furthest.setting.name} is ahead: {table.metric} "
        f"{furthest.at_time:.4g} against {chosen.at_time:.4g}. A larger batch makes fewer updates; a larger learning rate with warm-up "
        "may compensate."
    ]


def _report_input(chosen: ScalingRow) -> list[str]:
    share = chosen.shares.input / chosen.step
    if share < 0.2:
        return []
    return [
        f"{share:.0%} of its time is spent on getting batches: do less work per batch, read with several workers, or cache "
        "(lockstep.InputOptions)."
    ]


def _report_overhead(rows: Sequence[ScalingRow]) -> list[str]:
    plain = {row.setting.batch: row for row in rows if not row.setting.devices}
    both = [(plain[row.setting.batch], row) for row in rows if row.setting.devices == 1 and row.setting.batch in plain]
    if not both:
        return []
    before, under = min(both, key=lambda pair: pair[0].step)
    return [
        f"At batch {under.setting.batch} a step takes {format_seconds(before.step)} in plain Keras and {format_seconds(under.step)} under a "
        "strategy on one device."
    ]


def _report_spread(rows: Sequence[ScalingRow]) -> list[str]:
    found = [row for row in rows if row.spread > _UNSTEADY]
    if not found:
        return []
    worst = max(found, key=lambda row: row.spread)
    return [
        f"{len(found)} of {len(rows)} settings spread by more than {_UNSTEADY:.0%} from block to block ({worst.setting.name}: ±{worst.spread:.0%}): the "
        "machine had other work, or the steps are too few. Measure again on a quiet machine, or with more epochs."
    ]
