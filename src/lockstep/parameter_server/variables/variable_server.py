"""A variable server: a TCP server with one session a client, and the requests that it answers.

Each worker's connection has a thread of its own, which calls :meth:`VariableService.handle` and may wait in it.
"""

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import keras
import numpy as np

from lockstep._arrays import ArraySpec
from lockstep._errors import MAX_SECONDS, OptionError
from lockstep._logging import log_info
from lockstep.distributed.control.admission import first_difference
from lockstep.distributed.control.handshake import HandshakeServer, Peer, RejectionLog, refusal
from lockstep.distributed.control.transport import EventLoop, FramedSocket, ProtocolError, encode
from lockstep.parameter_server.variables.array_transport import (
    ArrayConnection,
    ConnectionLostError,
    Message,
)
from lockstep.parameter_server.variables.optimizer_sharding import check_optimizer
from lockstep.parameter_server.variables.rpc_client import (
    ROWS,
    VALUE,
    check_request,
    decode_gradients,
    decode_row_request,
    read_whole_number,
)
from lockstep.parameter_server.variables.sharding import ShardingPlan
from lockstep.parameter_server.variables.variable_store import (
    NO_RULES,
    CompletedIds,
    Push,
    StalenessBound,
    UpdateRules,
    VariableSnapshot,
    VariableStore,
)

_MESSAGE_SECONDS = 60.0  # Limit of the wait for more of a message that has begun, and for room to send a response.
_MAX_SENTENCE = 300  # Characters: clients may send any text.

Response = tuple[Message, Mapping[str, np.ndarray]]


