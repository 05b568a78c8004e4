"""The lists of checks: those of each ``fit``, and all of them for ``lockstep doctor`` and ``strategy.doctor``.

A new check is a function in one of the ``*_checks.py`` files and a line in a list here.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import keras

from lockstep._errors import ModelError, summary_of
from lockstep.data.fit_wrapper import FitWrapper
from lockstep.devices.host_memory import size_text
from lockstep.doctor.base import Finding, FitCall, Report, RuntimeSettings, calling_location, doctor_enabled
from lockstep.doctor.data_checks import (
    FitRecord,
    ProbedBatches,
    check_cached_order,
    check_changed_batch,
    check_few_rows,
    check_finite_inputs,
    check_input_speed,
    check_loss_is_finite,
    check_normalization,
    check_tf_data_order,
    fit_record,
    is_cached,
    learning_rate_of,
    measure_steps,
    read_batches,
    waiting_share,
)
from lockstep.doctor.environment_checks import (
    bytes_of_data,
    check_allocator,
    check_cores,
    check_layout,
    check_memory,
    check_thread_pool_size,
    check_versions,
    minimum_bytes,
)
from lockstep.doctor.loss_checks import (
    check_finite_labels,
    check_finite_sample_weights,
    check_label_format,
    check_label_range,
    check_logits,
    check_loss_scale,
    check_training_arguments,
)
from lockstep.execution.step_functions import StepFunctions

Check = Callable[[FitCall], Iterable[Finding]]

# Checks of the data, in the order of the findings: wrong results before slow ones. If the data are not in memory, they get the
# first batch. A check must cost little and change nothing.
BATCH_CHECKS: tuple[Check, ...] = (
    check_label_format,  # First, as Keras raises an error about shapes in this case.
    check_finite_labels,  # NaN reaches all weights in one step.
    check_finite_sample_weights,
    check_finite_inputs,
    check_label_range,
    check_few_rows,
    check_normalization,
)

# Checks of the validation data, if they are in memory; the others are about training.
VALIDATION_CHECKS: tuple[Check, ...] = (check_label_format, check_label_range)

# Checks of the call alone.
CALL_CHECKS: tuple[Check, ...] = (
    check_logits,  # First: wrong in every step, without an error.
    check_layout,
    check_loss_scale,
    check_training_arguments,
    check_tf_data_order,
    check_cached_order,
)


def run_checks(call: FitCall, checks: Iterable[Check]) -> list[Finding]:
    """Return the findings of the checks, in their order."""
    return [finding for check in checks for finding in check(call)]


def validation_findings(call: FitCall) -> list[Finding]:
    """Return the findings about the validation data, if they are ``(x, y)`` or ``(x, y, sample_weight)``."""
    data = call.arguments.get("validation_data")
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        return []
    x, y, weights = (*data, None)[:3]
    return run_checks(
        replace(call, x=x, y=y, sample_weight=weights, arguments={}, is_validation=True), VALIDATION_CHECKS
    )


class FitChecks:
    """Checks each call of ``fit`` and logs each finding once for a model; compiles nothing and reads a bounded number of values."""

    def __init__(self, settings: RuntimeSettings, log: Callable[[keras.Model, str], None]) -> None:
        self._settings, self._log = settings, log
        self._records: WeakKeyDictionary[keras.Model, FitRecord] = WeakKeyDictionary()  # of the latest calls
        self._logged: WeakKeyDictionary[keras.Model, set[str]] = WeakKeyDictionary()  # names of findings

    def observe_fit(
        self, model: keras.Model, data: tuple[Any, Any, Any], arguments: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """Check a call of ``fit``.

        Returns:
            A function to call with the first batch on the host, or None.
        """
        if not (doctor_enabled() and model.compiled):
            return None
        call = FitCall(model, *data, arguments, self._settings, calling_location())
        self._check(call, lambda: run_checks(call, CALL_CHECKS) + validation_findings(call))
        rate = learning_rate_of(call)
        if call.rows is not None:
            self._check_data(call, rate)
            return None
        return lambda batch: self._check_data(with_batch(call, batch), rate)

    def _check_data(self, call: FitCall, rate: float | None) -> None:
        now, earlier = fit_record(call, rate), self._records.get(call.model)
        changed = check_changed_batch(now, earlier, call.at_fit)
        self._check(call, lambda: [*run_checks(call, BATCH_CHECKS), *changed])
        if now:
            self._records[call.model] = now

    def _check(self, call: FitCall, find: Callable[[], Iterable[Finding]]) -> None:
        """Log the new findings of ``find``; an error in a check is logged and must not end the training."""
        try:
            logged = self._logged.setdefault(call.model, set())
            new = [finding for finding in find() if finding.name not in logged]
            logged.update(finding.name for finding in new)
            for finding in new:
                self._log(call.model, finding.line)
        except Exception as error:
            self._log(call.model, f"the checks of this fit failed ({type(error).__name__}: {error})")


def with_batch(call: FitCall, batch: Any) -> FitCall:
    """Return the call with one batch as its data: ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)`` or x alone."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    x, y, weights = (*parts, None, None)[:3]
    whole = replace(call, x=x, y=y, sample_weight=weights, arguments={**call.arguments, "batch_size": sys.maxsize})
    return replace(whole, rows_read=whole.rows, is_only_batch=_count_batches(call.x) == 1)


