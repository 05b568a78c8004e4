"""A variable server: the requests that it answers, and its process. ``variable_store`` applies the optimizer."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import jax
import keras
import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._keras.trainer import optimizer_maker
from lockstep._logging import log_info
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.transport import ProtocolError
from lockstep.parameter_server.array_transport import Arrays, Message
from lockstep.parameter_server.messages import ROWS, VALUE, check_request, decode_gradients, decode_row_request
from lockstep.parameter_server.rpc import (
    POLL_SECONDS,
    ArrayServer,
    ClientSession,
    Response,
    read_whole_number,
    seconds_of,
)
from lockstep.parameter_server.sharding import ShardingPlan
from lockstep.parameter_server.staleness import StalenessBound
from lockstep.parameter_server.variable_store import (
    NO_RULES,
    CompletedIds,
    Push,
    UpdateRules,
    VariableSnapshot,
    VariableStore,
)


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
            number: number of the update; a part of an update that was already applied is ignored.
            part: number of the part in its global batch, from 0.
            parts: number of parts.
            push: its gradients and weight.

        Returns:
            All parts of the update in their order if this was the last one missing; then the next update begins.

        Raises:
            ProtocolError: an earlier update is not complete, or the update has another number of parts.
        """
        if number < self.number:
            return None
        if number > self.number or not 0 <= part < parts or self._count not in (0, parts):
            raise ProtocolError(
                f"part {part} of {parts} of update {number}: update {self.number} is due"
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
        max_staleness: see :class:`lockstep.parameter_server.staleness.StalenessBound`.
        refuse_nonfinite: whether a gradient that is not finite is refused.

    Attributes:
        staleness: by number of updates between a worker's pull and its push, the number of gradients that were applied.
    """

    def __init__(
        self,
        store: VariableStore,
        max_staleness: int | None = None,
        refuse_nonfinite: bool = True,
    ) -> None:
        self._store, self._refuse_nonfinite = store, refuse_nonfinite
        self._staleness_bound = StalenessBound(max_staleness)
        self._aggregator, self._completed = SyncAggregator(), CompletedIds()
        self._previous: VariableSnapshot | None = None  # Before the last synchronous update, until the next one begins.
        self._changed = threading.Condition()
        self._chief: ClientSession | None = (
            None  # The first one that has set values: a chief has one connection in a call.
        )
        self._being_applied: set[tuple[str, int]] = set()
        self.staleness: Counter[int] = Counter()
        self._handlers: dict[str, Callable[[ClientSession, Message, Arrays], Response]] = {
            "fill": self._fill,
            "push": self._push,
            "pull": self._pull,
            "pause": self._pause,
            "state": self._state,
            "statistics": self._statistics,
        }

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Raise ProtocolError if a request is invalid, before its arrays are received."""
        if message["kind"] not in self._handlers:
            raise ProtocolError(f"there is no {message['kind']!r}")
        state = self._store.optimizer_specs if message["kind"] == "fill" else ()
        check_request(message, given, self._store.specs, state)

    def handle(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        """Return the response to a worker's request; raise ProtocolError if the request is invalid."""
        return self._handlers[message["kind"]](session, message, arrays)

    def leave(self, session: ClientSession) -> None:
        """Forget a worker whose connection has ended, so that no other worker waits for it."""
        with self._changed:
            self._staleness_bound.leave(session)
            self._changed.notify_all()

    def _fill(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        if session.peer.job != "chief":
            raise ProtocolError("only the chief may set the values")
        version, task = read_whole_number(message, "version"), read_whole_number(message, "task")
        state = self._store.prepare({name.removeprefix(VALUE): array for name, array in arrays.items()}, version)
        with self._changed:
            if self._chief not in (None, session):
                raise ProtocolError(
                    f"two processes say that they are the chief: {self._chief} has set values before {session}. Fix: start one process "
                    "as the chief"
                )
            self._chief = session
            self._store.load(*state)
            self._aggregator, self._completed, self._previous = SyncAggregator(version), CompletedIds(task), None
            self._changed.notify_all()
        return {"kind": "filled"}, {}

    def _push(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        if not self._store.is_filled:
            raise ProtocolError("a gradient came before there were values")
        if self._refuse_nonfinite:
            _check_finite(session, arrays)
        push = Push(decode_gradients(arrays, self._store.specs), _read_weight(message))
        pulled = read_whole_number(message, "pulled")
        with self._changed:
            pushes = self._pushes_to_apply(message, push)
            name = next(((kind, message[kind]) for kind in ("update", "task") if kind in message), None)
            if pushes and "update" in message:
                self._previous = self._store.snapshot
            if pushes and name:
                self._being_applied.add(name)
            elif name:  # The chief takes a repeated push for done, and its first one may not be in the values yet. The client has a limit.
                while name in self._being_applied and not session.is_gone():
                    self._changed.wait(POLL_SECONDS)
        try:
            version = self._store.apply(pushes) if pushes else None  # Outside the lock: pulls need not wait.
        finally:
            if pushes and name:
                with self._changed:
                    self._being_applied.discard(name)
                    self._changed.notify_all()
        with self._changed:
            if version is not None:
                self.staleness[max(0, version - 1 - pulled)] += 1
            if "update" not in message:  # Synchronous updates are ordered by their numbers instead.
                self._staleness_bound.tick(session)
            self._changed.notify_all()
        return {"kind": "pushed", "version": self._store.snapshot.version, "was_applied": version is not None}, {}

    def _pushes_to_apply(self, message: Message, push: Push) -> list[Push] | None:
        """Return this push, or all parts of an update that it completes; None if it is a repetition or parts are missing."""
        if "update" in message:
            number, part, parts = (read_whole_number(message, name) for name in ("update", "part", "parts"))
            return self._aggregator.add(number, part, parts, push)
        if "task" in message:
            number = read_whole_number(message, "task")
            self._completed.raise_to(read_whole_number(message, "below") if "below" in message else 0)
            return [push] if self._completed.add(number) else None
        return [push]

    def _pull(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        requested = decode_row_request(arrays, self._store.specs)
        number = read_whole_number(message, "update") if "update" in message else None
        deadline = time.monotonic() + seconds_of(message)
        worker = None if message.get("will_push") is False else session
        with self._changed:
            while waits_for := self._waits_for(worker, number or 0):
                left = deadline - time.monotonic()
                if left <= 0 or session.is_gone():
                    return {"kind": "late", "waits_for": waits_for}, {}
                self._changed.wait(min(left, POLL_SECONDS))
            snapshot = self._store.snapshot if number is None else self._snapshot_before(number)
        return {"kind": "values", "version": snapshot.version}, _encode_values(snapshot.values, requested)

    def _snapshot_before(self, number: int) -> VariableSnapshot:
        """Return the values before a synchronous update, which may be applied already: the worker of a part may be lost after its push.

        The chief begins an update when all parts of the one before are finished. A part of an older one counts no more.
        """
        if self._previous is not None and self._previous.version < number:
            self._previous = None
        return self._store.snapshot if self._previous is None else self._previous

    def _waits_for(self, worker: ClientSession | None, at_least: int) -> list[str]:
        if not self._store.is_filled:
            return ["the chief, which sets the first values"]
        if self._store.snapshot.version < at_least:
            return [f"the other parts of update {self._store.snapshot.version + 1}"]
        return self._staleness_bound.blocking_workers(worker) if worker else []

    def _pause(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        with self._changed:
            self._staleness_bound.pause(session)
            self._changed.notify_all()
        return {"kind": "paused"}, {}

    def _state(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        return {"kind": "state"}, {VALUE + name: array for name, array in self._store.state().items()}

    def _statistics(self, session: ClientSession, message: Message, arrays: Arrays) -> Response:
        with self._changed:
            histogram = [[staleness, count] for staleness, count in sorted(self.staleness.items())]
        return {"kind": "statistics", "updates": self._store.snapshot.version, "staleness": histogram}, {}


def serve(
    me: Peer,
    plan: ShardingPlan,
    optimizer: keras.optimizers.Optimizer,
    listener: socket.socket,
    *,
    rules: UpdateRules = NO_RULES,
    max_staleness: int | None = None,
    refuse_nonfinite: bool = True,
    secret: bytes | None = None,
    log: Callable[[str], None] = log_info,
) -> ArrayServer:
    """Start a variable server, which gets a copy of the model's optimizer, and closes the listener when it stops.

    Args:
        me: this server; clients must have the same identity, which has that of the plan.
        plan: assignment of all variables to servers.
        optimizer: optimizer of the model, as :func:`lockstep.parameter_server.optimizer_sharding.check_optimizer` accepts it.
        listener: a listening socket.
        rules: rules of the model's variables.
        max_staleness: see :class:`lockstep.parameter_server.staleness.StalenessBound`.
        refuse_nonfinite: whether a gradient that is not finite is refused.
        secret: shared with the clients; None: there is none.
        log: takes lines.

    Raises:
        OptionError: Keras cannot copy the optimizer, or ``max_staleness`` is out of its range.
    """
    own = optimizer_maker(optimizer)()
    service = VariableService(VariableStore(plan.specs_at(me.index), own, rules), max_staleness, refuse_nonfinite)
    server = ArrayServer(me, service, listener, secret=secret, log=log)
    server.start()
    return server


def _encode_values(values: Mapping[str, jax.Array], requested: Arrays) -> dict[str, np.ndarray]:
    """Return values as the arrays of a response: whole variables, or the requested rows."""
    found = {}
    for name, value in values.items():
        if name in requested:
            found[ROWS + name] = np.asarray(value)[requested[name]]
        else:
            found[VALUE + name] = np.asarray(value)
    return found


def _check_finite(session: ClientSession, arrays: Arrays) -> None:
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ProtocolError(
                f"{session} has pushed a gradient of {name.partition('/')[2]!r} that is not finite. Fix: check its data, and lower the "
                "learning rate"
            )


def _read_weight(message: Message) -> float:
    weight = message.get("weight", 1.0)
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < float("inf"):
        return float(weight)
    raise ProtocolError(f"weight: expected a number above 0, got {str(weight)[:40]!r}")
