"""The table of the report, and the recommendation: speed-up, efficiency, shares of a step, which setting to take."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TypeGuard

from lockstep.tools.scaling.formatting import seconds
from lockstep.tools.scaling.results import CurvePoint, ScalingSetting, SettingFailure, SettingResult

__all__ = ["ScalingRow", "ScalingTable", "Shares", "choose", "recommend", "shares_of", "table_of", "value_at"]


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


TOLERANCE = 0.005  # of a metric that grows; of one that shrinks, RELATIVE of the best
RELATIVE = 0.02
_UNSTEADY = 0.25  # spread of a row from which its figures say little
_WORTH = 0.05  # share of an epoch below which more devices are not worth their while
_NAMES = {"compute": "compute", "communication": "communication", "input": "getting batches", "host": "the host's work"}


def choose(table: ScalingTable) -> ScalingRow | None:
    """The fastest of those whose metric after equal rows is within a tolerance of the best; fewer devices if about as fast."""
    rows = [row for row in table.rows if row.setting.devices]
    good = [row for row in rows if _is_near(row, table)] or rows
    if not good:
        return None
    fastest = min(row.epoch for row in good)
    return min(
        (row for row in good if row.epoch <= fastest * (1 + _WORTH)), key=lambda row: (row.setting.devices, row.epoch)
    )


def _is_near(row: ScalingRow, table: ScalingTable) -> bool:
    best = _best(table)
    if best is None or row.at_rows is None:
        return best is None
    return abs(row.at_rows - best) <= _tolerance(best, table)


def _best(table: ScalingTable) -> float | None:
    values = [row.at_rows for row in table.rows if row.setting.devices and _is_known(row.at_rows)]
    return (max if table.is_higher_better else min)(values, default=None)


def _is_known(value: float | None) -> TypeGuard[float]:
    """Whether a metric is a number; that of a training that has diverged is none."""
    return value is not None and math.isfinite(value)


def _tolerance(best: float, table: ScalingTable) -> float:
    return TOLERANCE if table.is_higher_better else RELATIVE * abs(best)


def recommend(table: ScalingTable) -> list[str]:
    """Sentences: what to take, why, and what more devices, other batches and the strategy itself would do."""
    chosen = choose(table)
    if chosen is None:
        return ["No setting could be measured; the reasons are in the table."]
    return [
        _take(chosen, table),
        *_devices(chosen, table.rows),
        *_time(chosen, table),
        *_waste(chosen),
        *_overhead(table.rows),
        *_unsteady(table.rows),
    ]


def _take(chosen: ScalingRow, table: ScalingTable) -> str:
    text = f"Take {chosen.setting.name}: {seconds(chosen.epoch)} an epoch, {chosen.rows_per_second:,.0f} rows/s"
    best = _best(table)
    if best is None or chosen.at_rows is None:
        return f"{text}, the fastest. What it does to accuracy is not known."
    left_out = [
        row for row in table.rows if row.setting.devices and not _is_near(row, table) and row.epoch < chosen.epoch
    ]
    reason = (
        f"{text}, the fastest of those whose {table.metric} after {table.equal_rows:,} rows is within "
        f"{_tolerance(best, table):.3g} of the best ({chosen.at_rows:.4g}; best {best:.4g})."
    )
    if not left_out:
        return reason
    faster = min(left_out, key=lambda row: row.epoch)
    return (
        f"{reason} Faster, but not as good after as many rows: {faster.setting.name} ({seconds(faster.epoch)} an epoch, "
        f"{table.metric} {faster.at_rows:.4g})."
    )


def _devices(chosen: ScalingRow, rows: Sequence[ScalingRow]) -> list[str]:
    """One device against the most, at the batch that was chosen."""
    same = [row for row in rows if row.setting.batch == chosen.setting.batch and row.setting.devices]
    one = next((row for row in same if row.setting.devices == 1), None)
    most = max(same, key=lambda row: row.setting.devices)
    if one is None or most is one:
        return []
    ratio = one.epoch / most.epoch
    unsure = (
        ""
        if abs(ratio - 1) > one.spread + most.spread
        else " That is within the spread of the blocks: measure on a quiet machine."
    )
    if ratio > 1:
        text = f"{most.setting.devices} devices are {ratio:.2f} times as fast as one at this batch"
        return [f"{text}, {ratio / most.setting.devices:.0%} of what they could be: {_where_it_goes(most)}.{unsure}"]
    text = f"{most.setting.devices} devices are slower than one at this batch ({1 / ratio:.2f} times the time)"
    return [f"{text}: {_where_it_goes(most)}.{unsure}{_about_compute(one, most)}"]


def _where_it_goes(row: ScalingRow) -> str:
    parts = [(name, seconds / row.step) for name, seconds in asdict(row.shares).items() if name != "compute"]
    told = [
        f"{share:.0%} of a step is {_NAMES[name]}"
        for name, share in sorted(parts, key=lambda part: -part[1])
        if share >= 0.05
    ]
    return ", ".join(told) or f"{row.shares.compute / row.step:.0%} of a step is compute"


def _about_compute(one: ScalingRow, most: ScalingRow) -> str:
    if most.measured.platform != "cpu" or most.shares.compute < one.shares.compute:
        return ""
    return " Its compute takes no less time either: logical CPU devices share the cores that one device uses already."


def _time(chosen: ScalingRow, table: ScalingTable) -> list[str]:
    """Which is furthest after equal time, if that is another."""
    known = [row for row in table.rows if row.setting.devices and _is_known(row.at_time)]
    if not known or not _is_known(chosen.at_time):
        return []
    furthest = (max if table.is_higher_better else min)(known, key=lambda row: row.at_time or 0.0)
    if furthest is chosen or abs((furthest.at_time or 0) - chosen.at_time) <= _tolerance(chosen.at_time, table):
        return []
    return [
        f"After equal time ({seconds(table.equal_seconds)} of training) {furthest.setting.name} is further: {table.metric} "
        f"{furthest.at_time:.4g} against {chosen.at_time:.4g}. A larger batch makes fewer updates; a larger learning rate with warm-up "
        "may make up for it."
    ]


def _waste(chosen: ScalingRow) -> list[str]:
    share = chosen.shares.input / chosen.step
    if share < 0.2:
        return []
    return [
        f"{share:.0%} of its time goes into getting batches: do less for each, read with several workers, or cache "
        "(lockstep.InputOptions)."
    ]


def _overhead(rows: Sequence[ScalingRow]) -> list[str]:
    plain = {row.setting.batch: row for row in rows if not row.setting.devices}
    both = [(plain[row.setting.batch], row) for row in rows if row.setting.devices == 1 and row.setting.batch in plain]
    if not both:
        return []
    before, under = min(both, key=lambda pair: pair[0].step)
    return [
        f"At batch {under.setting.batch} a step takes {seconds(before.step)} in plain Keras and {seconds(under.step)} under a strategy on one "
        "device."
    ]


def _unsteady(rows: Sequence[ScalingRow]) -> list[str]:
    found = [row for row in rows if row.spread > _UNSTEADY]
    if not found:
        return []
    worst = max(found, key=lambda row: row.spread)
    return [
        f"{len(found)} of {len(rows)} settings spread by more than {_UNSTEADY:.0%} from block to block ({worst.setting.name}: ±{worst.spread:.0%}): the "
        "machine had other work, or the steps are too few. Measure again on a quiet one, or with more epochs."
    ]
