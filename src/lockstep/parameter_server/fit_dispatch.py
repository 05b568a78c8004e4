"""``fit`` and ``evaluate`` on each process of a job with servers: selects what the process does in a call, and ends the call everywhere.

Every process runs the same script and makes the same calls. In ``fit`` the chief runs Keras's loop, and the other processes work for it; they
return with the chief's history and the chief's weights. ``evaluate`` runs at the chief, and all processes get its result.
"""

import json
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import keras
import numpy as np

from lockstep._errors import USER_ERROR, ClusterError, ScopeError, exit_code_of, summary_of
from lockstep._keras import trainer
from lockstep._keras.trainer import refresh_before_sync
from lockstep.data import fit_wrapper
from lockstep.data.indexed_batches import IndexedBatches
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.process_group import ProcessGroup
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.distributed.control.transport import as_text
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.model_state import named_variables
from lockstep.fit.checkpointing.preemption import Preemption
from lockstep.fit.fit_hooks import single_callback
from lockstep.parameter_server import function_scheduler_base
from lockstep.parameter_server.chief_fit import READY, ChiefFit
from lockstep.parameter_server.evaluator import run_evaluator
from lockstep.parameter_server.function_schedulers import ChiefScheduler, WorkerScheduler
from lockstep.parameter_server.gradient_step import logs_as_json
from lockstep.parameter_server.process_role import ProcessContext
from lockstep.parameter_server.sharding import ShardingPlan
from lockstep.parameter_server.staleness import StalenessMetrics
from lockstep.parameter_server.task_client import CallEnded, Published, TaskClient
from lockstep.parameter_server.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.worker_fit import WorkerFit

_HOOKS, _HISTORY = "hooks of the data", "history"  # Sent as arrays, as they may be larger than a message.


class ChiefFitDispatch(ProcessGroup):
    """Calls at the chief."""

    def __init__(
        self, context: ProcessContext, dispatcher: TaskDispatcher, training: function_scheduler_base.TrainingModels
    ) -> None:
        self._context, self._dispatcher, self._training = context, dispatcher, training
        self._call, self._is_nested = 0, False
        self.scheduler: function_scheduler_base.SchedulerBase = ChiefScheduler(
            context, training, self._next_call, dispatcher
        )

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        if call == "predict" or self._is_nested:
            return proceed()
        self._is_nested = True
        try:
            if call == "evaluate" and self.scheduler.is_open:
                return self.scheduler.evaluate(arguments["x"], proceed)
            self.scheduler.end()
            self._next_call()
            return self._fit(model, arguments, proceed) if call == "fit" else self._evaluate(arguments["x"], proceed)
        finally:
            self._is_nested = False

    def note_progress(self) -> None:
        """Note that this process makes a step, for the others, which may wait for it."""
        self._dispatcher.note_progress()

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _evaluate(self, data: KerasInput, proceed: Callable[[], Any]) -> Any:
        self._dispatcher.open(self._call)
        data.track_state(None)  # Else it does not keep its hooks.
        try:
            found = proceed()
        except Exception as error:
            self._dispatcher.close({"error": summary_of(error)})
            raise
        self._dispatcher.close({"value": logs_as_json(found)} | function_scheduler_base.state_after_evaluation(data))
        return found

    def _fit(self, model: keras.Model, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        data: KerasInput = arguments["x"]
        fit = self._chief_fit(model, data)
        self._add_callbacks(model, arguments, fit)
        try:
            with (
                closing(fit),
                self._training.steps_by(model, fit.step, fit.newest_state),
                refresh_before_sync(model, fit.wait_for_steps),
            ):
                history = proceed()
                fit.newest_state()  # Else the model has it.
        except BaseException as error:
            self._dispatcher.fail_calls(f"the chief's fit has ended: {summary_of(error)}", exit_code_of(error))
            raise
        data.close()  # If the epoch was cut short, the iterator of the input is closed here.
        result = {"epoch": list(history.epoch), "taken": data.total_taken, "random": capture_random_state()}
        # What JSON has no form for is text in the history of other processes.
        logs = json.dumps(logs_as_json(history.history), default=str)
        texts = {_HOOKS: as_text(data.epoch_hooks), _HISTORY: logs.encode()}
        values = function_scheduler_base.values_of(synced_variables(model))
        kept = {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}
        self._dispatcher.close(result, values, kept_arrays=kept)
        return history

    def _chief_fit(self, model: keras.Model, data: KerasInput) -> ChiefFit:
        context = self._context
        parts = len(context.role.workers) if context.max_staleness == 0 else None

        def connect() -> tuple[ShardingPlan, VariableClient]:
            plan = context.plan_for(model)
            return plan, context.connect_to_servers(plan, self._call, self._dispatcher.raise_failure)

        def warn_once(sentence: str) -> None:
            self._training._log_once(model, sentence)

        return ChiefFit(model, data, self._dispatcher, self._call, connect, parts, warn_once)

    def _add_callbacks(self, model: keras.Model, arguments: dict[str, Any], fit: ChiefFit) -> None:
        callback = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: fit.begin())
        if self._context.role.evaluator:
            callback.on_epoch_end = lambda epoch, logs: fit.publish_epoch(epoch)
        _prepend_callbacks(arguments, StalenessMetrics(fit.counters, self._context.log), callback)
        if self._context.role.evaluator and arguments.get("validation_data") is not None:
            arguments["validation_data"] = None
            self._training._log_once(
                model, "its validation data are evaluated by the evaluator, so no val_ logs come from fit"
            )


