"""What the chief does in a call of ``fit``: Keras's loop runs here, and each of its steps hands out one batch.

The loop runs a little ahead of the workers, so that none waits for it: logs are those of the batches that are done. Wherever somebody
wants the weights, at an epoch's end or in a callback, the loop waits until every batch is done, and fetches them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import jax
import keras
import numpy as np

from lockstep.data.keras_adapter import KerasInput
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.batch_shards import busy_parts, count_batch_rows
from lockstep.parameter_server.evaluator import epoch_key
from lockstep.parameter_server.staleness_metrics import UpdateCounters
from lockstep.parameter_server.state_sync import State, StateSync, differs
from lockstep.parameter_server.tasks.task_dispatcher import Result, TaskDispatcher
from lockstep.parameter_server.variables.sharding import ShardingPlan
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["READY", "ChiefFit"]

READY = "the servers have values"
_AHEAD = 2  # pieces for each worker: one that it does, and one that waits for it


class _Update:
    """A batch that was handed out.

    Args:
        batch: its number in its pass.
        parts: number of results that are to come.
        when_done: gets them in their order, once.
    """

    def __init__(self, batch: int, parts: int, when_done: Callable[[Sequence[Result]], None]) -> None:
        self.batch, self._when_done = batch, when_done
        self._found: dict[int, Result] = {}
        self._parts, self.is_done = parts, False
        self.error: Exception | None = None

    @property
    def told(self) -> list[Mapping[str, Any]]:
        """What came with the parts."""
        return [self._found[part][0] for part in range(self._parts)]

    def take(self, part: int, result: "Future[Result]") -> None:
        """A part is done; called under the lock of the desk."""
        if result.exception() is not None:
            return
        self._found[part] = result.result()
        if len(self._found) == self._parts:
            try:
                self._when_done([self._found[number] for number in range(self._parts)])
            except Exception as error:  # This thread is not the one that waits.
                self.error = error
            self.is_done = True


class ChiefFit:
    """The chief in one call of ``fit``.

    Args:
        model: is compiled.
        data: its input.
        desk: where workers take batches.
        call: number of this call.
        connect: gives, once the model is built, where its variables are and the way there.
        parts: into how many parts a batch is cut, in synchronous training; None: each batch is an update of its own.
        tell: takes a sentence about the model.
    """

    def __init__(
        self,
        model: keras.Model,
        data: KerasInput,
        desk: TaskDispatcher,
        call: int,
        connect: Callable[[], tuple[ShardingPlan, VariableClient]],
        parts: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._model, self._data, self._desk, self._connect = model, data, desk, connect
        self._parts, self._tell = parts, tell
        self._client: VariableClient | None = None
        self._given: State | None = None  # what Keras has, as the last step gave it
        self._waiting: list[_Update] = []
        self._lock = threading.Lock()
        self._updates = 0
        self._reading = ""  # what workers need to know to read the batches that are handed out
        self._newest_state: State | None = None  # as settled; None where a batch was handed out since
        self._logs: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}  # what Keras was given last
        self._is_lost = False
        self.count = UpdateCounters()
        data.track_state(None, awaits_state=False)
        if parts is None:  # Else the number of rows of each batch must be known.
            data.count_without_reading()
        desk.open(call, self._newest)

    def begin(self) -> None:
        """Keras's loop has built the model, and is about to begin."""
        plan, self._client = self._connect()
        self._exchange = StateSync(self._model, self._desk, plan, self._client)

    def step(self, state: Any, batch: Any) -> tuple[dict[str, Any], State]:
        """Keras's next step: hand out the batch that was taken just now."""
        given = self._taken_over(state)
        place = self._data.last_taken
        reading = f"pass {place[0]}, after {len(self._data.epoch_hooks)} hooks"
        if reading != self._reading:
            self._reading = reading
            self._desk.tell(reading, self._data.pass_metadata())
        self._hand_out(place[1], count_batch_rows(batch))
        self._collect(0 if self._parts else _AHEAD * max(1, self._desk.workers) - 1)
        self._shown = dict(self._logs)
        return self._shown, given

    def settle(self) -> State | None:
        """Wait until every batch that was handed out is done; then the values of everything. None: there is nothing newer."""
        if self._client is None or self._given is None or self._is_lost or self._desk.has_failed:
            return None
        if self._newest_state is not None:
            return self._newest_state
        self._is_lost = True  # Until it is not: after an error nothing is fetched any more.
        self._collect(0)
        self._shown.update(self._logs)  # Keras takes them for the epoch.
        self._newest_state = self._exchange.newest()
        self._is_lost = False
        return self._newest_state

    def tell_of_epoch(self, epoch: int) -> None:
        """An epoch has ended: the evaluator may look at what has come of it."""
        others = {str(number): value for number, value in enumerate(self._exchange.totals.others)}
        self._desk.tell("newest epoch", {"epoch": epoch})
        self._desk.tell(epoch_key(epoch), {"epoch": epoch}, others)

    def statistics(self) -> UpdateCounters:
        """What was counted until now."""
        if self._client is not None:
            self.count.take_staleness(self._client.statistics())
        return self.count

    def close(self) -> None:
        """End the connections."""
        if self._client is not None:
            self._client.close()

    def _taken_over(self, state: Any) -> State:
        """The state for Keras; what it or a callback has changed since the last step goes to the servers and workers."""
        if state is self._given:
            return self._given  # Nobody has looked at it since.
        known = self._newest_state
        changed = [known is None or differs(state[kind], known[kind]) for kind in range(len(state))]
        self._given = (list(state[0]), list(state[1]), list(state[2]), list(state[3]))
        if any(changed):
            self._collect(0)
            self._is_lost = True
            self._exchange.spread(changed, state, self._updates, self._updates)
            self._is_lost = False
            self._desk.tell(READY, {})
        return self._given

    def _hand_out(self, batch: int, rows: int) -> None:
        lowest = min((update.batch for update in self._waiting), default=batch)
        about = {
            "pass": self._reading,
            "batch": batch,
            "lowest": lowest,
            "state": self._exchange.states,
            "update": self._updates,
        }
        if self._parts is None:
            pieces = [about]
        else:
            parts = busy_parts(rows, self._parts)
            pieces = [about | {"part": part, "parts": parts} for part in range(parts)]
        update = _Update(batch, len(pieces), self._add)
        for number, piece in enumerate(pieces):
            self._desk.schedule(piece, when_done=partial(update.take, number))
        self._waiting.append(update)
        self._updates, self._newest_state = self._updates + 1, None

    def _collect(self, most: int) -> None:
        """Wait until at most so many batches are under way, and one is done at least."""

        def is_enough() -> bool:
            done = sum(update.is_done for update in self._waiting)
            return len(self._waiting) - done <= most and (done > 0 or bool(self._logs) or not self._waiting)

        self._desk.wait(is_enough)
        finished = [update for update in self._waiting if update.is_done]
        for update in finished:
            if update.error is not None:
                raise update.error
        self._waiting = [update for update in self._waiting if not update.is_done]
        if finished:
            self._logs = self._logs_of(finished[-1].told)

    def _add(self, found: Sequence[Result]) -> None:
        """A batch is done; in the thread of whoever has brought its last part, before that takes another one."""
        told, changed = zip(*found, strict=True)
        with self._lock:
            self._exchange.totals.add(changed, [one["rows"] for one in told], frozenset(told[0]["no_sums"]))
            self.count.add(told)

    def _newest(self) -> Mapping[str, np.ndarray]:
        with self._lock:
            return self._exchange.totals.newest()

    def _logs_of(self, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of all batches that are done; what no metric gives is that of the last one."""
        for number in told[0]["no_sums"]:
            name = variables_of(self._model)[3][number].path
            self._tell(
                f"metric {name!r} does not add up over batches, so what is shown is that of the last batch that was done"
            )
        with self._lock:
            measured = self._measured(list(self._exchange.totals.metrics))
        own = {name: _mean(name, told) for name in told[0]["logs"]}
        return {name: own.get(name, measured.get(name)) for name in told[0]["names"]}

    @cached_property
    def _measured(self) -> Callable[[list[Any]], dict[str, Any]]:
        return jax.jit(self._result)

    def _result(self, metrics: list[Any]) -> dict[str, Any]:
        pairs = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return self._model.get_metrics_result()


def _mean(name: str, told: Sequence[Mapping[str, Any]]) -> Any:
    """A log of its own of a batch in parts: the mean by rows where it is a number, else that of the first."""
    values = [one["logs"].get(name) for one in told]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    return sum(value * one["rows"] for value, one in zip(values, told, strict=True)) / sum(one["rows"] for one in told)
