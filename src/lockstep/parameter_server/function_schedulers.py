"""Schedulers of a custom training loop on the chief, on a worker, and on servers and the evaluator.

The chief schedules functions as tasks, adds up what they change, and publishes results at sync points. Workers, servers and the evaluator run
the same script, and work or wait at its sync points.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from lockstep._errors import (
    PEER_LOST,
    USER_ERROR,
    ClusterError,
    InputError,
    ModelError,
    ScopeError,
    exit_code_of,
    summary_of,
)
from lockstep._keras.trainer import variables_of
from lockstep.data.keras_adapter import KerasInput
from lockstep.execution.replica import StateMerge
from lockstep.parameter_server.cluster_coordinator import resolve_per_worker
from lockstep.parameter_server.function_scheduler_base import (
    VALUE,
    WEIGHTS_DROPPED,
    Arguments,
    Outcome,
    SchedulerBase,
    TrainingModels,
    decode_result,
    encode_result,
    follow_evaluation,
    optimizer_numbers_of,
    push_number,
    set_values,
    state_after_evaluation,
    values_of,
    weights_of,
)
from lockstep.parameter_server.gradient_step import GradientStep, Values, names_of
from lockstep.parameter_server.process_role import ProcessContext
from lockstep.parameter_server.rpc import ArrayServer
from lockstep.parameter_server.state_sync import (
    STATE,
    Additivity,
    FollowedState,
    StateSync,
    StepState,
    add_deltas,
    compute_deltas,
    differs,
    merge_rules,
)
from lockstep.parameter_server.task_client import (
    CallEnded,
    Published,
    StopCondition,
    Task,
    TaskClient,
    run_tasks,
)
from lockstep.parameter_server.task_dispatcher import Result, TaskDispatcher, missing_schedule
from lockstep.parameter_server.variable_client import VariableClient


class ChiefScheduler(SchedulerBase):
    """Scheduler of the chief."""

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
            self._client = self._context.connect_to_servers(plan, call, self._dispatcher.raise_failure)
            self._state_sync = StateSync(model, self._dispatcher, plan, self._client)
        except BaseException as error:
            self._dispatcher.fail_calls(f"the chief cannot begin a loop: {summary_of(error)}", exit_code_of(error))
            raise
        self._model, self._synced = model, 0
        self._error: Exception | None = None
        self._variables = variables_of(model)[:3]
        self._known_values = self._values()
        self._broadcast([True, True, True])

    def _end(self) -> None:
        try:
            if not self._dispatcher.has_failed:
                self._sync_variables()
                self._dispatcher.close({}, values_of(weights_of(self._model) | optimizer_numbers_of(self._model)))
        finally:
            if self._client is not None:
                self._client.close()

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> Outcome:
        self.begin()
        self._broadcast_changes()
        outcome: Outcome = Outcome()
        sync = self._state_sync
        task = {"state": sync.states, "steps_before": sync.steps_before, "optimizer": sync.optimizer_scalars}
        self._dispatcher.schedule(task, when_done=lambda result: self._add_result(result, outcome))
        self._scheduled += 1
        return outcome

    def join(self) -> None:
        if self.is_open:
            self._sync_variables()
            weights, numbers = values_of(weights_of(self._model)), values_of(optimizer_numbers_of(self._model))
            self._dispatcher.publish_sync_point({}, numbers, weights=weights)

    def done(self) -> bool:
        """See :class:`SchedulerBase`; waits for a moment before it returns False, for a loop that calls nothing else."""
        if not self.is_open:
            return True
        evaluations: list[None] = []

        def is_enough() -> bool:
            evaluations.append(None)
            return self._dispatcher.is_idle or len(evaluations) > 1

        self._dispatcher.wait_until(is_enough, is_poll=True)
        found = self._dispatcher.is_idle
        self._dispatcher.publish_sync_point({"value": found})
        return found

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        self.begin()
        own = [outcome for outcome in outcomes if outcome is not None]
        self._dispatcher.wait_until(lambda: all(outcome.done() for outcome in own))
        found = [decode_result(outcome.result()) for outcome in own]
        self._dispatcher.publish_sync_point({}, encode_result(found, "fetch"))
        return found

    def evaluate(self, data: KerasInput, proceed: Callable[[], Any]) -> Any:
        self._sync_variables()
        data.track_state(None)  # Else it does not keep its hooks.
        try:
            found = proceed()
        except Exception as error:
            self._dispatcher.publish_sync_point({"error": summary_of(error)})
            raise
        self._dispatcher.publish_sync_point(state_after_evaluation(data), encode_result(found, "evaluate"))
        return found

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """Raise ScopeError: the chief runs no scheduled functions."""
        raise ScopeError(
            "strategy.pull is for scheduled functions. Fix: read the chief's model, which has the newest values after join()."
        )

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Raise ScopeError: the chief runs no scheduled functions."""
        raise ScopeError("strategy.push is for scheduled functions. Fix: see lockstep.ClusterCoordinator.")

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
            self._sync_variables()
        else:
            self._known_values = now

    def _sync_variables(self) -> None:
        """Wait until all functions are done, and give the model the newest values.

        A variable that the script has changed keeps its value, which is sent to servers and workers.
        """
        self._dispatcher.join()
        if self._error is not None:
            raise self._error
        now, known = self._values(), self._known_values
        newest = self._state_sync.fetch()[:3] if self._synced < self._scheduled else known
        self._synced = self._scheduled
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


