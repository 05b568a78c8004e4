"""The arithmetic of the table: speed-up, efficiency, where the time goes, and the metric after equal rows and equal time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.tools.scaling.results import CurvePoint, ScalingSetting, SettingFailure, SettingResult

__all__ = ["ScalingRow", "ScalingTable", "Shares", "shares_of", "table_of", "value_at"]


@dataclass(frozen=True)
class Shares:
    """Where the seconds of a step go; together they are the step."""

    compute: float
    communication: float
    input: float
    host: float


@dataclass(frozen=True)
class ScalingRow:
    """One line of the table.

    Args:
        setting: devices and global batch.
        measured: what it was made of.
        step: median seconds of a step over the blocks.
        low: the first quartile of the blocks.
        high: the third.
        epoch: seconds an epoch.
        rows_per_second: over all devices.
        strong: how many times as fast as one device with the same global batch; None without such a row.
        weak: how many times the rows a second of one device with the same batch per device.
        shares: seconds of a step, by where they go.
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
        """Rows of a device."""
        return self.setting.batch / max(1, self.setting.devices)

    @property
    def strong_efficiency(self) -> float | None:
        """Speed-up at the same global batch, by device."""
        return None if self.strong is None else self.strong / self.setting.devices

    @property
    def weak_efficiency(self) -> float | None:
        """Speed-up at the same batch per device, by device."""
        return None if self.weak is None else self.weak / self.setting.devices

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.step


@dataclass(frozen=True)
class ScalingTable:
    """What all settings gave.

    Args:
        rows: those that could be measured, in order.
        failed: the others.
        metric: what ``at_rows`` and ``at_time`` are; None where nothing could be evaluated.
        is_higher_better: of the metric.
        equal_rows: after how many rows settings are compared.
        equal_seconds: after how much training: the shortest of all.
    """

    rows: tuple[ScalingRow, ...]
    failed: tuple[SettingFailure, ...]
    metric: str | None
    is_higher_better: bool
    equal_rows: int
    equal_seconds: float


def table_of(found: Sequence[SettingResult | SettingFailure]) -> ScalingTable:
    """The table of what was measured."""
    measured = [one for one in found if isinstance(one, SettingResult) and one.blocks]
    failed = [one for one in found if isinstance(one, SettingFailure)]
    failed += [
        SettingFailure(one.setting, "Too few steps: nothing could be timed. Train longer, or choose a smaller batch.")
        for one in found
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
    # An input of unknown length may have been cut at the limit: the longest is the nearest to what it has.
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
    """Where a step's seconds go.

    Args:
        step: seconds within ``fit``.
        bare: of the compiled step alone.
        all_reduce: of the gradients alone.
        taking: of getting a batch; what of it goes on while devices compute costs nothing.
    """
    busy = min(step, bare)
    communication = min(all_reduce, busy)
    idle = step - busy
    waiting = min(taking, idle)
    return Shares(busy - communication, communication, waiting, idle - waiting)


def value_at(curve: Sequence[CurvePoint], place: float, *, by_rows: bool) -> float | None:
    """The metric at a number of rows or seconds, on the straight line between the points beside it; None outside."""
    points = [(point.rows if by_rows else point.seconds, point.value) for point in curve]
    if not points or not points[0][0] <= place <= points[-1][0]:
        return None
    for (x, value), (next_x, next_value) in pairwise(points):
        if x <= place <= next_x and next_x > x:
            return value + (next_value - value) * (place - x) / (next_x - x)
    return points[-1][1]
