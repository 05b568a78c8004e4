"""Workers, servers and the evaluator in a custom training loop: they run the same script, and work or wait at its sync points."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ClusterError, InputError, ModelError, ScopeError
from lockstep.distributed.cluster import exit_codes
from lockstep.execution.replica import StateMerge
from lockstep.parameter_server.cluster_coordinator import resolve_per_worker
from lockstep.parameter_server.gradient_step import GradientStep, names_of
from lockstep.parameter_server.process_role import ProcessContext
from lockstep.parameter_server.scheduler_base import (
    Arguments,
    Outcome,
    SchedulerBase,
    TrainingModels,
    decode_result,
    encode_result,
    push_number,
    set_weights,
)
from lockstep.parameter_server.state_sync import (
    STATE,
    DeltaAccumulator,
    SeedOffsets,
    add_deltas,
    compute_deltas,
    merge_rules,
)
from lockstep.parameter_server.task_client import (
    CallEnded,
    CallResult,
    ScriptSyncPoint,
    StopCondition,
    Task,
    TaskClient,
    run_tasks,
)
from lockstep.parameter_server.task_dispatcher import Result
from lockstep.parameter_server.variables.variable_client import VariableClient
from lockstep.parameter_server.variables.variable_server import ArrayServer

Values = list[np.ndarray]


class WorkerScheduler(SchedulerBase):
    """Scheduler of a process that is not the chief.

    Args:
        context: this process.
        training: the strategy.
        next_call: gives the number of the next call.
        task_client: of the chief's task dispatcher.
    """

    def __init__(
        self, context: ProcessContext, training: TrainingModels, next_call: Callable[[], int], task_client: TaskClient
    ) -> None:
        super().__init__(context, training, next_call)
        self._task_client, self._sync_points = task_client, 0
        self._runner: FunctionRunner | None = None
        self._server: ArrayServer | None = None
        self._result: CallResult | None = None  # of the call, if the chief has already ended it
        self._functions: dict[int, tuple[Callable[..., Any], Arguments]] = {}  # that this worker may still have to run

    def _begin(self, model: keras.Model, call: int) -> None:
        self._model, self._call = model, call
        self._result = self._task_client.enter(call)
        if self._result is not None:
            return
        if self._context.role.job == "ps":
            self._server = self._context.serve_variables(model, call)
        if self._context.role.job == "worker":
            connect = lambda: self._context.connect_to_servers(self._context.plan_for(model), call)  # noqa: E731
            name = self._context.role.name
            self._runner = FunctionRunner(model, self._training, self._task_client, call, connect, name)

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
        set_weights(self._model, result.arrays)
        self._task_client.leave(self._call)

    def _run_until_end(self) -> CallResult:
        if self._runner is None:
            return self._task_client.wait_for_end(self._call)
        return run_tasks(self._task_client, self._call, self._run_task, self._runner.pause)

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> None:
        """See :class:`SchedulerBase`."""
        self.begin()
        if self._runner is not None:
            self._functions[self._scheduled] = function, arguments
        self._scheduled += 1

    def join(self) -> None:
        """See :class:`SchedulerBase`."""
        if self.is_open:
            set_weights(self._model, self._wait_for_sync_point().arrays)
            self._functions.clear()

    def done(self) -> bool:
        """See :class:`SchedulerBase`."""
        return not self.is_open or bool(self._wait_for_sync_point().what["value"])

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """See :class:`SchedulerBase`."""
        self.begin()
        found: list[Any] = decode_result(self._wait_for_sync_point().arrays)
        return found

    def evaluate(self, proceed: Callable[[], Any]) -> Any:
        """See :class:`SchedulerBase`."""
        reached = self._wait_for_sync_point()
        if "error" in reached.what:
            raise ClusterError(f"the chief's evaluate has failed: {reached.what['error']}", exit_codes.USER_ERROR)
        return decode_result(reached.arrays)

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """See :class:`SchedulerBase`."""
        return self._runner_for("pull").pull(model)

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """See :class:`SchedulerBase`."""
        self._runner_for("push").push(model, gradients)

    def _runner_for(self, method: str) -> "FunctionRunner":
        if self._runner is None:
            raise ScopeError(f"strategy.{method} is for scheduled functions: see lockstep.ClusterCoordinator.")
        return self._runner

    def _wait_for_sync_point(self) -> ScriptSyncPoint:
        """Run tasks until the chief reaches the next sync point, and return what it has published there."""
        point, self._sync_points = self._sync_points, self._sync_points + 1
        reached = self._run_until(point)
        if "is_forgotten" in reached.what:
            raise ClusterError(
                f"{self._context.role.name} has come too late: the chief no longer keeps the result of sync point {point} of the script, a "
                "join, done, fetch or evaluate.",
                exit_codes.PEER_LOST,
            )
        return reached

    def _run_until(self, point: int) -> ScriptSyncPoint:
        if self._runner is not None and self._result is None:
            until = StopCondition(point, self._scheduled)
            stopped = run_tasks(self._task_client, self._call, self._run_task, self._runner.pause, until)
            if isinstance(stopped, ScriptSyncPoint):
                return stopped
            self._result = stopped
        try:
            return self._task_client.wait_for_sync_point(self._call, point)
        except CallEnded:
            raise ClusterError(
                f"{self._context.role.name}: the script waits here for join, done, fetch or evaluate number {point + 1}, and the chief's "
                "script had none. Fix: make the same calls on all processes.",
                exit_codes.USER_ERROR,
            ) from None

    def _run_task(self, task: Task) -> Result:
        while self._functions and (number := next(iter(self._functions))) < task.below:
            del self._functions[number]
        function, arguments = self._functions[task.number]
        if self._runner is None:
            raise ScopeError("A function was assigned to a process that is no worker.")
        self.is_in_function = True
        try:
            return self._runner.run(task, function, arguments)
        finally:
            self.is_in_function = False


class FunctionRunner:
    """Runs scheduled functions on one worker, and makes ``train_on_batch``, ``pull`` and ``push`` use the servers' variables.

    Args:
        model: whose variables the servers have.
        training: the strategy.
        task_client: of the chief's task dispatcher.
        call: number of the call.
        connect: gives a client of the servers.
        name: of this worker.
    """

    def __init__(
        self,
        model: keras.Model,
        training: TrainingModels,
        task_client: TaskClient,
        call: int,
        connect: Callable[[], VariableClient],
        name: str,
    ) -> None:
        self._model, self._training, self._task_client, self._call = model, training, task_client, call
        self._connect, self._name = connect, name
        self._names, self._merge_rules = names_of(model), merge_rules(model)
        self._client: VariableClient | None = None
        self._step: GradientStep | None = None
        self._seed_offsets: SeedOffsets | None = None
        self._state, self._first_task = -1, 0
        self._published: Values = []
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
            raise InputError(f"{name}: {self._name} has no more batches in its own data. Repeat them.") from end
        finally:
            self._task = None
        if self._has_pulled:
            self.pause()
        return {}, encode_result(found, name) | self._changed

    def pull(self, model: keras.Model) -> Values:
        """See :meth:`lockstep.ParameterServerStrategy.pull`."""
        self._check_model("pull", model)
        values = self._pull_values()
        return [values[name] for name in self._names]

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """See :meth:`lockstep.ParameterServerStrategy.push`."""
        self._check_model("push", model)
        arrays = [np.asarray(gradient) for gradient in gradients]
        shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        if [array.shape for array in arrays] != shapes:
            raise ModelError(
                f"push: expected the gradients of the {len(shapes)} trainable variables of {model.name!r} in their order, of the shapes "
                f"{shapes}, got {[array.shape for array in arrays]}."
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
            raise ScopeError(f"strategy.{method} is for scheduled functions: see lockstep.ClusterCoordinator.")
        if model is not self._model:
            raise ModelError(f"{method}: servers have the variables of {self._model.name!r}, not of {model.name!r}.")

    def _pull_values(self) -> Mapping[str, np.ndarray]:
        if self._client is None:
            self._client = self._connect()
        self._has_pulled = True
        return self._client.pull()

    def _push_gradients(self, gradients: Sequence[np.ndarray]) -> None:
        if self._client is None or self._task is None:
            raise ModelError("push: pull the values first: a gradient belongs to the values that it was computed with.")
        number, below = push_number(self._task.number, self._pushes), push_number(self._task.below, 0)
        self._pushes, self._has_pulled = self._pushes + 1, False
        named = dict(zip(self._names, gradients, strict=True))
        self._client.push(named, task=number, below=below).wait()

    def _train_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Make Keras's training step on the servers' values."""
        if self._step is None:
            self._step = self._training.gradient_step(self._model)
        step, values = self._step, self._pull_values()
        metrics = [np.asarray(value) for value in state[3]]
        made = (self._task.what["steps_before"] if self._task else 0) + max(
            self._client.versions if self._client else [], default=0
        )
        if not self._steps:
            self._non_trainable = self._newest_non_trainable()
        if self._seed_offsets is None:
            found = step(values, self._non_trainable, metrics, batch, made)
            self._seed_offsets = SeedOffsets(self._merge_rules, found.non_trainable, self._non_trainable)
        before = self._with_seeds()
        found = step(values, before, metrics, batch, made)
        self._push_gradients([found.gradients[name] for name in self._names])
        self._record_step(found.non_trainable, before)
        return found.logs, state

    def _newest_non_trainable(self) -> Values:
        """Return the chief's values of the non-trainable variables."""
        task = self._task
        if task is None:
            raise ScopeError("A training step was made after its scheduled function had ended.")
        if task.what["state"] != self._state:
            what, arrays = self._task_client.wait_for(self._call, STATE)
            self._state, self._first_task = what["number"], what["update"]
            self._published = [arrays[str(number)] for number in range(len(self._merge_rules))]
        return DeltaAccumulator.with_changing_values(self._published, task.arrays)

    def _with_seeds(self) -> Values:
        if self._seed_offsets is None or self._task is None:
            return self._non_trainable
        return self._seed_offsets.apply(self._non_trainable, self._task.number - self._first_task, self._steps)

    def _record_step(self, after: Values, before: Values) -> None:
        """Record what a step has changed, for the chief and for the next step of the same function."""
        add_deltas(self._changed, compute_deltas((after, before), ([], []), frozenset()))
        self._non_trainable = [
            old if rule is StateMerge.SEED else new
            for rule, new, old in zip(self._merge_rules, after, self._non_trainable, strict=True)
        ]
        self._steps += 1
