"""Compiles all batches of a training step for one target and one strategy, or measures steps, in this process or in a child of it.

Measured steps are kept in a file, from which later plans take how far predictions were from the truth.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from lockstep._atomic_files import read_file, replace_file
from lockstep._errors import LockstepError, OptionError
from lockstep._keras.placeholders import placeholder_variables
from lockstep.collectives.cost_model import NetworkLink
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.doctor.check_lists import call_findings
from lockstep.execution.step_measurement import StrategyProbes
from lockstep.strategies.options import override_devices
from lockstep.tools.doctor_command import fit_call_of
from lockstep.tools.plan.estimate import (
    CompiledStep,
    Memory,
    StepCompiler,
    TrainingCall,
    describe_failure,
    estimate,
    largest_batch,
    last_batch,
    planned_executor,
    repeat_row,
    survey,
)
from lockstep.tools.plan.hardware import Accelerator, Target, find_accelerator, known_accelerators
from lockstep.tools.scaling.workload import Workload, run_workload
from lockstep.tools.script_runner import FirstFit, read_request

CHECKS_FILE = "LOCKSTEP_PLAN_CHECKS"
_MAX_BYTES = 1 << 24  # of that file
_STEPS = 20  # that are timed


@dataclass(frozen=True)
class Check:
    """A step that was predicted and measured on devices of this machine.

    Args:
        accelerator: its key.
        devices: their number.
        title: title of what was trained.
        strategy: a name in ``STRATEGIES``.
        batch: rows of the global batch.
        dtype: in which the model computes.
        predicted_seconds: None if the time cannot be predicted.
        measured_seconds: median of several steps.
        predicted_memory: bytes on a device.
        measured_memory: the most bytes that a device has held; None if the platform does not report it, or if an earlier step of the
            process needed more.
        date: date of the measurement.
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
        date: date of the newest.
    """

    time: float | None
    memory: float | None
    checks: int
    date: str


@dataclass(frozen=True)
class TargetResult:
    """What was compiled for one target and one strategy.

    Args:
        target: its name.
        strategy: a name in ``STRATEGIES``.
        steps: in the order in which they were compiled.
        largest: the largest batch that fits, or 0, and the smallest that does not, or None; None: it was not searched.
        notes: sentences about the model.
        failure: why there are no more steps; "" if all were compiled.
    """

    target: str
    strategy: str
    steps: tuple[CompiledStep, ...] = ()
    largest: tuple[int, int | None] | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""

    def step_of(self, rows: int | None) -> CompiledStep | None:
        """Return the step for a batch of so many rows; None: it was not compiled."""
        return next((step for step in self.steps if step.rows == rows), None)


def compile_target(
    call: TrainingCall,
    target: Target,
    strategy: str,
    batches: Sequence[int],
    *,
    is_search: bool,
    report: Callable[[TargetResult], None] = lambda result: None,
) -> TargetResult:
    """Compile the steps of one target and one strategy.

    Args:
        call: the call of ``fit``.
        target: the devices.
        strategy: a name in ``STRATEGIES``.
        batches: global batch sizes; the last batch of an epoch is compiled, too, if it has fewer rows.
        is_search: whether to search the largest batch that fits, and what grows with the rows.
        report: called with the result so far after each step.
    """
    result = TargetResult(target.name, strategy)
    try:
        compiler = StepCompiler(call, target, strategy)
    except LockstepError as error:
        return replace(result, failure=str(error))
    if compiler.refusal:
        return replace(result, notes=tuple(compiler.notes), failure=compiler.refusal)

    def compile_step(rows: int) -> CompiledStep:
        nonlocal result
        step = result.step_of(rows) or compiler.compile(rows)
        if step not in result.steps:
            result = replace(result, steps=(*result.steps, step), notes=tuple(compiler.notes))
            report(result)
        return step

    lasts = [rows for batch in batches if (rows := last_batch(call.rows, batch)) is not None]
    for rows in dict.fromkeys([*batches, *lasts]):
        step = compile_step(rows)
        if step.failure and rows == batches[0]:  # The other batches would fail as well.
            return replace(result, failure=step.failure)
    usable = target.usable_memory
    if is_search and usable is not None:
        compile_step(target.count)  # One row a device: what does not grow with the rows.
        found = largest_batch(list(result.steps), compile_step, usable, target.count)
        result = replace(result, largest=found)
    return result


def main(arguments: Sequence[str]) -> None:
    """Survey the call of ``fit`` in the request, compile or measure its steps, and write the result: the entry point of the child."""
    request, write = read_request(arguments)
    target = target_from_json(request["target"]) if "target" in request else None
    reserve_devices(target.count if target and target.accelerator.platform == "cpu" else 1)

    def on_fit(first: FirstFit) -> None:
        if request["ask"] == "survey":
            write(_surveyed(first))
            return
        call = TrainingCall.of_fit(first.model, first.args, first.kwargs)
        batches = request["batches"] or [call.batch]
        if target is None:
            checks, failures = _checked(call, request)
            write({"checks": [asdict(check) for check in checks], "failures": failures})
            return
        options = {"is_search": request["is_search"], "report": lambda result: write(asdict(result))}
        write(asdict(compile_target(call, target, request["strategy"], batches, **options)))

    def finish(error: Exception | None) -> int:
        if error is not None:
            write({"failure": describe_failure(error)})
        return 0

    values = contextlib.nullcontext() if request["ask"] == "check" else placeholder_variables()
    try:
        with override_devices(1, is_alone=True), values:
            run_workload(Workload(**request["workload"]), on_fit, finish)
    except Exception as error:  # of the script, of any type
        finish(error)


def _surveyed(first: FirstFit) -> dict[str, Any]:
    """Return the findings of the doctor, and the survey or why there is none."""
    checked = fit_call_of(first)
    found = call_findings(checked)
    try:
        call = TrainingCall.of_fit(first.model, first.args, first.kwargs)
        found = call_findings(checked, call.first)
        answer: dict[str, Any] = {"survey": asdict(survey(call))}
    except Exception as error:  # A step fails: the doctor's findings may say why.
        answer = {"failure": f"fit of {first.where} fails: {describe_failure(error)}"}
    return {**answer, "findings": [finding.line for finding in found]}


def _checked(call: TrainingCall, request: dict[str, Any]) -> tuple[list[Check], list[str]]:
    title, file = Path(request["workload"]["path"]).name, request["hardware_file"]
    between = NetworkLink(**request["between"])
    return check_steps(
        call, title, known_accelerators(file and Path(file)), request["strategies"], request["batches"], between
    )


def target_from_json(values: dict[str, Any]) -> Target:
    """Convert values of JSON to a target."""
    own = values["accelerator"]
    return Target(Accelerator(**{**own, "kinds": tuple(own["kinds"])}), tuple(values["axes"]))


def result_from_json(values: dict[str, Any]) -> TargetResult:
    """Convert values of JSON to a result."""
    steps = []
    for one in values["steps"]:
        memory = Memory(**one["memory"]) if one["memory"] else None
        exchanged = tuple((*kind, group and tuple(group)) for *kind, group in one["collectives"])
        steps.append(CompiledStep(**{**one, "memory": memory, "collectives": exchanged}))
    largest = tuple(values["largest"]) if values["largest"] else None
    return TargetResult(**{**values, "steps": tuple(steps), "notes": tuple(values["notes"]), "largest": largest})


def checks_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the checks: that of ``LOCKSTEP_PLAN_CHECKS``, or one in the user's state folder."""
    if environ.get(CHECKS_FILE):
        return Path(environ[CHECKS_FILE])
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lockstep" / "plan_checks.json"


