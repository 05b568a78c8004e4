"""What is looked at when a model's ``fit`` is called, and what is told of it: each finding once a model, in a line."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import keras

from lockstep.data.wait_meter import FitObserver
from lockstep.doctor.checks import ABOUT_BATCHES, ABOUT_THE_CALL, findings_of
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall, RuntimeSettings, caller
from lockstep.doctor.learning_rate_check import FitRecord, about_changed_batch, fitted, rate_of
from lockstep.doctor.settings import is_on

__all__ = ["FitChecks"]


class FitChecks(FitObserver):
    """Looks at calls of ``fit`` with checks that compile nothing and look at a bounded number of values.

    Args:
        setting: where the models train.
        tell: takes a model and a sentence.
    """

    def __init__(self, setting: RuntimeSettings, tell: Callable[[keras.Model, str], None]) -> None:
        self._setting, self._tell = setting, tell
        self._fitted: WeakKeyDictionary[keras.Model, FitRecord] = WeakKeyDictionary()
        self._told: WeakKeyDictionary[keras.Model, set[str]] = WeakKeyDictionary()

    def called(
        self, model: keras.Model, data: tuple[Any, Any, Any], arguments: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """See the base class."""
        if not is_on():
            return None
        program = FitCall(model, *data, arguments, self._setting, caller())
        self._look(program, lambda: findings_of(program, ABOUT_THE_CALL))
        rate = rate_of(program)
        if program.rows is not None:
            self._look_at_data(program, rate)
            return None
        return lambda batch: self._look_at_data(of_batch(program, batch), rate)

    def _look_at_data(self, program: FitCall, rate: float | None) -> None:
        now, earlier = fitted(program, rate), self._fitted.get(program.model)
        changed = about_changed_batch(now, earlier, program.at_fit)
        self._look(program, lambda: [*findings_of(program, ABOUT_BATCHES), *changed])
        if now:
            self._fitted[program.model] = now

    def _look(self, program: FitCall, find: Callable[[], Iterable[Finding]]) -> None:
        """Tell what is found; what goes wrong in looking must not end a training that is right."""
        try:
            self._say(program, find())
        except Exception as error:
            self._tell(program.model, f"what is given to fit could not be looked at ({type(error).__name__}: {error})")

    def _say(self, program: FitCall, findings: Iterable[Finding]) -> None:
        told = self._told.setdefault(program.model, set())
        new = [finding for finding in findings if finding.name not in told]
        told.update(finding.name for finding in new)
        for finding in new:
            self._tell(program.model, finding.line)


def of_batch(program: FitCall, batch: Any) -> FitCall:
    """The same program, of which one batch is looked at: ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)`` or x alone."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    x, y, weights = (*parts, None, None)[:3]
    whole = replace(
        program, x=x, y=y, sample_weight=weights, arguments={**program.arguments, "batch_size": sys.maxsize}
    )
    return replace(whole, rows_read=whole.rows)
