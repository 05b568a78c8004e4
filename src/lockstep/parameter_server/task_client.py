"""Client of the chief's task dispatcher, for a worker, a server or an evaluator: enters a call, runs tasks, and waits for the result."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._errors import NO_PROGRESS, PEER_LOST, USER_ERROR, ClusterError, exit_code_of, summary_of
from lockstep.devices.host_memory import host_memory
from lockstep.distributed.control.heartbeat import LONG_SECONDS
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.array_transport import Message, payload_bytes
from lockstep.parameter_server.rpc import Response, RpcClient, check_no_arrays
from lockstep.parameter_server.task_dispatcher import Result

_UNUSED_KEY = "end of the call"  # The dispatcher never publishes it, so a request for it lasts until then.
_AWAITED = {
    "enter": "the beginning of a call",
    "ask": "a message for all workers",
    "take": "a task",
}  # by kind of a request
_IDLE_SECONDS = 0.05  # A worker that waits longer for a task counts as idle.


@dataclass(frozen=True)
class Task:
    """Unit of work for one worker.

    Args:
        number: number of the task in its call.
        what: description, as JSON values.
        arrays: that belong to it.
        below: all tasks with smaller numbers were done when this one was assigned.
    """

    number: int
    what: Message
    arrays: Mapping[str, np.ndarray]
    below: int = 0


@dataclass(frozen=True)
class StopCondition:
    """End of a worker's loop over tasks, if its own script has come to a sync point before the call ends.

    Args:
        point: number of the sync point: the loop stops when the chief has passed it and no known task is left.
        known: the script has scheduled the tasks with smaller numbers; the worker does not take others.
    """

    point: int
    known: int


@dataclass(frozen=True)
class Published:
    """What the chief has published: the result of a call that it has ended, or what belongs to a sync point of the script.

    Args:
        what: description, as JSON values.
        arrays: that belong to it.
        is_end: whether it is the result of a call.
    """

    what: Message
    arrays: Mapping[str, np.ndarray]
    is_end: bool = False


RunTask = Callable[[Task], Result]


class CallEnded(Exception):  # noqa: N818 # Control flow, like StopIteration: it interrupts a wait of any depth.
    """Raised by a wait if the chief has ended the call, with its result."""

    def __init__(self, result: Published) -> None:
        super().__init__("the call is over")
        self.result = result


class TaskClient:
    """Connection to the chief's task dispatcher; used by one thread at a time.

    Args:
        rpc_client: connected to the chief.
        long_seconds: limit of the time in which the chief answers and does nothing else, while this process waits for it.
    """

    def __init__(self, rpc_client: RpcClient, long_seconds: float = LONG_SECONDS) -> None:
        self._rpc_client = rpc_client
        self._long = max(long_seconds, rpc_client.timeout_seconds)

    def enter(self, call: int) -> Published | None:
        """Wait until the chief has begun a call; return its result if the chief has already ended it.

        Raises:
            ClusterError: the chief is lost, or has failed.
        """
        try:
            self._wait({"kind": "enter", "call": call}, "entered")
        except CallEnded as ended:
            return ended.result
        return None

    def wait_for(self, call: int, key: str) -> Result:
        """Wait for what the chief publishes under a key.

        Raises:
            CallEnded: the chief has ended the call.
            ClusterError: the chief is lost, or has failed.
        """
        message, arrays = self._wait({"kind": "ask", "call": call, "key": key}, "published")
        return message["what"], arrays

    def wait_for_sync_point(self, call: int, point: int) -> Published:
        """Wait for what the chief publishes at a sync point of the script; errors as for :meth:`wait_for`."""
        message, arrays = self._wait({"kind": "ask", "call": call, "point": point}, "published")
        return Published(message["what"], arrays)

    def wait_for_end(self, call: int) -> Published:
        """Wait until the chief ends a call; ClusterError as for :meth:`enter`."""
        try:
            self._wait({"kind": "ask", "call": call, "key": _UNUSED_KEY}, "published")
        except CallEnded as ended:
            return ended.result
        raise AssertionError(f"the chief has published {_UNUSED_KEY!r}")

    def take(
        self, call: int, requested: "Future[Response] | None" = None, until: StopCondition | None = None
    ) -> Task | Published:
        """Wait for a task, or for the sync point of ``until``; errors as for :meth:`wait_for`.

        Args:
            call: number of the call of fit, or of the loop.
            requested: response to :meth:`request_task`, if that was called before.
            until: limits the tasks and the wait; None: all tasks, until the call ends.
        """
        message, arrays = self._wait(_take_message(call, until), ("task", "published"), requested)
        if message["kind"] == "published":
            return Published(message["what"], arrays)
        return Task(int(message["task"]), message["what"], arrays, int(message.get("below", 0)))

    def request_task(self, call: int, until: StopCondition | None = None) -> "Future[Response]":
        """Request a task without waiting, for :meth:`take`."""
        return self._request(_take_message(call, until))

    def finish(self, call: int, task: Task, result: Result) -> "Future[Response]":
        """Send the result of a task; does not wait."""
        message = {"kind": "finish", "call": call, "task": task.number, "result": result[0]}
        return self._rpc_client.call(message, result[1], check_no_arrays)

    def report_failure(self, error: BaseException, task: Task | None = None) -> None:
        """Report an error of this process or of a task to the chief, which then fails the call.

        If this process has lost another one, the call continues as long as others do not need that one.
        """
        code = exit_code_of(error)
        self.report(str(error) if code == PEER_LOST else summary_of(error), code, task)

    def report(self, summary: str, exit_code: int, task: Task | None = None) -> None:
        """Report why this process ends, or a task has failed, as :meth:`report_failure` does."""
        if exit_code not in (NO_PROGRESS, PEER_LOST, USER_ERROR):
            return  # Interrupted: nothing has failed.
        message = {"kind": "fail", "summary": summary, "code": exit_code}
        message |= {} if task is None else {"task": task.number}
        with contextlib.suppress(ClusterError):  # The chief may have ended because of another process.
            self._rpc_client.call(message, {}, check_no_arrays).result()

    def leave(self, call: int) -> None:
        """Tell the chief that this process needs nothing more of a call."""
        with contextlib.suppress(ClusterError):  # The chief may end before its answer is sent.
            self._rpc_client.call({"kind": "leave", "call": call}, {}, check_no_arrays).result()

    def close(self) -> None:
        """Close the connection."""
        self._rpc_client.close()

    def _request(self, message: Message) -> "Future[Response]":
        message = message | {"seconds": self._rpc_client.timeout_seconds}
        return self._rpc_client.call(message, {}, _check_response_size)

    def _wait(
        self, message: Message, kinds: str | tuple[str, ...], requested: "Future[Response] | None" = None
    ) -> Response:
        """Repeat a request until its response has one of the kinds; there is no limit while the chief makes progress."""
        found = (requested or self._request(message)).result()
        while (kind := found[0]["kind"]) not in ((kinds,) if isinstance(kinds, str) else kinds):
            if kind == "over":
                raise CallEnded(Published(found[0]["result"], found[1], is_end=True))
            if kind == "failed":
                raise ClusterError(str(found[0]["sentence"]), int(found[0]["code"]))
            if (idle := float(found[0]["idle"])) > self._long:
                raise ClusterError(
                    f"{self._rpc_client.name} answers, and has done nothing for {idle:.0f} s, while this process waits for "
                    f"{_AWAITED[message['kind']]}. Fix: see where the program of the chief hangs; if it is only slow, raise "
                    f"timeout_seconds above {self._long:g}.",
                    NO_PROGRESS,
                )
            found = self._request(message).result()
        return found


def run_tasks(
    client: TaskClient,
    call: int,
    run: RunTask,
    on_idle: Callable[[], object] = lambda: None,
    until: StopCondition | None = None,
) -> Published:
    """Run the tasks that the chief assigns to this worker until the call ends, or up to a sync point.

    The next task is requested before the result of the last one is acknowledged, so a task costs one round trip and not two.

    Args:
        client: client of the chief's task dispatcher.
        call: number of the call of fit, or of the loop.
        run: runs one task.
        on_idle: is called if there is no task for a moment.
        until: where to stop; None: when the call ends.

    Returns:
        The result of the call, or the sync point of ``until``.

    Raises:
        ClusterError: the chief is lost, or has failed.
        Exception: what ``run`` has raised; it was reported to the chief, whose call continues if it was the loss of a process.
    """
    requested = client.request_task(call, until)
    try:
        while True:
            task = _next_task(client, call, requested, on_idle, until)
            if isinstance(task, Published):
                return task
            try:
                result = run(task)
            except CallEnded:  # The task was reassigned, and the call has ended without this worker.
                raise
            except Exception as error:
                client.report_failure(error, task)
                raise
            acknowledged = client.finish(call, task, result)
            requested = client.request_task(call, until)
            acknowledged.result()
    except CallEnded as ended:
        return ended.result


def _next_task(
    client: TaskClient,
    call: int,
    requested: "Future[Response]",
    on_idle: Callable[[], object],
    until: StopCondition | None,
) -> Task | Published:
    try:
        requested.result(_IDLE_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ClusterError):  # A server ends with the call; the chief reports a lost one.
            on_idle()
    return client.take(call, requested, until)


def _take_message(call: int, until: StopCondition | None) -> Message:
    return {"kind": "take", "call": call} | ({} if until is None else {"point": until.point, "known": until.known})


def _check_response_size(message: Message, given: tuple[ArraySpec, ...]) -> None:
    """Refuse arrays that this machine could not hold. The model, which a result has, may be large."""
    most = host_memory().total
    if payload_bytes(given) > most:
        raise ProtocolError(f"{payload_bytes(given):,} bytes are too many for one response: this machine has {most:,}")
