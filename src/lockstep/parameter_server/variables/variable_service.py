"""What a server of variables does for its workers, without sockets: each worker's thread calls it, and may wait in it."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep._errors import OptionError
from lockstep.parameter_server.tasks.completed_ids import CompletedIds
from lockstep.parameter_server.variables.array_transport import Message, ProtocolError
from lockstep.parameter_server.variables.messages import ROWS, VALUE, as_gradients, asked_rows, judge, whole
from lockstep.parameter_server.variables.sharding import VariableSpec
from lockstep.parameter_server.variables.staleness_bound import StalenessBound
from lockstep.parameter_server.variables.sync_aggregator import SyncAggregator
from lockstep.parameter_server.variables.tcp_server import ClientSession, Response, seconds_of
from lockstep.parameter_server.variables.variable_store import Push, VariableStore

__all__ = ["VariableService"]

_LOOK_SECONDS = 0.25  # How often a waiting worker is looked after: it may have gone.


class VariableService:
    """Serves one store.

    Args:
        store: the variables.
        max_staleness: see :class:`lockstep.parameter_server.variables.staleness_bound.StalenessBound`.
        clock: gives seconds, and is not set back.

    Attributes:
        staleness: how many gradients were applied so many updates after their worker had pulled the values.
    """

    def __init__(
        self, store: VariableStore, max_staleness: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._clock = store, clock
        self._clocks = StalenessBound(max_staleness)
        self._rounds, self._done = SyncAggregator(), CompletedIds()
        self._changed = threading.Condition()
        self.staleness: Counter[int] = Counter()
        self._answers: dict[str, Callable[[ClientSession, Message, Mapping[str, np.ndarray]], Response]] = {
            "fill": self._fill,
            "push": self._push,
            "pull": self._pull,
            "rest": self._rest,
            "state": self._state,
            "statistics": self._statistics,
        }

    def judge(self, message: Message, given: tuple[VariableSpec, ...]) -> None:
        """Refuse a message by ProtocolError, before its arrays are received."""
        if message["kind"] not in self._answers:
            raise ProtocolError(f"there is no {message['kind']!r}")
        judge(message, given, self._store.specs, self._store.optimizer_specs if message["kind"] == "fill" else ())

    def answer(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        """Do what a worker asks; ProtocolError where that cannot be asked."""
        return self._answers[message["kind"]](visit, message, arrays)

    def leave(self, visit: ClientSession) -> None:
        """A worker has gone: nobody waits for it any more."""
        with self._changed:
            self._clocks.leave(visit)
            self._changed.notify_all()

    def _fill(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        if visit.peer.job != "chief":
            raise ProtocolError("only the chief may set the values")
        with self._changed:
            version = whole(message, "version")
            self._store.fill({name.removeprefix(VALUE): array for name, array in arrays.items()}, version)
            self._rounds, self._done = SyncAggregator(version), CompletedIds(whole(message, "task"))
            self._changed.notify_all()
        return {"kind": "filled", "version": self._store.snapshot.version}, {}

    def _push(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        if not self._store.is_filled:
            raise ProtocolError("a gradient came before there were values")
        push, pulled = Push(as_gradients(arrays, self._store.specs), _weight(message)), whole(message, "pulled")
        with self._changed:
            pushes = self._due(message, push)
        version = self._store.apply(pushes) if pushes else None  # Who pulls meanwhile need not wait.
        with self._changed:
            if version is not None:
                self.staleness[max(0, version - 1 - pulled)] += 1
            if "round" not in message:  # Rounds hold together by their numbers.
                self._clocks.tick(visit)
            self._changed.notify_all()
        return {"kind": "pushed", "version": self._store.snapshot.version, "was_applied": version is not None}, {}

    def _due(self, message: Message, push: Push) -> list[Push] | None:
        """What is to be applied now: this push, or all parts of a round that is complete; nothing, where it came before."""
        if "round" in message:
            number, part, parts = (whole(message, name) for name in ("round", "part", "parts"))
            try:
                return self._rounds.add(number, part, parts, push)
            except OptionError as error:
                raise ProtocolError(str(error)) from None
        if "task" in message:
            number = whole(message, "task")
            self._done.raise_to(whole(message, "below") if "below" in message else 0)
            return [push] if self._done.add(number) else None
        return [push]

    def _pull(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        asked = asked_rows(arrays, self._store.specs)
        at_least = whole(message, "at_least")
        deadline = self._clock() + seconds_of(message)
        who = None if message.get("takes_part") is False else visit
        with self._changed:
            while waits_for := self._waits_for(who, at_least):
                left = deadline - self._clock()
                if left <= 0 or visit.is_gone():
                    return {"kind": "late", "waits_for": waits_for}, {}
                self._changed.wait(min(left, _LOOK_SECONDS))
            snapshot = self._store.snapshot
        return {"kind": "values", "version": snapshot.version}, _selected(snapshot.values, asked)

    def _waits_for(self, visit: ClientSession | None, at_least: int) -> list[str]:
        if not self._store.is_filled:
            return ["the chief, which sets the first values"]
        if self._store.snapshot.version < at_least:
            return [f"the other parts of update {self._store.snapshot.version + 1}"]
        return self._clocks.holds_up(visit) if visit else []

    def _rest(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        with self._changed:
            self._clocks.rest(visit)
            self._changed.notify_all()
        return {"kind": "rested"}, {}

    def _state(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        version, state = self._store.state()
        return {"kind": "state", "version": version}, {VALUE + name: array for name, array in state.items()}

    def _statistics(self, visit: ClientSession, message: Message, arrays: Mapping[str, np.ndarray]) -> Response:
        with self._changed:
            histogram = [[staleness, count] for staleness, count in sorted(self.staleness.items())]
        return {"kind": "statistics", "updates": self._store.snapshot.version, "staleness": histogram}, {}


def _selected(values: Mapping[str, Any], asked: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Values as they travel: whole, or the rows that were asked for."""
    found = {}
    for name, value in values.items():
        if name in asked:
            found[ROWS + name] = np.asarray(value)[asked[name]]
        else:
            found[VALUE + name] = np.asarray(value)
    return found


def _weight(message: Message) -> float:
    weight = message.get("weight", 1.0)
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < float("inf"):
        return float(weight)
    raise ProtocolError(f"weight: expected a number above 0, got {str(weight)[:40]!r}")