class WorkerFitDispatch(ProcessGroup):
    """Calls at a worker, a server or the evaluator."""

    def __init__(
        self, context: ProcessContext, task_client: TaskClient, training: function_scheduler_base.TrainingModels
    ) -> None:
        self._context, self._task_client, self._training = context, task_client, training
        self._call = 0
        self.scheduler: function_scheduler_base.SchedulerBase = WorkerScheduler(
            context, training, self._next_call, task_client
        )

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        if call == "fit" and self.scheduler.is_in_function:
            raise ScopeError(
                "A scheduled function cannot call fit. Fix: use train_on_batch in it, or call fit in the loop that schedules it."
            )
        if call == "predict" or self.scheduler.is_in_function:
            arguments["verbose"] = 0
            return proceed()
        if call == "evaluate" and self.scheduler.is_open:
            return self.scheduler.evaluate(arguments["x"], proceed)
        self.scheduler.end()
        self._next_call()
        result = self._run_fit(model, arguments) if call == "fit" else self._evaluate()
        self._task_client.leave(self._call)
        if "error" in result.what:
            raise ClusterError(f"the chief's {call} has failed: {result.what['error']}", USER_ERROR)
        if call == "fit":
            restore_random_state(result.what["random"])
            return self._apply_result(model, result)
        function_scheduler_base.follow_evaluation(arguments["x"], result.what)
        return result.what["value"]

    def note_progress(self) -> None:
        """Do nothing: no other process waits for this one longer than for a task."""

    def _run_fit(self, model: keras.Model, arguments: dict[str, Any]) -> Published:
        backup = single_callback(fit_wrapper.callbacks_in(arguments), BackupAndRestore)
        # If there is a backup, the chief needs this process for its last checkpoint.
        with Preemption(self) if backup else nullcontext() as preemption:
            return self._work_for_chief(model, arguments, preemption)

    def _work_for_chief(
        self, model: keras.Model, arguments: dict[str, Any], preemption: Preemption | None
    ) -> Published:
        data: KerasInput = arguments["x"]
        trainer.training_state(model, data.peek())  # Makes the variables, as Keras's loop does at the chief.
        batches = data.indexed_batches()
        result = self._task_client.enter(self._call)
        try:
            if result is None:
                result = self._run_role(model, batches, arguments.get("validation_data"), preemption)
            if self._context.role.job == "worker":  # It may have got no batch, or have come after the end.
                batches.follow(_decoded(result, _HOOKS), result.what["taken"])
        except Exception as error:
            self._task_client.report_failure(error)
            raise
        return result

    def _evaluate(self) -> Published:
        return self._task_client.enter(self._call) or self._task_client.wait_for_end(self._call)

    def _run_role(
        self, model: keras.Model, batches: IndexedBatches, validation_data: Any, preemption: Preemption | None
    ) -> Published:
        try:
            if self._context.role.job == "worker":
                return self._run_worker(model, batches, preemption)
            if self._context.role.job == "ps":
                return self._run_server(model)
            return self._run_evaluator(model, validation_data)
        except CallEnded as ended:  # Before the chief has begun to train: nothing was left to train.
            return ended.result

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _run_worker(self, model: keras.Model, batches: IndexedBatches, preemption: Preemption | None) -> Published:
        with closing(self._connect_to_servers(model)) as client:
            step = self._training.gradient_step(model)
            log, workers = self._context.log, len(self._context.role.workers)
            return WorkerFit(
                model, step, batches, self._task_client, client, self._call, log, preemption, workers
            ).run()

    def _run_server(self, model: keras.Model) -> Published:
        server = self._context.serve_variables(model, self._call)
        try:
            return self._task_client.wait_for_end(self._call)
        finally:
            server.stop()

    def _run_evaluator(self, model: keras.Model, validation_data: Any) -> Published:
        with closing(self._connect_to_servers(model)) as client:
            return run_evaluator(model, validation_data, self._task_client, client, self._call, self._context.log)

    def _connect_to_servers(self, model: keras.Model) -> VariableClient:
        self._task_client.wait_for(self._call, READY)
        return self._context.connect_to_servers(self._context.plan_for(model), self._call)

    def _apply_result(self, model: keras.Model, result: Published) -> keras.callbacks.History:
        """Give the model the chief's weights, and return the chief's history as the result of ``fit``."""
        variables = synced_variables(model)
        if variables and not function_scheduler_base.set_values(variables, result.arrays):
            self._context.log(function_scheduler_base.WEIGHTS_DROPPED)
        history = keras.callbacks.History()
        history.history, history.epoch = _decoded(result, _HISTORY), list(result.what["epoch"])
        history.set_model(model)
        model.history = history
        return history


def _decoded(result: Published, name: str) -> Any:
    """Return a text of JSON that came as an array with the result of a call."""
    return json.loads(result.arrays[name].tobytes())


def synced_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Return by name the variables that are equal on all processes after ``fit``."""
    return named_variables(model, "trainable", "non_trainable", "optimizer")


def _prepend_callbacks(arguments: dict[str, Any], *callbacks: keras.callbacks.Callback) -> None:
    """Insert callbacks before the user's, so that these see what they add to the logs."""
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks[:0] = callbacks
    else:
        arguments["callbacks"] = [*callbacks, *fit_wrapper.callbacks_in(arguments)]