def ratios_of(dtype: str) -> dict[str, Ratio]:
    """Return the ratios by accelerator, of checks with this dtype; an unreadable file has none."""
    found: dict[str, list[Check]] = {}
    try:
        entries = _entries(checks_file())
    except (OSError, OptionError):
        entries = []
    for check in _checks_of(entries):
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

    Entries that are not of this version stay as they are.

    Raises:
        OptionError: the file cannot be read or written, or is no list of checks.
    """
    path = checks_file(environ)
    try:
        entries = _entries(path)
        others = [one for one in entries if _check_of(one) is None]
        new = {_key(check): check for check in [*_checks_of(entries), *checks]}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([*others, *(asdict(check) for check in new.values())], indent=1) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written: {error}. Fix: set {CHECKS_FILE} to a file in a writable folder."
        ) from error
    return path


def _key(check: Check) -> tuple[Any, ...]:
    return check.accelerator, check.devices, check.title, check.strategy, check.batch, check.dtype


def _entries(path: Path) -> list[Any]:
    """Return what the file of the checks lists, also entries of other versions; nothing if there is no file.

    Raises:
        OSError: it cannot be read.
        OptionError: it is no list in JSON.
    """
    try:
        found = json.loads(read_file(path, _MAX_BYTES) or b"[]")
    except FileNotFoundError:
        return []
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise OptionError(f"{path}: is no list of checks. Fix: set {CHECKS_FILE} to another file, or remove this one.")
    return found


def _checks_of(entries: Sequence[Any]) -> list[Check]:
    return [check for one in entries if (check := _check_of(one)) is not None]


def _check_of(entry: Any) -> Check | None:
    """Return an entry as a check; None if this version has no such checks."""
    try:
        return Check(**entry)
    except TypeError:
        return None


def check_steps(
    call: TrainingCall,
    title: str,
    accelerators: Mapping[str, Accelerator],
    strategies: Sequence[str],
    batches: Sequence[int],
    between: NetworkLink,
) -> tuple[list[Check], list[str]]:
    """Predict and measure steps of some strategies and global batch sizes on the devices of this machine; the model does not change.

    Returns:
        The checks, and a line for each strategy or batch that could not be measured.

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
    surveyed, checks, failures = survey(call), list[Check](), list[str]()
    for strategy in strategies if len(devices) > 1 else strategies[:1]:
        where = f"{len(devices)} × {accelerator.key}, {strategy}"
        try:
            compiler = StepCompiler(call, target, strategy, devices)
        except _FAILURES as error:
            failures.append(f"{where}: {describe_failure(error)}")
            continue
        if compiler.refusal:
            failures.append(f"{where}: {compiler.refusal}")
            continue
        for batch in batches or (call.batch,):
            step = compiler.compile(batch)
            measured = _measure(call, devices, strategy, batch) if step.memory else step.failure or "does not fit"
            if isinstance(measured, str):
                failures.append(f"{where}, batch {batch:,}: {measured}")
                continue
            predicted = estimate(step, surveyed, target, strategy, between)
            checks.append(
                Check(
                    accelerator=accelerator.key,
                    devices=len(devices),
                    title=title,
                    strategy=strategy,
                    batch=batch,
                    dtype=surveyed.dtype,
                    predicted_seconds=predicted.seconds if predicted else None,
                    measured_seconds=measured[0],
                    predicted_memory=step.needed,
                    measured_memory=measured[1],
                    date=time.strftime("%Y-%m-%d"),
                )
            )
    return checks, failures


_FAILURES = (LockstepError, jax.errors.JaxRuntimeError)  # of one strategy or batch; the others are measured


def _measure(
    call: TrainingCall, devices: Sequence[jax.Device], strategy: str, batch: int
) -> tuple[float, int | None] | str:
    """Return the seconds of a step, and the most bytes that a device has held, if it has never held so many before; or why it failed."""
    before = _peak(devices[0])
    executor = planned_executor(call, devices, strategy, lambda _: None)
    try:
        probe = StrategyProbes(call.model, executor.placement, executor, executor).compile(repeat_row(call.row, batch))
        seconds, _ = probe.run(_STEPS)
    except _FAILURES as error:
        return describe_failure(error)
    peak = _peak(devices[0])
    return seconds, peak if peak > before else None


def _peak(device: jax.Device) -> int:
    """Return the most bytes that a device has held since JAX started; 0 if the platform does not report it."""
    return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))


if __name__ == "__main__":
    main(sys.argv[1:])