class ClientSession:
    """One connection of a client; a client that connects again has another session.

    Args:
        peer: the client.
        is_gone: returns whether the client has closed the connection while it waits for a response.
    """

    def __init__(self, peer: Peer, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.peer, self.is_gone = peer, is_gone

    def __str__(self) -> str:
        return str(self.peer)


def seconds_of(message: Message) -> float:
    """Return how long a request may wait; ProtocolError if that is no number of seconds."""
    seconds = message.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds <= MAX_SECONDS:
        return float(seconds)
    raise ProtocolError(f"seconds: expected a number from 0 to {MAX_SECONDS:g}, got {str(seconds)[:40]!r}")


class RequestHandler(Protocol):
    """The service behind a server: :class:`lockstep.parameter_server.variables.variable_server.VariableService` or :class:`lockstep.parameter_server.task_dispatcher.TaskDispatcher`."""

    def check(self, message: Message, given: tuple[ArraySpec, ...]) -> None:
        """Refuse a request by ProtocolError, before its arrays are received."""

    def handle(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        """Return the response to a request, after any wait that it needs; ProtocolError if the request is not allowed."""

    def leave(self, session: ClientSession) -> None:
        """Note that a client has gone."""


class ArrayServer:
    """Serves requests until it is stopped.

    Args:
        me: this process; clients must have the same identity.
        handler: handles the requests.
        listener: a listening socket, which belongs to this object from now on.
        secret: that clients must know; None: none.
        log: takes lines.
    """

    def __init__(
        self,
        me: Peer,
        handler: RequestHandler,
        listener: socket.socket,
        *,
        secret: bytes | None = None,
        log: Callable[[str], None] = log_info,
    ) -> None:
        self._me, self._handler, self._listener = me, handler, listener
        self._loop = EventLoop(f"lockstep-accept-{me.index}")
        self._handshakes = HandshakeServer(self._loop, secret, self._on_peer, log)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def rejections(self) -> RejectionLog:
        """Why connections were closed."""
        return self._handshakes.rejections

    def start(self) -> None:
        """Start to accept connections."""
        self._handshakes.listen(self._listener)
        self._loop.start()

    def stop(self) -> None:
        """Close all connections; updates that have begun are completed."""
        self._stopped.set()
        _shut_down(self._listener)
        self._loop.stop()
        self._listener.close()
        with self._lock:
            sockets = tuple(self._sockets)
        for connected in sockets:
            _shut_down(connected)

    def _on_peer(self, connection: FramedSocket, peer: Peer) -> None:
        """Give an authenticated connection to a thread of its own; called in the thread of the handshakes."""
        found = first_difference(peer.identity, self._me.identity)
        if found is not None:
            name, theirs, ours = found
            self._note_rejection(connection.address, f"{peer}: its {name} is {theirs}, that of the server {ours}")
            sentence = (
                f"its {name} is {theirs}"[:_MAX_SENTENCE] + ", that of the server is another one, which its log has"
            )
            connection.send(encode(refusal(sentence)))
            self._loop.remove(connection)
            return
        connection.send(encode({"kind": "welcome"}))
        self._loop.release(connection)
        threading.Thread(target=self._run, args=(connection, peer), daemon=True).start()

    def _run(self, connection: FramedSocket, peer: Peer) -> None:
        """Serve one connection after its handshake, to its last byte."""
        try:
            connected = connection.detach()
        except ProtocolError as error:
            self._note_rejection(connection.address, f"{peer}: {error}")
            connection.close()
            return
        with self._lock:
            self._sockets.add(connected)
        if self._stopped.is_set():  # It came at the same moment.
            _shut_down(connected)
        try:
            link = ArrayConnection(connected, _MESSAGE_SECONDS, connection.session)
            self._serve(link, ClientSession(peer, is_gone=link.is_closed))
        finally:
            with self._lock:
                self._sockets.discard(connected)
            connected.close()

    def _serve(self, link: ArrayConnection, session: ClientSession) -> None:
        link.limit_unacknowledged(_MESSAGE_SECONDS)
        try:
            while True:
                link.set_timeout(None)  # A worker may compute for as long as it likes.
                link.wait_for_message()
                link.set_timeout(_MESSAGE_SECONDS)
                link.send(*self._handler.handle(session, *link.receive(self._handler.check)))
        except ConnectionLostError:
            pass  # The client has ended, or died: its launcher knows.
        except (ProtocolError, OptionError) as error:  # The request cannot be answered, or the answer is too large.
            self._note_rejection(link.address, f"{session}: {error}")
            link.refuse(refusal(str(error)[:_MAX_SENTENCE]))
        finally:
            self._handler.leave(session)

    def _note_rejection(self, address: str, reason: str) -> None:
        if not self._stopped.is_set():
            self.rejections.add(address, reason)


def _shut_down(connected: socket.socket) -> None:
    """End a connection from any thread: the thread that uses it gets an error, and closes it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


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
            number: number of the update; a part of an update that was already applied is ignored.
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
        max_staleness: see :class:`lockstep.parameter_server.variables.variable_store.StalenessBound`.
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
            self._store.load(*state)
            self._aggregator, self._completed, self._previous = SyncAggregator(version), CompletedIds(task), None
            self._changed.notify_all()
        return {"kind": "filled", "version": self._store.snapshot.version}, {}

    def _push(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        if not self._store.is_filled:
            raise ProtocolError("a gradient came before there were values")
        if self._refuse_nonfinite:
            _check_finite(session, arrays)
        push = Push(decode_gradients(arrays, self._store.specs), _read_weight(message))
        pulled = read_whole_number(message, "pulled")
        with self._changed:
            pushes = self._pushes_to_apply(message, push)
            if pushes and "round" in message:
                self._previous = self._store.snapshot
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
            return self._aggregator.add(number, part, parts, push)
        if "task" in message:
            number = read_whole_number(message, "task")
            self._completed.raise_to(read_whole_number(message, "below") if "below" in message else 0)
            return [push] if self._completed.add(number) else None
        return [push]

    def _pull(self, session: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        requested = decode_row_request(arrays, self._store.specs)
        number = read_whole_number(message, "round") if "round" in message else None
        deadline = time.monotonic() + seconds_of(message)
        worker = None if message.get("will_push") is False else session
        with self._changed:
            while waits_for := self._waits_for(worker, number or 0):
                left = deadline - time.monotonic()
                if left <= 0 or session.is_gone():
                    return {"kind": "late", "waits_for": waits_for}, {}
                self._changed.wait(min(left, _POLL_SECONDS))
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
    rules: UpdateRules = NO_RULES,
    max_staleness: int | None = None,
    refuse_nonfinite: bool = True,
    identity: Mapping[str, object] | None = None,
    secret: bytes | None = None,
    log: Callable[[str], None] = log_info,
) -> ArrayServer:
    """Start a variable server.

    Args:
        number: number of the server.
        plan: assignment of all variables to servers.
        optimizer: optimizer of the model; the server gets a copy of it.
        listener: a listening socket; the server closes it.
        rules: rules of the model's variables.
        max_staleness: see :class:`lockstep.parameter_server.variables.variable_store.StalenessBound`.
        refuse_nonfinite: whether a gradient that is not finite is refused.
        identity: what clients must have in common with the server besides the plan.
        secret: shared with the clients; None: there is none.
        log: takes lines.

    Raises:
        OptionError: the optimizer's update would be another one on servers, or ``max_staleness`` is out of its range.
    """
    check_optimizer(optimizer, plan, rules)
    own = type(optimizer).from_config(optimizer.get_config())
    known = plan.identity_of(number) | dict(identity or {})
    me = Peer(number, plan.servers, socket.gethostname(), os.getpid(), identity=known, information={"job": "ps"})
    service = VariableService(VariableStore(plan.specs_at(number), own, rules), max_staleness, refuse_nonfinite)
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


def _check_finite(session: ClientSession, arrays: Mapping[str, np.ndarray]) -> None:
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