def _count_batches(data: Any) -> int | None:
    """Return the number of batches of an input that tells it; else None."""
    try:
        return data.num_batches if isinstance(data, keras.utils.PyDataset) else len(data)
    except Exception:  # of any type: a generator has no length, and an input may not know it
        return None


def call_findings(call: FitCall, first: Any = None) -> list[Finding]:
    """Return the findings about a call of ``fit``, its data and its first batch, if that is known, without running a step."""
    call = replace(call, max_values=_MAX_VALUES)
    data = call if call.rows is not None or first is None else with_batch(call, first)
    return run_checks(call, CALL_CHECKS) + run_checks(data, BATCH_CHECKS) + validation_findings(call)


# Not at each fit, as strategies refuse the worst settings when they are made. These checks also read the environment.
PROCESS_CHECKS: tuple[Callable[[FitCall, Mapping[str, str]], Iterable[Finding]], ...] = (
    check_versions,  # First, as other findings may follow from it.
    check_thread_pool_size,  # The process would hang.
    check_allocator,
    check_cores,
)
_MAX_VALUES = 200_000_000  # of an array that are checked: some seconds
_OPTIONS = ("batch_size", "shuffle", "class_weight", "steps_per_epoch")


def examine(call: FitCall, functions: StepFunctions, fit_wrapper: FitWrapper, environ: Mapping[str, str]) -> Report:
    """Check a call of ``fit``, and run some training steps on a copy of the model's state.

    Raises:
        ModelError: the model is not compiled.
    """
    model = call.model
    if not model.compiled:
        raise ModelError(f"doctor: model {model.name!r} is not compiled. Fix: compile it first.")
    data = call.x, call.y, call.sample_weight
    options = {name: call.arguments.get(name) for name in _OPTIONS}
    batches = read_batches(fit_wrapper.open_preview(model, data, **options))
    found = call_findings(call, batches.batches[0] if batches.batches else None)
    try:
        of_steps, lines, left_out = _check_steps(call, functions, batches)
    except Exception as error:
        if not found:
            raise
        reason = f"training steps: the first one fails: {summary_of(error).splitlines()[0]}"
        of_steps, lines, left_out = [], [], [reason]
    found += of_steps + [finding for check in PROCESS_CHECKS for finding in check(call, environ)]
    return Report(tuple(found), (*_describe_checked(call, batches), *lines), tuple(left_out))


def _describe_checked(call: FitCall, batches: ProbedBatches) -> list[str]:
    settings, model = call.settings, call.model
    where = f"replicas: {settings.replicas}, devices: {len(settings.devices)}, processes: {settings.processes}"
    rows = "its arrays" if call.rows is not None else f"{len(batches.batches)} batches of {batches.name}"
    return [
        f"model {model.name!r}, its loss and optimizer; {where}",
        f"{rows}, {size_text(bytes_of_data((call.x, call.y)))} in memory",
        "versions, settings of the process",
    ]


def _check_steps(
    call: FitCall, functions: StepFunctions, batches: ProbedBatches
) -> tuple[list[Finding], list[str], list[str]]:
    """Return findings of training steps, what was checked, and what was left out."""
    if not batches.batches or not (call.model.built or call.may_build):
        unbuilt = "the model has no weights yet: begin it with keras.Input"
        reason = unbuilt if batches.batches else "the input has no batch"
        return list(check_memory(call)), [], [f"steps, their memory and their wait for data: {reason}"]
    steps = measure_steps(functions, batches)
    size = (batches.batches_per_pass or 0, bytes_of_data(batches.batches[0]))
    found = list(check_loss_is_finite(steps, call.at_fit))
    if not is_cached(call):
        found += check_input_speed(batches, steps, call.at_fit)
    found += check_memory(call, steps.bytes, size)
    timed = f"training steps on a copy of the state: {1000 * steps.seconds:.2f} ms each"
    if batches.seconds is not None:
        timed += (
            f", {1000 * batches.seconds:.2f} ms to read a batch; "
            f"{100 * waiting_share(batches, steps):.0f} % of the time would be spent waiting for data"
        )
    memory = steps.bytes or minimum_bytes(call)
    what = "a step" if steps.bytes else "weights, gradients and optimizer (JAX does not say what a step needs)"
    return found, [timed, f"memory of {what}: {size_text(memory)} on each device"], []
