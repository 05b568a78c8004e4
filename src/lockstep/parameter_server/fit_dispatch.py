"""``fit`` and ``evaluate`` on each process of a job with servers: who does what in a call, and how all come out of it alike.

Every process runs the same script and makes the same calls. In ``fit`` the chief runs Keras's loop, and the others work for it; they
come back with the chief's history and the chief's weights. ``evaluate`` is done by the chief, and its result is everybody's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol

import keras
import numpy as np

from lockstep._errors import ClusterError
from lockstep._keras import trainer
from lockstep._keras.trainer import refresh_before_sync
from lockstep.data import fit_entry
from lockstep.data.keras_adapter import KerasInput
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.failures import summary_of
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.fit.checkpointing.preemption import Preemption
from lockstep.fit.hooks import callbacks_in, single_callback
from lockstep.parameter_server import scheduler_base
from lockstep.parameter_server.chief_fit import READY, ChiefFit
from lockstep.parameter_server.chief_scheduler import ChiefScheduler
from lockstep.parameter_server.evaluator import look_on
from lockstep.parameter_server.process_context import ProcessContext
from lockstep.parameter_server.staleness_metrics import StalenessMetrics
from lockstep.parameter_server.tasks.task_client import CallEnded, TaskClient
from lockstep.parameter_server.tasks.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variables.variable_client import VariableClient
from lockstep.parameter_server.worker_fit import WorkerFit
from lockstep.parameter_server.worker_scheduler import WorkerScheduler

__all__ = ["ChiefFitDispatch", "ServerTraining", "WorkerFitDispatch"]

_KEPT = ("trainable", "non_trainable", "optimizer")


class ServerTraining(scheduler_base.TrainingModels, Protocol):
    """What the strategy knows of models."""

    def tell(self, model: keras.Model, sentence: str) -> None:
        """Say something about a model, once."""


class ChiefFitDispatch(fit_entry.ProcessGroup):
    """The calls of the chief.

    Args:
        member: this process.
        desk: where the others come.
        training: the strategy.
    """

    def __init__(self, member: ProcessContext, desk: TaskDispatcher, training: ServerTraining) -> None:
        self._member, self._desk, self._training = member, desk, training
        self._call, self._is_inside = 0, False
        self.coordination: scheduler_base.SchedulerBase = ChiefScheduler(member, training, self._next_call, desk)

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        """See :class:`lockstep.data.fit_entry.ProcessGroup`."""
        if call == "predict" or self._is_inside:
            return proceed()
        self._is_inside = True
        try:
            if call == "evaluate" and self.coordination.is_open:
                return self.coordination.evaluated(proceed)
            self.coordination.end()
            self._next_call()
            return self._fit(model, arguments, proceed) if call == "fit" else self._evaluate(proceed)
        finally:
            self._is_inside = False

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _evaluate(self, proceed: Callable[[], Any]) -> Any:
        self._desk.open(self._call)
        try:
            found = proceed()
        except Exception as error:
            self._desk.close({"error": summary_of(error)})
            raise
        self._desk.close({"value": plain(found)})
        return found

    def _fit(self, model: keras.Model, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        member = self._member
        parts = len(member.part.workers) if member.max_staleness == 0 else None
        data: KerasInput = arguments["x"]

        def connect() -> Any:
            plan = member.plan_for(model)
            return plan, member.go_to_servers(plan, self._call)

        fit = ChiefFit(
            model, data, self._desk, self._call, connect, parts, lambda sentence: self._training.tell(model, sentence)
        )
        moments = {
            "on_train_begin": lambda logs: fit.begin(),
            "on_epoch_end": lambda epoch, logs: fit.tell_of_epoch(epoch),
        }
        _add_callback(arguments, keras.callbacks.LambdaCallback(**moments))
        _add_callback(arguments, StalenessMetrics(fit.statistics, member.announce))
        if member.part.evaluator and arguments.get("validation_data") is not None:
            arguments["validation_data"] = None
            self._training.tell(
                model, "its validation data are evaluated by the evaluator, so no val_ logs come from fit"
            )
        try:
            with (
                closing(fit),
                self._training.steps_by(model, fit.step, fit.settle),
                refresh_before_sync(model, fit.settle),
            ):
                history = proceed()
        except BaseException as error:
            self._desk.abort(f"the chief's fit has ended: {summary_of(error)}", _code_of(error))
            raise
        data.close()  # An epoch that was broken off ends here, with what the data's own code does then.
        result = {
            "history": plain(history.history),
            "epoch": list(history.epoch),
            "taken": data.total_taken,
            "hooks": data.epoch_hooks,
        }
        self._desk.close(result, kept_values(model))
        return history


class WorkerFitDispatch(fit_entry.ProcessGroup):
    """The calls of a worker, a server and the evaluator.

    Args:
        member: this process.
        desk: the chief's.
        training: the strategy.
    """

    def __init__(self, member: ProcessContext, desk: TaskClient, training: ServerTraining) -> None:
        self._member, self._desk, self._training = member, desk, training
        self._call = 0
        self.coordination: scheduler_base.SchedulerBase = WorkerScheduler(member, training, self._next_call, desk)
        self._roles = {"worker": self._work, "ps": self._serve, "evaluator": self._look_on}

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        """See :class:`lockstep.data.fit_entry.ProcessGroup`."""
        if call == "predict" or self.coordination.is_in_function:
            arguments["verbose"] = 0
            return proceed()
        if call == "evaluate" and self.coordination.is_open:
            return self.coordination.evaluated(proceed)
        self.coordination.end()
        self._next_call()
        with self._staying(arguments) if call == "fit" else nullcontext():
            over = self._end_of(model, call, arguments)
        self._desk.leave(self._call)
        if "error" in over.result:
            raise ClusterError(f"the chief's {call} has failed: {over.result['error']}", exit_codes.USER_ERROR)
        return self._taken_over(model, over) if call == "fit" else over.result["value"]

    def _staying(self, arguments: dict[str, Any]) -> AbstractContextManager[Any]:
        """Where there is a backup, the chief stops the job when all are asked to: it needs the others for its last checkpoint."""
        backup = single_callback(callbacks_in(arguments), BackupAndRestore)
        return Preemption(self) if backup else nullcontext()

    def _end_of(self, model: keras.Model, call: str, arguments: dict[str, Any]) -> CallEnded:
        if call == "fit":  # Makes the variables, as Keras's loop does at the chief.
            trainer.training_state(model, arguments["x"].peek())
        try:
            self._desk.enter(self._call)
        except CallEnded as over:
            return over
        if call != "fit":
            return self._desk.end_of(self._call)
        try:
            return self._roles[self._member.part.job](model, arguments)
        except Exception as error:
            self._desk.fail(self._call, error)
            raise

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _work(self, model: keras.Model, arguments: dict[str, Any]) -> CallEnded:
        batches = arguments["x"].indexed_batches()
        with closing(self._go_to_servers(model)) as client:
            step = self._training.gradient_step(model)
            over = WorkerFit(model, step, batches, self._desk, client, self._call, self._member.announce).run()
        batches.run_hooks(over.result["hooks"])
        batches.read_up_to(over.result["taken"])
        return over

    def _serve(self, model: keras.Model, arguments: dict[str, Any]) -> CallEnded:
        server = self._member.serve_variables(model, self._call)
        try:
            return self._desk.end_of(self._call)
        finally:
            server.stop()

    def _look_on(self, model: keras.Model, arguments: dict[str, Any]) -> CallEnded:
        with closing(self._go_to_servers(model)) as client:
            validation, announce = arguments.get("validation_data"), self._member.announce
            return look_on(model, validation, self._desk, client, self._call, announce)

    def _go_to_servers(self, model: keras.Model) -> VariableClient:
        self._desk.ask(self._call, READY)
        return self._member.go_to_servers(self._member.plan_for(model), self._call)

    def _taken_over(self, model: keras.Model, over: CallEnded) -> keras.callbacks.History:
        """What ``fit`` gives here: the chief's history; the model has the chief's weights."""
        for name, variable in named(model).items():
            if name in over.arrays:
                variable.assign(over.arrays[name])
        history = keras.callbacks.History()
        history.history, history.epoch = dict(over.result["history"]), list(over.result["epoch"])
        history.set_model(model)
        model.history = history
        return history


def plain(found: Any) -> Any:
    """Numbers, lists and dicts as values of JSON."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), found)


def named(model: keras.Model) -> dict[str, keras.Variable]:
    """What all processes have alike after ``fit``, by name."""
    kinds = zip(_KEPT, variables_of(model), strict=False)
    return {f"{kind}/{number}": variable for kind, group in kinds for number, variable in enumerate(group)}


def kept_values(model: keras.Model) -> dict[str, np.ndarray]:
    """The values of :func:`named`."""
    return {name: np.asarray(variable.value) for name, variable in named(model).items()}


def _add_callback(arguments: dict[str, Any], callback: keras.callbacks.Callback) -> None:
    """Before the others, so that they see what it adds to the logs."""
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks.insert(0, callback)
    else:
        arguments["callbacks"] = [callback, *(given if isinstance(given, (list, tuple)) else [given] if given else [])]


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, ClusterError) and error.exit_code is not None:
        return error.exit_code
    return exit_codes.INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_codes.USER_ERROR
