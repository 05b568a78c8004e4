"""The checks that run at each call of ``fit``; their findings are logged in one line each."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import keras

from lockstep.data.fit_entry import FitObserver
from lockstep.doctor.data_checks import (
    FitRecord,
    check_changed_batch,
    check_few_rows,
    check_finite_inputs,
    check_normalization,
    fit_record,
    learning_rate_of,
)
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall, RuntimeSettings, calling_location
from lockstep.doctor.loss_checks import (
    check_finite_labels,
    check_label_format,
    check_label_range,
    check_logits,
    check_loss_scale,
)
from lockstep.doctor.pipeline_checks import check_cached_order, check_tf_data_order
from lockstep.doctor.settings import doctor_enabled

__all__ = ["BATCH_CHECKS", "CALL_CHECKS", "FitChecks", "run_checks", "with_batch"]

Check = Callable[[FitCall], Iterable[Finding]]

# Checks of the data, in the order of the findings: wrong results before slow ones. If the data are not in memory, they get the
# first batch. A check must cost little and change nothing.
BATCH_CHECKS: tuple[Check, ...] = (
    check_label_format,  # First, as Keras raises an error about shapes in this case.
    check_finite_labels,  # NaN reaches all weights in one step.
    check_finite_inputs,
    check_label_range,
    check_few_rows,
    check_normalization,
)

# Checks of the call alone.
CALL_CHECKS: tuple[Check, ...] = (
    check_logits,  # First: wrong in every step, without an error.
    check_loss_scale,
    check_tf_data_order,
    check_cached_order,
)


def run_checks(call: FitCall, checks: Iterable[Check]) -> list[Finding]:
    """Return the findings of the checks, in their order."""
    return [finding for check in checks for finding in check(call)]


class FitChecks(FitObserver):
    """Checks each call of ``fit`` and logs each finding once for a model; compiles nothing and reads a bounded number of values.

    Args:
        settings: of the run.
        log: is called with a model and a sentence.
    """

    def __init__(self, settings: RuntimeSettings, log: Callable[[keras.Model, str], None]) -> None:
        self._settings, self._log = settings, log
        self._records: WeakKeyDictionary[keras.Model, FitRecord] = WeakKeyDictionary()  # of the latest calls
        self._logged: WeakKeyDictionary[keras.Model, set[str]] = WeakKeyDictionary()  # names of findings

    def observe_fit(
        self, model: keras.Model, data: tuple[Any, Any, Any], arguments: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """See the base class."""
        if not doctor_enabled():
            return None
        call = FitCall(model, *data, arguments, self._settings, calling_location())
        self._check(call, lambda: run_checks(call, CALL_CHECKS))
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
            self._log_new(call, find())
        except Exception as error:
            self._log(call.model, f"the checks of this fit failed ({type(error).__name__}: {error})")

    def _log_new(self, call: FitCall, findings: Iterable[Finding]) -> None:
        logged = self._logged.setdefault(call.model, set())
        new = [finding for finding in findings if finding.name not in logged]
        logged.update(finding.name for finding in new)
        for finding in new:
            self._log(call.model, finding.line)


def with_batch(call: FitCall, batch: Any) -> FitCall:
    """Return the call with one batch as its data: ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)`` or x alone."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    x, y, weights = (*parts, None, None)[:3]
    whole = replace(call, x=x, y=y, sample_weight=weights, arguments={**call.arguments, "batch_size": sys.maxsize})
    return replace(whole, rows_read=whole.rows)
