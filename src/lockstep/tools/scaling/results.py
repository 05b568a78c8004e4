"""What was asked for, and what one setting gave: plain values, which go through JSON from the process that measured them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep._errors import OptionError, whole_number

__all__ = [
    "AllReduceTiming",
    "Budget",
    "CurvePoint",
    "ScalingSetting",
    "SettingFailure",
    "SettingResult",
    "from_json",
    "settings_of",
    "to_json",
]


@dataclass(frozen=True)
class ScalingSetting:
    """One row of the table.

    Args:
        devices: how many; 0: plain Keras on one device, without a strategy.
        batch: rows of the global batch.
    """

    devices: int
    batch: int

    @property
    def name(self) -> str:
        """As it is shown: ``2 devices, batch 64``."""
        what = "plain Keras" if not self.devices else f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{what}, batch {self.batch}"


@dataclass(frozen=True)
class Budget:
    """How much one setting trains.

    Args:
        epochs: passes over the data.
        rows: of the data that are used at most; None: all.
        limit: seconds that the process of one setting may take.
    """

    epochs: int = 1
    rows: int | None = None
    limit: float = 600.0

    def __post_init__(self) -> None:
        whole_number("epochs", self.epochs)
        if self.rows is not None:
            whole_number("rows", self.rows)
        if not self.limit > 0:
            raise OptionError(f"limit: expected seconds, more than 0, got {self.limit!r}.")


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve.

    Args:
        rows: trained on so far.
        seconds: of training so far, without compiling and evaluating.
        value: of the metric on the validation data.
    """

    rows: int
    seconds: float
    value: float


@dataclass(frozen=True)
class AllReduceTiming:
    """What an all-reduce of one vector took, beyond a program that adds nothing: see ``collectives.cost.Measurement``."""

    algorithm: str
    nbytes: int
    devices: int
    seconds: float


@dataclass(frozen=True)
class SettingResult:
    """What one setting gave.

    Args:
        setting: which.
        has_own_batches: whether the batch is the input's, whatever was asked for.
        rows_per_epoch: that are trained on.
        blocks: seconds a step, of each block of steps.
        bare: seconds of the compiled step on one placed batch, outside Keras's loop.
        taking: seconds a step in which batches were waited for or read; None in plain Keras.
        all_reduce: seconds of an all-reduce of arrays like the gradients.
        gradient_bytes: of those arrays.
        algorithm: name of the formula of :mod:`lockstep.collectives.cost_model` for it.
        links: all-reduces of vectors of several sizes on these devices.
        memory: bytes, the greatest of the process, or of a device if that is an accelerator.
        metric: name of what the curve shows; None where there was no validation data.
        is_higher_better: of the metric.
        curve: of the metric.
        platform: of the devices, such as "cpu".
        notes: what the reader must know.
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
    links: tuple[AllReduceTiming, ...]
    memory: int
    metric: str | None
    is_higher_better: bool
    curve: tuple[CurvePoint, ...]
    platform: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SettingFailure:
    """A setting that gave nothing.

    Args:
        setting: which.
        reason: one sentence.
    """

    setting: ScalingSetting
    reason: str


def settings_of(devices: Sequence[int], batch: Sequence[int], *, with_plain: bool = True) -> list[ScalingSetting]:
    """All settings, in the order in which they are measured: those that are compared stand side by side in time.

    Raises:
        OptionError: a number is out of its range, or none is given.
    """
    for name, numbers in (("devices", devices), ("batch", batch)):
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
            raise OptionError(f"{name}: expected whole numbers such as (1, 2), got {numbers!r}.")
        for number in numbers:
            whole_number(name, number)
    counts = sorted({1, *devices})
    plain = [0] if with_plain else []
    return [ScalingSetting(count, rows) for rows in sorted(set(batch)) for count in (*plain, *counts)]


def to_json(one: SettingResult | SettingFailure) -> dict[str, Any]:
    """As values of JSON."""
    return asdict(one)


def from_json(values: Mapping[str, Any]) -> SettingResult | SettingFailure:
    """The inverse of :func:`to_json`."""
    setting = ScalingSetting(**values["setting"])
    if "reason" in values:
        return SettingFailure(setting, values["reason"])
    made = {
        "setting": setting,
        "curve": tuple(CurvePoint(**point) for point in values["curve"]),
        "links": tuple(AllReduceTiming(**link) for link in values["links"]),
        "blocks": tuple(values["blocks"]),
        "notes": tuple(values["notes"]),
    }
    return SettingResult(**{**values, **made})
