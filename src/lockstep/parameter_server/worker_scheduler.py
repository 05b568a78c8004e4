"""What workers, servers and the evaluator do in a loop of one's own: they go through the same script, and wait or work at its points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ClusterError, ScopeError
from lockstep.distributed.cluster import exit_codes
from lockstep.parameter_server.function_runner import FunctionRunner
from lockstep.parameter_server.process_context import ProcessContext
from lockstep.parameter_server.result_codec import decoded
from lockstep.parameter_server.scheduler_base import (
    Arguments,
    Outcome,
    SchedulerBase,
    TrainingModels,
    take_over_weights,
)
from lockstep.parameter_server.tasks.task_client import (
    CallEnded,
    StopCondition,
    SyncPointReached,
    Task,
    TaskClient,
    work,
)
from lockstep.parameter_server.tasks.task_dispatcher import Result
from lockstep.parameter_server.variables.tcp_server import ArrayServer

__all__ = ["WorkerScheduler"]


class WorkerScheduler(SchedulerBase):
    """That of a process that is not the chief.

    Args:
        member: this process.
        training: the strategy.
        next_call: gives the number of the next call.
        desk: the chief's.
    """

    def __init__(
        self, member: ProcessContext, training: TrainingModels, next_call: Callable[[], int], desk: TaskClient
    ) -> None:
        super().__init__(member, training, next_call)
        self._desk, self._points = desk, 0
        self._work: FunctionRunner | None = None
        self._server: ArrayServer | None = None
        self._over: CallEnded | None = None  # the end, where it was heard already
        self._tasks: dict[int, tuple[Callable[..., Any], Arguments]] = {}  # that may still be given to this worker

    def _begin(self, model: keras.Model, call: int) -> None:
        self._model, self._call, self._over = model, call, None
        try:
            self._desk.enter(call)
        except CallEnded as over:
            self._over = over
            return
        if self._member.part.job == "ps":
            self._server = self._member.serve_variables(model, call)
        if self._member.part.job == "worker":
            connect = lambda: self._member.go_to_servers(self._member.plan_for(model), call)  # noqa: E731
            name = self._member.part.name
            self._work = FunctionRunner(model, self._training, self._desk, call, connect, name)

    def _end(self) -> None:
        try:
            over = self._over or self._worked_until_over()
        finally:
            self._tasks.clear()
            if self._server is not None:
                self._server.stop()
            if self._work is not None:
                self._work.close()
            self._server = self._work = None
        take_over_weights(self._model, over.arrays)
        self._desk.leave(self._call)

    def _worked_until_over(self) -> CallEnded:
        if self._work is None:
            return self._desk.end_of(self._call)
        return work(self._desk, self._call, self._do, self._work.rest)

    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> None:
        """See :class:`SchedulerBase`."""
        self.begin()
        if self._work is not None:
            self._tasks[self._scheduled] = function, arguments
        self._scheduled += 1

    def join(self) -> None:
        """See :class:`SchedulerBase`."""
        if self.is_open:
            take_over_weights(self._model, self._at_point()[1])
            self._tasks.clear()

    def done(self) -> bool:
        """See :class:`SchedulerBase`."""
        return not self.is_open or bool(self._at_point()[0]["value"])

    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """See :class:`SchedulerBase`."""
        self.begin()
        found: list[Any] = decoded(self._at_point()[1])
        return found

    def evaluated(self, proceed: Callable[[], Any]) -> Any:
        """See :class:`SchedulerBase`."""
        what, arrays = self._at_point()
        if "error" in what:
            raise ClusterError(f"the chief's evaluate has failed: {what['error']}", exit_codes.USER_ERROR)
        return decoded(arrays)

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """See :class:`SchedulerBase`."""
        return self._functions("pull").pull(model)

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """See :class:`SchedulerBase`."""
        self._functions("push").push(model, gradients)

    def _functions(self, what: str) -> FunctionRunner:
        if self._work is None:
            raise ScopeError(f"strategy.{what} is for scheduled functions: see lockstep.ClusterCoordinator.")
        return self._work

    def _at_point(self) -> Result:
        """What the chief has told here; until then, this process works."""
        point, self._points = self._points, self._points + 1
        what, arrays = self._told(point)
        if "is_forgotten" in what:
            raise ClusterError(
                f"{self._member.part.name} has come too late: the chief no longer keeps what it told at point {point} of the script, a "
                "join, done, fetch or evaluate.",
                exit_codes.PEER_LOST,
            )
        return what, arrays

    def _told(self, point: int) -> Result:
        try:
            if self._work is not None and self._over is None:
                until = StopCondition(point, self._scheduled)
                self._over = work(self._desk, self._call, self._do, self._work.rest, until)
            return self._desk.at_point(self._call, point)
        except SyncPointReached as reached:
            return reached.what, reached.arrays
        except CallEnded:
            raise ClusterError(
                f"{self._member.part.name}: the script waits here for join, done, fetch or evaluate number {point + 1}, and at the chief it "
                "had none. All processes must make the same calls.",
                exit_codes.USER_ERROR,
            ) from None

    def _do(self, piece: Task) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        while self._tasks and (number := next(iter(self._tasks))) < piece.below:
            del self._tasks[number]
        function, arguments = self._tasks[piece.number]
        if self._work is None:
            raise ScopeError("A function came to a process that is no worker.")
        self.is_in_function = True
        try:
            return self._work.do(piece, function, arguments)
        finally:
            self.is_in_function = False
