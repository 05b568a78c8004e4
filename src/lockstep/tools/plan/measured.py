"""How far plans were from the truth: steps measured on real devices, kept for later plans."""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from lockstep._errors import OptionError
from lockstep._files import read_file, replace_file
from lockstep.collectives.cost_model import NetworkLink
from lockstep.execution.step_probe import StrategyProbes
from lockstep.tools.plan.compiled_step import StepCompiler, TrainingCall, planned_executor, repeat_row, survey
from lockstep.tools.plan.estimate import estimate
from lockstep.tools.plan.hardware import Accelerator, Target, find_accelerator

FILE = "LOCKSTEP_PLAN_CHECKS"
MOST_BYTES = 1 << 24  # of the file
_STEPS = 20  # that are timed


@dataclass(frozen=True)
class Check:
    """A step that was predicted and measured on devices of this machine.

    Args:
        accelerator: its key.
        devices: their number.
        title: of what was trained.
        strategy: a name in ``STRATEGIES``.
        batch: rows of the global batch.
        dtype: in which the model computes.
        predicted_seconds: None if the time cannot be predicted.
        measured_seconds: median of several steps.
        predicted_memory: bytes on a device.
        measured_memory: the most bytes that a device has held; None if the platform does not report it, or if an earlier step of the
            process needed more.
        date: of the measurement.
    """

    accelerator: str
    devices: int
    title: str
    strategy: str
    batch: int
    dtype: str
    predicted_seconds: float | None
    measured_seconds: float
    predicted_memory: int | None
    measured_memory: int | None
    date: str


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted, the median of the checks of an accelerator.

    Args:
        time: None if no time was predicted.
        memory: None if no memory was measured.
        checks: their number.
        date: of the newest.
    """

    time: float | None
    memory: float | None
    checks: int
    date: str


def checks_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the checks: that of ``LOCKSTEP_PLAN_CHECKS``, or one in the user's state folder."""
    if environ.get(FILE):
        return Path(environ[FILE])
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lockstep" / "plan_checks.json"


def ratios_of(dtype: str) -> dict[str, Ratio]:
    """Return the ratios by accelerator, of checks with this dtype; an unreadable file has none."""
    found: dict[str, list[Check]] = {}
    for check in _read(checks_file()):
        if check.dtype == dtype:
            found.setdefault(check.accelerator, []).append(check)
    return {key: _ratio(checks) for key, checks in found.items()}


def _ratio(checks: Sequence[Check]) -> Ratio:
    times = [one.measured_seconds / one.predicted_seconds for one in checks if one.predicted_seconds]
    sizes = [
        one.measured_memory / one.predicted_memory for one in checks if one.measured_memory and one.predicted_memory
    ]
    time_ratio, memory_ratio = (statistics.median(found) if found else None for found in (times, sizes))
    return Ratio(time_ratio, memory_ratio, len(checks), max(one.date for one in checks))


def keep_checks(checks: Sequence[Check], environ: Mapping[str, str] = os.environ) -> Path:
    """Add checks to the file in place of older ones of the same step, and return its path.

    Raises:
        OptionError: the file cannot be written.
    """
    path = checks_file(environ)
    new = {_key(check): check for check in [*_read(path), *checks]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(check) for check in new.values()], indent=1) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error}. Fix: set {FILE} to a file in a writable folder."
        ) from error
    return path


def _key(check: Check) -> tuple[Any, ...]:
    return check.accelerator, check.devices, check.title, check.strategy, check.batch, check.dtype


def _read(path: Path) -> list[Check]:
    try:
        return [Check(**one) for one in json.loads(read_file(path, MOST_BYTES))]
    except (OSError, ValueError, TypeError):
        return []


def check_steps(
    call: TrainingCall,
    title: str,
    accelerators: Mapping[str, Accelerator],
    strategies: Sequence[str],
    batches: Sequence[int],
    between: NetworkLink,
) -> list[Check]:
    """Predict and measure steps on the devices of this machine; the model does not change.

    Args:
        call: the call of ``fit``.
        title: of what is trained.
        accelerators: by key.
        strategies: names in ``STRATEGIES``.
        batches: global batch sizes.
        between: the link between two machines of GPUs.

    Raises:
        OptionError: the devices are not known.
    """
    devices = jax.local_devices()
    accelerator = find_accelerator(devices[0], accelerators)
    if accelerator is None:
        raise OptionError(
            f"check: no accelerator is known for {devices[0].device_kind!r}. Fix: describe it in a file with --hardware-file."
        )
    target = Target(accelerator, (len(devices),))
    surveyed = survey(call)
    found = []
    for strategy in strategies if len(devices) > 1 else strategies[:1]:
        compiler = StepCompiler(call, target, strategy, devices)
        for batch in batches or (call.batch,):
            step = compiler.compile(batch)
            if step.memory is None:
                continue
            predicted = estimate(step, surveyed, target, strategy, between)
            seconds, memory = _measure(call, devices, strategy, batch)
            found.append(
                Check(
                    accelerator=accelerator.key,
                    devices=len(devices),
                    title=title,
                    strategy=strategy,
                    batch=batch,
                    dtype=surveyed.dtype,
                    predicted_seconds=predicted.seconds if predicted else None,
                    measured_seconds=seconds,
                    predicted_memory=step.memory.total,
                    measured_memory=memory,
                    date=time.strftime("%Y-%m-%d"),
                )
            )
    return found


def _measure(call: TrainingCall, devices: Sequence[jax.Device], strategy: str, batch: int) -> tuple[float, int | None]:
    """Return the seconds of a step, and the most bytes that a device has held, if it has never held so many before."""
    before = _peak(devices[0])
    executor = planned_executor(call, devices, strategy, lambda _: None)
    probe = StrategyProbes(call.model, executor.placement, executor, executor).compile(repeat_row(call.row, batch))
    seconds = probe.seconds(_STEPS)
    peak = _peak(devices[0])
    return seconds, peak if peak > before else None


def _peak(device: jax.Device) -> int:
    """Return the most bytes that a device has held since JAX started; 0 if the platform does not report it."""
    return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
