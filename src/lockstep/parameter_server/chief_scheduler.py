"""What the chief does in a loop of one's own: it hands out functions by number, adds up what has changed, and decides at each point."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ScopeError
from lockstep.distributed.control.failures import summary_of
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.function_runner import number_of_push
from lockstep.parameter_server.process_context import ProcessContext
from lockstep.parameter_server.result_codec import VALUE, decoded, encoded
from lockstep.parameter_server.scheduler_base import Arguments, Outcome, SchedulerBase, TrainingModels, weights_of
from lockstep.parameter_server.state_sync import StateSync, differs
from lockstep.parameter_server.tasks.task_dispatcher import Result, TaskDispatcher
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["ChiefScheduler"]


class ChiefScheduler(SchedulerBase):
    """The chief's.

    Args:
        member: this process.
        training: the strategy.
        next_call: gives the number of the next call.
        desk: where the others come.
    """

    def __init__(
        self, member: ProcessContext, training: TrainingModels, next_call: Callable[[], int], desk: TaskDispatcher
    ) -> None:
        super().__init__(member, training, next_call)
        self._desk, self._lock = desk, threading.Lock()
        self._client: VariableClient | None = None

    def _begin(self, model: keras.Model, call: int) -> None:
        self._desk.open(call, self._newest)
        try:
            plan = self._member.plan_for(model)
            self._client = self._member.go_to_servers(plan, call)
            self._exchange = StateSync(model, self._desk, plan, self._client)
        except BaseException as error:
            self._desk.abort(f"the chief cannot begin a loop: {summary_of(error)}")
            raise
        self._model, self._settled = model, 0
        self._error: Exception | None = None
        self._variables = [list(kind) for kind in variables_of(model)[:3]]
        self._given = self._values()
        self._spread([True, True, True])

    def _end(self) -> None:
        try:
            if not self._desk.has_failed:
                self._settle()
                self._desk.close({}, weights_of(self._model))
        finally:
            if self._client is not None:
                self._client.close()

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> Outcome:
        """See :class:`SchedulerBase`."""
        self.begin()
        self._spread_changes()
        outcome: Outcome = Outcome()
        about = {"state": self._exchange.states}
        self._desk.schedule(about, when_done=lambda found: self._add(found.exception(), found, outcome))
        self._scheduled += 1
        return outcome

    def join(self) -> None:
        """See :class:`SchedulerBase`."""
        if self.is_open:
            self._settle()
            self._desk.tell_point({}, weights=weights_of(self._model))

    def done(self) -> bool:
        """See :class:`SchedulerBase`; waits for a moment before it says no, for a loop that only asks."""
        if not self.is_open:
            return True
        asked: list[None] = []

        def is_enough() -> bool:
            asked.append(None)
            return self._desk.is_idle or len(asked) > 1

        self._desk.wait(is_enough)
        found = self._desk.is_idle
        self._desk.tell_point({"value": found})
        return found

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """See :class:`SchedulerBase`."""
        self.begin()
        own = [outcome for outcome in outcomes if outcome is not None]
        self._desk.wait(lambda: all(outcome.done() for outcome in own))
        found = [decoded(outcome.result()) for outcome in own]
        self._desk.tell_point({}, encoded(found, "fetch"))
        return found

    def evaluated(self, proceed: Callable[[], Any]) -> Any:
        """See :class:`SchedulerBase`."""
        try:
            found = proceed()
        except Exception as error:
            self._desk.tell_point({"error": summary_of(error)})
            raise
        self._desk.tell_point({}, encoded(found, "evaluate"))
        return found

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """Not here."""
        raise ScopeError(
            "strategy.pull is for scheduled functions; the chief's model has the newest values after join()."
        )

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Not here."""
        raise ScopeError("strategy.push is for scheduled functions: see lockstep.ClusterCoordinator.")

    def _add(self, error: BaseException | None, found: Any, outcome: Outcome) -> None:
        """A function is done; in the thread of whoever has brought that, before it takes another one."""
        if error is not None:
            outcome.set_exception(error)
            return
        result: Result = found.result()
        value = {name: array for name, array in result[1].items() if name.startswith(VALUE)}
        try:
            with self._lock:
                self._exchange.totals.add([result[1]], [1.0], frozenset())
        except Exception as wrong:  # The thread is not the one that waits.
            self._error = wrong
            outcome.set_exception(wrong)
        else:
            outcome.set_result(value)

    def _newest(self) -> Mapping[str, np.ndarray]:
        with self._lock:
            return self._exchange.totals.newest()

    def _values(self) -> list[list[Any]]:
        return [[variable.value for variable in kind] for kind in self._variables]

    def _spread_changes(self) -> None:
        """What the script has changed in the model since that got its values last goes to servers and workers."""
        now = self._values()
        if any(differs(new, old) for new, old in zip(now, self._given, strict=True)):
            self._settle()
        else:
            self._given = now

    def _settle(self) -> None:
        """Everything is done: the model gets the newest values, but where the script has changed it, and that goes to all."""
        self._desk.join()
        if self._error is not None:
            raise self._error
        now, given = self._values(), self._given
        newest = self._exchange.newest()[:3] if self._settled < self._scheduled else given
        self._settled = self._scheduled
        changed = [differs(new, old) for new, old in zip(now, given, strict=True)]
        self._given = [
            [new if differs([new], [old]) else last for new, old, last in zip(*kinds, strict=True)]
            for kinds in zip(now, given, newest, strict=True)
        ]
        for kind, values in zip(self._variables, self._given, strict=True):
            for variable, value in zip(kind, values, strict=True):
                variable.assign(value)
        self._given = self._values()
        if any(changed):
            self._spread(changed)

    def _spread(self, changed: Sequence[bool]) -> None:
        state = [*self._values(), []]
        self._exchange.spread([*changed, False], state, self._scheduled, number_of_push(self._scheduled, 0))
