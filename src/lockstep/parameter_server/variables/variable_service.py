"""Variable server: pulls, pushes, staleness bound and synchronous updates without sockets, and the function that starts a server.

Each worker's connection has a thread of its own, which calls :meth:`VariableService.handle` and may wait in it.
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import jax
import keras
import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._errors import OptionError
from lockstep._logging import log_info
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.tasks.task_queue import CompletedIds
from lockstep.parameter_server.variables.array_transport import Message, ProtocolError
from lockstep.parameter_server.variables.messages import (
    ROWS,
    VALUE,
    check_request,
    decode_gradients,
    decode_row_request,
    read_whole_number,
)
from lockstep.parameter_server.variables.optimizer_sharding import check_optimizer
from lockstep.parameter_server.variables.sharding import ShardingPlan
from lockstep.parameter_server.variables.staleness_bound import StalenessBound
from lockstep.parameter_server.variables.tcp_server import ArrayServer, ClientSession, Response, seconds_of
from lockstep.parameter_server.variables.variable_store import Push, VariableStore

__all__ = ["SyncAggregator", "VariableService", "serve"]

_POLL_SECONDS = 0.25  # How often a waiting request checks whether its worker has disconnected.


class SyncAggregator:
    """Parts of the next update in synchronous training. A part that is pushed twice, after its task was reassigned, counts once.

    Args:
        number: number of updates so far.

    Example:
        >>> aggregator, one, two = SyncAggregator(), Push({}), Push({}, weight=3)
        >>> aggregator.add(0, part=1, parts=2, push=two) is None
        True
        >>> aggregator.add(0, part=0, parts=2, push=one) == [one, two]
        True
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._parts: dict[int, Push] = {}
        self._count = 0

    def add(self, number: int, part: int, parts: int, push: Push) -> list[Push] | None:
        """Add one part.

        Args:
            number: of the update; a part of an update that was already applied is ignored.
            part: number of the part in its global batch, from 0.
            parts: number of parts.
            push: its gradients and weight.

        Returns:
            All parts of the update in their order if this was the last one missing; then the next update begins.

        Raises:
            OptionError: an earlier update is not complete, or the update has another number of parts.
        """
        if number < self.number:
            return None
        if number > self.number or not 0 <= part < parts or self._count not in (0, parts):
            raise OptionError(
                f"part {part} of {parts} of round {number}: round {self.number} is due"
                + (f", which has {self._count} parts." if self._count else ".")
            )
        self._count = parts
        self._parts.setdefault(part, push)
        if len(self._parts) < parts:
            return None
        complete = [self._parts[index] for index in range(parts)]
        self.number, self._parts, self._count = self.number + 1, {}, 0
        return complete