class WorkerScheduler(SchedulerBase):
    """Scheduler of a process that is not the chief."""

    def __init__(
        self, context: ProcessContext, training: TrainingModels, next_call: Callable[[], int], task_client: TaskClient
    ) -> None:
        super().__init__(context, training, next_call)
        self._task_client, self._sync_points = task_client, 0
        self._runner: FunctionRunner | None = None
        self._server: ArrayServer | None = None
        self._result: Published | None = None  # of the call, if the chief has already ended it
        self._functions: dict[int, tuple[Callable[..., Any], Arguments]] = {}  # that this worker may still have to run

    def _begin(self, model: keras.Model, call: int) -> None:
        self._model, self._call = model, call
        self._result = self._task_client.enter(call)
        if self._result is not None:
            return
        if self._context.role.job == "ps":
            self._server = self._context.serve_variables(model, call)
        if self._context.role.job == "worker":
            self._runner = FunctionRunner(self._context, model, self._training, self._task_client, call)

    def _end(self) -> None:
        try:
            result = self._result or self._run_until_end()
        finally:
            self._functions.clear()
            if self._server is not None:
                self._server.stop()
            if self._runner is not None:
                self._runner.close()
            self._server = self._runner = None
        if not self._set_values(result):
            self._context.log(WEIGHTS_DROPPED)
        self._task_client.leave(self._call)

    def _set_values(self, found: Published) -> bool:
        return set_values(weights_of(self._model) | optimizer_numbers_of(self._model), found.arrays)

    def _run_until_end(self) -> Published:
        if self._runner is None:
            return self._task_client.wait_for_end(self._call)
        return run_tasks(self._task_client, self._call, self._run_task, self._runner.pause)

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self.begin()
        if self._runner is not None:
            self._functions[self._scheduled] = function, arguments
        self._scheduled += 1

    def join(self) -> None:
        if self.is_open:
            self._set_values(self._wait_for_sync_point())
            self._functions.clear()

    def done(self) -> bool:
        return not self.is_open or bool(self._wait_for_sync_point().what["value"])

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        self.begin()
        found: list[Any] = decode_result(self._wait_for_sync_point().arrays)
        return found

    def evaluate(self, data: KerasInput, proceed: Callable[[], Any]) -> Any:
        reached = self._wait_for_sync_point()
        if "error" in reached.what:
            raise ClusterError(f"the chief's evaluate has failed: {reached.what['error']}", USER_ERROR)
        follow_evaluation(data, reached.what)
        return decode_result(reached.arrays)

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        return self._runner_for("pull").pull(model)

    def newest_values(self, model: keras.Model) -> AbstractContextManager[None]:
        if self._runner is not None and self.is_in_function and model is self._model:
            return self._runner.newest_values()
        return nullcontext()

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        self._runner_for("push").push(model, gradients)

    def _runner_for(self, method: str) -> "FunctionRunner":
        if self._runner is None:
            raise ScopeError(f"strategy.{method} is for scheduled functions. Fix: see lockstep.ClusterCoordinator.")
        return self._runner

    def _wait_for_sync_point(self) -> Published:
        """Run tasks until the chief reaches the next sync point, and return what it has published there."""
        point, self._sync_points = self._sync_points, self._sync_points + 1
        reached = self._run_until(point)
        if "is_forgotten" in reached.what:
            raise ClusterError(
                f"{self._context.role.name} has come too late: the chief no longer keeps the result of sync point {point} of the script, a "
                "join, done, fetch or evaluate. Fix: start all processes of the job together.",
                PEER_LOST,
            )
        return reached

    def _run_until(self, point: int) -> Published:
        if self._runner is not None and self._result is None:
            until = StopCondition(point, self._scheduled)
            stopped = run_tasks(self._task_client, self._call, self._run_task, self._runner.pause, until)
            if not stopped.is_end:
                return stopped
            self._result = stopped
        try:
            return self._task_client.wait_for_sync_point(self._call, point)
        except CallEnded:
            raise ClusterError(
                f"{self._context.role.name}: the script waits here for join, done, fetch or evaluate number {point + 1}, and the chief's "
                "script had none. Fix: make the same calls on all processes.",
                USER_ERROR,
            ) from None

    def _run_task(self, task: Task) -> Result:
        while self._functions and (number := next(iter(self._functions))) < task.below:
            del self._functions[number]
        if task.number not in self._functions:
            raise ClusterError(missing_schedule(self._context.role.name, self._scheduled), USER_ERROR)
        function, arguments = self._functions[task.number]
        if self._runner is None:
            raise ScopeError("A function was assigned to a process that is no worker.")
        self.is_in_function = True
        try:
            return self._runner.run(task, function, arguments)
        finally:
            self.is_in_function = False


