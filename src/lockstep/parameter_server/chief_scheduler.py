"""Chief in a custom training loop: schedules functions as tasks, adds up what they change, and publishes results at sync points."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np

from lockstep._errors import ScopeError
from lockstep.distributed.control.failure_detector import summary_of
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.process_role import ProcessContext
from lockstep.parameter_server.scheduler_base import (
    VALUE,
    Arguments,
    Outcome,
    SchedulerBase,
    TrainingModels,
    decode_result,
    encode_result,
    push_number,
    weights_of,
)
from lockstep.parameter_server.state_sync import StateSync, differs
from lockstep.parameter_server.task_dispatcher import Result, TaskDispatcher
from lockstep.parameter_server.variables.variable_client import VariableClient


class ChiefScheduler(SchedulerBase):
    """Scheduler of the chief.

    Args:
        context: this process.
        training: the strategy.
        next_call: gives the number of the next call.
        dispatcher: assigns functions to workers.
    """

    def __init__(
        self,
        context: ProcessContext,
        training: TrainingModels,
        next_call: Callable[[], int],
        dispatcher: TaskDispatcher,
    ) -> None:
        super().__init__(context, training, next_call)
        self._dispatcher, self._lock = dispatcher, threading.Lock()
        self._client: VariableClient | None = None

    def _begin(self, model: keras.Model, call: int) -> None:
        self._dispatcher.open(call, self._changing_values)
        try:
            plan = self._context.plan_for(model)
            self._client = self._context.connect_to_servers(plan, call)
            self._state_sync = StateSync(model, self._dispatcher, plan, self._client)
        except BaseException as error:
            self._dispatcher.abort(f"the chief cannot begin a loop: {summary_of(error)}")
            raise
        self._model, self._settled = model, 0
        self._error: Exception | None = None
        self._variables = [list(kind) for kind in variables_of(model)[:3]]
        self._known_values = self._values()
        self._broadcast([True, True, True])

    def _end(self) -> None:
        try:
            if not self._dispatcher.has_failed:
                self._settle()
                self._dispatcher.close({}, weights_of(self._model))
        finally:
            if self._client is not None:
                self._client.close()

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> Outcome:
        """See :class:`SchedulerBase`."""
        self.begin()
        self._broadcast_changes()
        outcome: Outcome = Outcome()
        task = {"state": self._state_sync.states, "steps_before": self._state_sync.steps_before}
        self._dispatcher.schedule(task, when_done=lambda result: self._add_result(result, outcome))
        self._scheduled += 1
        return outcome

    def join(self) -> None:
        """See :class:`SchedulerBase`."""
        if self.is_open:
            self._settle()
            self._dispatcher.publish_sync_point({}, weights=weights_of(self._model))

    def done(self) -> bool:
        """See :class:`SchedulerBase`; waits for a moment before it returns False, for a loop that calls nothing else."""
        if not self.is_open:
            return True
        evaluations: list[None] = []

        def is_enough() -> bool:
            evaluations.append(None)
            return self._dispatcher.is_idle or len(evaluations) > 1

        self._dispatcher.wait_until(is_enough)
        found = self._dispatcher.is_idle
        self._dispatcher.publish_sync_point({"value": found})
        return found

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """See :class:`SchedulerBase`."""
        self.begin()
        own = [outcome for outcome in outcomes if outcome is not None]
        self._dispatcher.wait_until(lambda: all(outcome.done() for outcome in own))
        found = [decode_result(outcome.result()) for outcome in own]
        self._dispatcher.publish_sync_point({}, encode_result(found, "fetch"))
        return found

    def evaluate(self, proceed: Callable[[], Any]) -> Any:
        """See :class:`SchedulerBase`."""
        try:
            found = proceed()
        except Exception as error:
            self._dispatcher.publish_sync_point({"error": summary_of(error)})
            raise
        self._dispatcher.publish_sync_point({}, encode_result(found, "evaluate"))
        return found

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """Raise ScopeError: the chief runs no scheduled functions."""
        raise ScopeError(
            "strategy.pull is for scheduled functions; the chief's model has the newest values after join()."
        )

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Raise ScopeError: the chief runs no scheduled functions."""
        raise ScopeError("strategy.push is for scheduled functions: see lockstep.ClusterCoordinator.")

    def _add_result(self, result: "Future[Result]", outcome: Outcome) -> None:
        """Add the result of a function; runs in the thread of the worker's connection, before that worker takes another task."""
        if (error := result.exception()) is not None:
            outcome.set_exception(error)
            return
        arrays = result.result()[1]
        value = {name: array for name, array in arrays.items() if name.startswith(VALUE)}
        try:
            with self._lock:
                self._state_sync.totals.add([arrays], [1.0], frozenset())
        except Exception as wrong:  # Raised later, in the thread of the script.
            self._error = wrong
            outcome.set_exception(wrong)
        else:
            outcome.set_result(value)

    def _changing_values(self) -> Mapping[str, np.ndarray]:
        with self._lock:
            return self._state_sync.totals.changing_values()

    def _values(self) -> list[list[Any]]:
        return [[variable.value for variable in kind] for kind in self._variables]

    def _broadcast_changes(self) -> None:
        """Send what the script has changed in the model to servers and workers."""
        now = self._values()
        if any(differs(new, old) for new, old in zip(now, self._known_values, strict=True)):
            self._settle()
        else:
            self._known_values = now

    def _settle(self) -> None:
        """Wait until all functions are done, and give the model the newest values.

        A variable that the script has changed keeps its value, which is sent to servers and workers.
        """
        self._dispatcher.join()
        if self._error is not None:
            raise self._error
        now, known = self._values(), self._known_values
        newest = self._state_sync.fetch()[:3] if self._settled < self._scheduled else known
        self._settled = self._scheduled
        changed = [differs(new, old) for new, old in zip(now, known, strict=True)]
        merged = [
            [new if differs([new], [old]) else last for new, old, last in zip(*kinds, strict=True)]
            for kinds in zip(now, known, newest, strict=True)
        ]
        for kind, values in zip(self._variables, merged, strict=True):
            for variable, value in zip(kind, values, strict=True):
                variable.assign(value)
        self._known_values = self._values()
        if any(changed):
            self._broadcast(changed)

    def _broadcast(self, changed: Sequence[bool]) -> None:
        state = [*self._values(), []]
        self._state_sync.broadcast([*changed, False], state, self._scheduled, push_number(self._scheduled, 0))