class VariableService:
    """Request handler of one variable server.

    Args:
        store: the variables.
        max_staleness: see :class:`lockstep.parameter_server.variables.staleness_bound.StalenessBound`.
        clock: gives seconds, and is not set back.

    Attributes:
        staleness: by number of updates between a worker's pull and its push, the number of gradients that were applied.
    """

    def __init__(
        self, store: VariableStore, max_staleness: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._clock = store, clock
        self._staleness_bound = StalenessBound(max_staleness)
        self._aggregator, self._completed = SyncAggregator(), CompletedIds()
        self._changed = threading.Condition()
        self.staleness: Counter[int] = Counter()
        self._handlers: dict[str, Callable[[ClientSession, Message, Mapping[str, np.ndarray]], Response]] = {
            "fill": self._fill,
            "push": self._push,
            "pull": self._pull,
            "rest": self._pause,
            "state": self._state,
            "statistics": self._statistics,
        }

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Raise ProtocolError if a request is invalid, before its arrays are received."""
        if message["kind"] not in self._handlers:
            raise ProtocolError(f"there is no {message['kind']!r}")
        state = self._store.optimizer_specs if message["kind"] == "fill" else ()
        check_request(message, given, self._store.specs, state)

    def handle(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        """Return the response to a worker's request; raise ProtocolError if the request is invalid."""
        return self._handlers[message["kind"]](session, message, arrays)

    def leave(self, session: ClientSession) -> None:
        """Forget a worker whose connection has ended, so that no other worker waits for it."""
        with self._changed:
            self._staleness_bound.leave(session)
            self._changed.notify_all()

    def _fill(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        if session.peer.job != "chief":
            raise ProtocolError("only the chief may set the values")
        version, task = read_whole_number(message, "version"), read_whole_number(message, "task")
        state = self._store.prepare({name.removeprefix(VALUE): array for name, array in arrays.items()}, version)
        with self._changed:
            self._store.load(state)
            self._aggregator, self._completed = SyncAggregator(version), CompletedIds(task)
            self._changed.notify_all()
        return {"kind": "filled", "version": self._store.snapshot.version}, {}

    def _push(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        if not self._store.is_filled:
            raise ProtocolError("a gradient came before there were values")
        push = Push(decode_gradients(arrays, self._store.specs), _read_weight(message))
        pulled = read_whole_number(message, "pulled")
        with self._changed:
            pushes = self._pushes_to_apply(message, push)
        version = self._store.apply(pushes) if pushes else None  # Outside the lock: pulls need not wait.
        with self._changed:
            if version is not None:
                self.staleness[max(0, version - 1 - pulled)] += 1
            if "round" not in message:  # Synchronous updates are ordered by their numbers instead.
                self._staleness_bound.tick(session)
            self._changed.notify_all()
        return {"kind": "pushed", "version": self._store.snapshot.version, "was_applied": version is not None}, {}

    def _pushes_to_apply(self, message: Message, push: Push) -> list[Push] | None:
        """Return this push, or all parts of an update that it completes; None if it is a repetition or parts are missing."""
        if "round" in message:
            number, part, parts = (read_whole_number(message, name) for name in ("round", "part", "parts"))
            try:
                return self._aggregator.add(number, part, parts, push)
            except OptionError as error:
                raise ProtocolError(str(error)) from None
        if "task" in message:
            number = read_whole_number(message, "task")
            self._completed.raise_to(read_whole_number(message, "below") if "below" in message else 0)
            return [push] if self._completed.add(number) else None
        return [push]

    def _pull(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        requested = decode_row_request(arrays, self._store.specs)
        at_least = read_whole_number(message, "at_least")
        deadline = self._clock() + seconds_of(message)
        worker = None if message.get("will_push") is False else session
        with self._changed:
            while waits_for := self._waits_for(worker, at_least):
                left = deadline - self._clock()
                if left <= 0 or session.is_gone():
                    return {"kind": "late", "waits_for": waits_for}, {}
                self._changed.wait(min(left, _POLL_SECONDS))
            snapshot = self._store.snapshot
        return {"kind": "values", "version": snapshot.version}, _encode_values(snapshot.values, requested)

    def _waits_for(self, worker: ClientSession | None, at_least: int) -> list[str]:
        if not self._store.is_filled:
            return ["the chief, which sets the first values"]
        if self._store.snapshot.version < at_least:
            return [f"the other parts of update {self._store.snapshot.version + 1}"]
        return self._staleness_bound.blocking_workers(worker) if worker else []

    def _pause(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        with self._changed:
            self._staleness_bound.pause(session)
            self._changed.notify_all()
        return {"kind": "rested"}, {}

    def _state(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        version, state = self._store.state()
        return {"kind": "state", "version": version}, {VALUE + name: array for name, array in state.items()}

    def _statistics(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        with self._changed:
            histogram = [[staleness, count] for staleness, count in sorted(self.staleness.items())]
        return {"kind": "statistics", "updates": self._store.snapshot.version, "staleness": histogram}, {}


def serve(
    number: int,
    plan: ShardingPlan,
    optimizer: keras.optimizers.Optimizer,
    listener: socket.socket,
    *,
    max_staleness: int | None = None,
    identity: Mapping[str, object] | None = None,
    secret: bytes | None = None,
    log: Callable[[str], None] = log_info,
) -> ArrayServer:
    """Start a variable server.

    Args:
        number: of the server.
        plan: assignment of all variables to servers.
        optimizer: of the model; the server gets a copy of it.
        listener: a listening socket; the server closes it.
        max_staleness: see :class:`lockstep.parameter_server.variables.staleness_bound.StalenessBound`.
        identity: what clients must have in common with the server besides the plan.
        secret: shared with the clients; None: there is none.
        log: takes lines.

    Raises:
        OptionError: the optimizer's update would be another one on servers, or ``max_staleness`` is out of its range.
    """
    check_optimizer(optimizer, plan)
    own = type(optimizer).from_config(optimizer.get_config())
    known = plan.identity_of(number) | dict(identity or {})
    me = Peer(number, plan.servers, socket.gethostname(), os.getpid(), identity=known, information={"job": "ps"})
    service = VariableService(VariableStore(plan.specs_at(number), own), max_staleness)
    server = ArrayServer(me, service, listener, secret=secret, log=log)
    server.start()
    return server


def _encode_values(values: Mapping[str, jax.Array], requested: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return values as the arrays of a response: whole variables, or the requested rows."""
    found = {}
    for name, value in values.items():
        if name in requested:
            found[ROWS + name] = np.asarray(value)[requested[name]]
        else:
            found[VALUE + name] = np.asarray(value)
    return found


def _read_weight(message: Message) -> float:
    weight = message.get("weight", 1.0)
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < float("inf"):
        return float(weight)
    raise ProtocolError(f"weight: expected a number above 0, got {str(weight)[:40]!r}")