class FunctionRunner:
    """Runs scheduled functions on one worker, and makes ``train_on_batch``, ``pull`` and ``push`` use the servers' variables."""

    def __init__(
        self,
        context: ProcessContext,
        model: keras.Model,
        training: TrainingModels,
        task_client: TaskClient,
        call: int,
    ) -> None:
        self._context, self._model, self._training, self._call = context, model, training, call
        self._names, self._merge_rules = names_of(model), merge_rules(model)
        self._client: VariableClient | None = None
        self._step: GradientStep | None = None
        self._followed = FollowedState(self._merge_rules, lambda: task_client.wait_for(call, STATE))
        self._additivity = Additivity(self._merge_rules)
        self._task: Task | None = None

    def run(self, task: Task, function: Callable[..., Any], arguments: Arguments) -> Result:
        """Run one function, and return its encoded result with the changes of the model."""
        self._task, self._non_trainable, self._changed = task, list[np.ndarray](), dict[str, np.ndarray]()
        self._steps = self._pushes = 0
        self._has_pulled = False
        name = function.__qualname__ if inspect.isroutine(function) else repr(function)
        try:
            with self._training.steps_by(self._model, self._train_step):
                args, kwargs = resolve_per_worker(arguments)
                found = function(*args, **kwargs)
        except StopIteration as end:
            raise InputError(
                f"{name}: {self._context.role.name} has no more batches in its own data. Fix: repeat them."
            ) from end
        finally:
            self._task = None
        if self._has_pulled:
            self.pause()
        return {}, encode_result(found, name) | self._changed

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """See :meth:`lockstep.ParameterServerStrategy.pull`."""
        self._check_model("pull", model)
        values, _ = self._pull_values()
        return [values[name] for name in self._names]

    @contextmanager
    def newest_values(self) -> Iterator[None]:
        """Give the model the servers' newest values, and the chief's of what is not trained, while a context is open."""
        if (task := self._task) is None:
            raise ScopeError(
                "A model was evaluated after its scheduled function had ended. Fix: evaluate it before the function returns."
            )
        trainable, others = self._model.trainable_variables, self._model.non_trainable_variables
        before = [variable.value for variable in (*trainable, *others)]
        versions = self._client.versions if self._client else None
        values, _ = self._pull_values(will_push=False)
        if self._client and versions is not None:
            self._client.versions = versions  # A gradient that follows belongs to the values that were pulled for it.
        newest = self._non_trainable if self._steps else self._followed.newest(task.what["state"], task.arrays)
        try:
            for variable, value in zip([*trainable, *others], [*map(values.get, self._names), *newest], strict=True):
                variable.assign(value)
            yield
        finally:
            for variable, value in zip([*trainable, *others], before, strict=True):
                variable.assign(value)

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """See :meth:`lockstep.ParameterServerStrategy.push`."""
        self._check_model("push", model)
        arrays = [np.asarray(gradient) for gradient in gradients]
        shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        if [array.shape for array in arrays] != shapes:
            raise ModelError(
                f"push: expected the gradients of the {len(shapes)} trainable variables of {model.name!r} in their order, of the shapes "
                f"{shapes}, got {[array.shape for array in arrays]}. Fix: differentiate by model.trainable_variables."
            )
        types = [variable.dtype for variable in model.trainable_variables]
        self._push_gradients([array.astype(dtype) for array, dtype in zip(arrays, types, strict=True)])

    def pause(self) -> None:
        """Tell the servers that this worker has no task until it pulls again."""
        if self._client is not None:
            self._client.pause()

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _check_model(self, method: str, model: keras.Model) -> None:
        if self._task is None:
            raise ScopeError(f"strategy.{method} is for scheduled functions. Fix: see lockstep.ClusterCoordinator.")
        if model is not self._model:
            raise ModelError(
                f"{method}: servers have the variables of {self._model.name!r}, not of {model.name!r}. Fix: pass the former, of which the chief "
                "has called fit or schedule."
            )

    def _pull_values(self, will_push: bool = True) -> tuple[Mapping[str, np.ndarray], int]:
        """Return the newest values, and the number of updates that made them."""
        if self._client is None:
            self._client = self._context.connect_to_servers(self._context.plan_for(self._model), self._call)
        self._has_pulled = self._has_pulled or will_push
        return self._client.pull(will_push=will_push), max(self._client.versions)

    def _push_gradients(self, gradients: Sequence[np.ndarray]) -> None:
        if self._client is None or self._task is None:
            raise ModelError(
                "push: a gradient belongs to the values that it was computed with. Fix: pull the values first."
            )
        number, below = push_number(self._task.number, self._pushes), push_number(self._task.below, 0)
        self._pushes, self._has_pulled = self._pushes + 1, False
        named = dict(zip(self._names, gradients, strict=True))
        self._client.push(named, task=number, below=below)

    def _train_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Make Keras's training step on the servers' values."""
        if (task := self._task) is None:
            raise ScopeError(
                "A training step was made after its scheduled function had ended. Fix: train before the function returns."
            )
        if self._step is None:
            self._step = self._training.gradient_step(self._model)
        step = self._step
        step.set_optimizer(task.what["optimizer"])
        metrics = [np.asarray(value) for value in state[3]]
        if not self._steps:
            self._non_trainable = self._followed.newest(task.what["state"], task.arrays)

        # The first time this compiles the step, for which no other worker waits: the staleness bound begins with the pull below.
        def make() -> Values:
            values, updates = self._pull_values(will_push=False)
            return step(values, self._non_trainable, metrics, batch, task.what["steps_before"] + updates).non_trainable

        before = self._followed.at_step(self._non_trainable, make, task.number, self._steps * step.replicas)
        values, updates = self._pull_values()
        made = task.what["steps_before"] + updates
        found = step(values, before, metrics, batch, made)

        def repeat(others: Sequence[Any], _: Sequence[Any]) -> StepState:
            return step(values, others, metrics, batch, made).non_trainable, []

        self._additivity.observe((before, []), (found.non_trainable, []), repeat)
        self._push_gradients([found.gradients[name] for name in self._names])
        self._record_step(found.non_trainable, before)
        return found.logs, state

    def _record_step(self, after: Values, before: Values) -> None:
        """Record what a step has changed, for the chief and for the next step of the same function."""
        known = self._additivity
        add_deltas(self._changed, compute_deltas((after, before), ([], []), known.no_sums, known.replaced))
        self._non_trainable = [
            old if rule is StateMerge.SEED else new
            for rule, new, old in zip(self._merge_rules, after, self._non_trainable, strict=True)
        ]
        self._steps += 1
