"""The way of a worker, a server or an evaluator to the chief's desk: it enters a call, does what is to be done, and hears the end."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep._errors import ClusterError
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.failures import summary_of
from lockstep.parameter_server.tasks.task_dispatcher import Result
from lockstep.parameter_server.variables.array_transport import Message, ProtocolError, payload_bytes
from lockstep.parameter_server.variables.messages import no_arrays
from lockstep.parameter_server.variables.rpc_client import Response, RpcClient
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = ["CallEnded", "StopCondition", "SyncPointReached", "Task", "TaskClient", "work"]

_NEVER = "what nobody tells"
_MOST_BYTES = 2**31  # Of the arrays of one answer.


@dataclass(frozen=True)
class Task:
    """What is to be done.

    Args:
        number: of this piece in its call.
        what: says what, in values of JSON.
        arrays: that go with it.
        below: all pieces with smaller numbers were done when this one was given out.
    """

    number: int
    what: Message
    arrays: Mapping[str, np.ndarray]
    below: int = 0


@dataclass(frozen=True)
class StopCondition:
    """How long a worker works in a call that it sees piece by piece, as its own script comes to them.

    Args:
        point: of the script: when the chief has told what follows there, and nothing else is to be done.
        known: pieces with smaller numbers are known here; others are not asked for.
    """

    point: int
    known: int


Do = Callable[[Task], Result]


class CallEnded(Exception):  # noqa: N818 # It is no error: a call comes to its end so.
    """The call has ended at the chief.

    Args:
        result: of the call.
        arrays: that go with it.
    """

    def __init__(self, result: Any, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__("the call is over")
        self.result, self.arrays = result, arrays


class SyncPointReached(Exception):  # noqa: N818 # It is no error: work for one point comes to its end so.
    """The chief has told what follows at a point of the script.

    Args:
        what: it has told.
        arrays: that go with it.
    """

    def __init__(self, what: Message, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__("the point is reached")
        self.what, self.arrays = what, arrays


class TaskClient:
    """Asks the chief; used by one thread at a time.

    Args:
        courier: to the chief.
    """

    def __init__(self, courier: RpcClient) -> None:
        self._courier = courier

    def enter(self, call: int) -> None:
        """Wait until the chief has begun a call.

        Raises:
            CallEnded: it has ended it already.
            ClusterError: the chief is lost, or has failed.
        """
        self._wait({"kind": "enter", "call": call}, "entered")

    def ask(self, call: int, key: str) -> Result:
        """Wait for what the chief tells to whoever asks; errors as for :meth:`enter`."""
        message, arrays = self._wait({"kind": "ask", "call": call, "key": key}, "fact")
        return message["what"], arrays

    def at_point(self, call: int, point: int) -> Result:
        """Wait for what the chief tells at a point of the script; errors as for :meth:`enter`."""
        message, arrays = self._wait({"kind": "ask", "call": call, "point": point}, "fact")
        return message["what"], arrays

    def end_of(self, call: int) -> CallEnded:
        """Wait until a call is over; other errors as for :meth:`enter`."""
        try:
            while True:
                self._wait({"kind": "ask", "call": call, "key": _NEVER}, "fact")
        except CallEnded as over:
            return over

    def take(self, call: int, after: "Future[Response] | None" = None, until: StopCondition | None = None) -> Task:
        """Wait for a piece of work; other errors as for :meth:`enter`.

        Args:
            call: its number.
            after: the answer to a first question that was asked already.
            until: which pieces, and how long; None: all, until the call is over.

        Raises:
            SyncPointReached: there is nothing more to do until then.
        """
        message, arrays = self._wait(self._take(call, until), "task", after)
        return Task(int(message["task"]), message["what"], arrays, int(message.get("below", 0)))

    def asked_for_piece(self, call: int, until: StopCondition | None = None) -> "Future[Response]":
        """Ask for a piece of work without waiting, for :meth:`take`."""
        return self._ask(self._take(call, until))

    def finish(self, call: int, piece: Task, result: Result) -> "Future[Response]":
        """Bring a result; does not wait."""
        about = {"kind": "finish", "call": call, "task": piece.number, "result": result[0]}
        return self._courier.ask(about, result[1], no_arrays)

    def fail(self, call: int, error: BaseException, piece: Task | None = None) -> None:
        """Tell what this process, or a piece, has ended with; then nobody goes on. Of who is lost the chief hears by itself."""
        is_stuck = isinstance(error, ClusterError) and error.exit_code == exit_codes.NO_PROGRESS
        if isinstance(error, ClusterError) and not is_stuck:
            return
        about = {"kind": "fail", "call": call, "summary": summary_of(error), "is_stuck": is_stuck}
        about |= {} if piece is None else {"task": piece.number}
        with contextlib.suppress(ClusterError):  # The chief may have ended because of another process.
            self._courier.ask(about, {}, no_arrays).result()

    def leave(self, call: int) -> None:
        """Tell that this process has all that it needs of a call."""
        self._courier.ask({"kind": "leave", "call": call}, {}, no_arrays).result()

    def close(self) -> None:
        """End the connection."""
        self._courier.close()

    def _take(self, call: int, until: StopCondition | None) -> Message:
        return {"kind": "take", "call": call} | ({} if until is None else vars(until))

    def _ask(self, message: Message) -> "Future[Response]":
        return self._courier.ask(message | {"seconds": self._courier.timeout_seconds}, {}, _some_bytes)

    def _wait(self, message: Message, kind: str, after: "Future[Response] | None" = None) -> Response:
        """As long as the chief is there: what it does may take as long as it likes."""
        found = (after or self._ask(message)).result()
        while found[0]["kind"] != kind:
            if found[0]["kind"] == "over":
                raise CallEnded(found[0]["result"], found[1])
            if found[0]["kind"] == "fact":
                raise SyncPointReached(found[0]["what"], found[1])
            if found[0]["kind"] == "failed":
                raise ClusterError(str(found[0]["sentence"]), int(found[0]["code"]))
            found = self._ask(message).result()
        return found


def work(
    desk: TaskClient, call: int, do: Do, idle: Callable[[], object] = lambda: None, until: StopCondition | None = None
) -> CallEnded:
    """Do what the chief hands out until the call is over.

    Args:
        desk: the chief's.
        call: its number.
        do: does one piece.
        idle: is called where there is nothing to do for a moment.
        until: which pieces, and how long; None: all, until the call is over.

    Returns:
        The end of the call, with its result.

    Raises:
        SyncPointReached: there is nothing more to do ``until`` then.
        ClusterError: the chief is lost, or has failed.
        Exception: what ``do`` has raised; the chief knows of it then, unless it was a loss.
    """
    asked = desk.asked_for_piece(call, until)
    try:
        while True:
            piece = _next(desk, call, asked, idle, until)
            try:
                result = do(piece)
            except Exception as error:
                desk.fail(call, error, piece)
                raise
            noted = desk.finish(call, piece, result)
            asked = desk.asked_for_piece(call, until)
            noted.result()
    except CallEnded as over:
        return over


_SOON_SECONDS = 0.05


def _next(
    desk: TaskClient, call: int, asked: "Future[Response]", idle: Callable[[], object], until: StopCondition | None
) -> Task:
    try:
        asked.result(_SOON_SECONDS)
    except TimeoutError:
        with contextlib.suppress(
            ClusterError
        ):  # A server ends with the call; if one was lost, the chief says that, too.
            idle()
    return desk.take(call, asked, until)


def _some_bytes(message: Message, given: tuple[VariableSpec, ...]) -> None:
    if payload_bytes(given) > _MOST_BYTES:
        raise ProtocolError(f"{payload_bytes(given):,} bytes are too many for one answer: at most {_MOST_BYTES:,}")
