"""What the chief does in a call of ``fit``: Keras's loop runs here, and each of its steps hands out one batch.

The loop runs a little ahead of the workers, so that none waits for it: logs are those of the batches that are done. Wherever somebody
wants the weights, at an epoch's end or in a callback, the loop waits until every batch is done, and fetches them.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import keras
import numpy as np

from lockstep.asynchronous.differences import Totals
from lockstep.asynchronous.parts import busy_parts, count_batch_rows
from lockstep.asynchronous.statistics import Count
from lockstep.asynchronous.step import names_of
from lockstep.data.inputs import Input
from lockstep.parameters.client import VariableClient
from lockstep.parameters.desk import Desk, Result
from lockstep.parameters.optimizer_state import joined_optimizer, split_optimizer
from lockstep.parameters.shards import Plan
from lockstep.resume.variables import variables_of

__all__ = ["ChiefFit"]

_AHEAD = 2  # pieces for each worker: one that it does, and one that waits for it

State = tuple[list[Any], list[Any], list[Any], list[Any]]  # trainable, other, optimizer's and metrics' values


class ChiefFit:
    """The chief in one call of ``fit``.

    Args:
        model: is compiled.
        data: its input.
        desk: where workers take batches; the call is open.
        connect: gives, once the model is built, where its variables are and the way there.
        parts: into how many parts a batch is cut, in synchronous training; None: each batch is an update of its own.
        tell: takes a sentence about the model.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Input,
        desk: Desk,
        connect: Callable[[], tuple[Plan, VariableClient]],
        parts: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._model, self._data, self._desk, self._connect = model, data, desk, connect
        self._parts, self._tell = parts, tell
        self._plan: Plan | None = None
        self._client: VariableClient | None = None
        self._given: State | None = None  # what Keras has, as the last step gave it
        self._waiting: dict[int, tuple[int, list[Future[Result]]]] = {}  # batches under way: number in their pass, and parts
        self._updates = self._states = self._pass = 0
        self._logs: dict[str, Any] = {}
        self.count = Count()
        data.keep_position(None, is_expecting=False)

    def step(self, state: Any, batch: Any) -> tuple[dict[str, Any], State]:
        """Keras's next step: hand out the batch that was taken just now."""
        self._take_over(state)
        place = self._data.taken_last
        if place[0] != self._pass:
            self._pass = place[0]
            self._desk.tell(f"pass {self._pass}", self._data.facts_of_pass())
        self._hand_out(place[1], count_batch_rows(batch))
        self._collect(0 if self._parts else _AHEAD * max(1, self._desk.workers) - 1)
        return dict(self._logs), self._state

    def settle(self) -> State | None:
        """Wait until every batch that was handed out is done; then the values of everything. None: there is nothing newer."""
        if self._client is None or self._given is None:
            return None
        self._collect(0)
        states = self._client.state()
        values = _joined(self._plan_now, [arrays for _, arrays in states])
        trainable = [values[name] for name in names_of(self._model)]
        optimizer = joined_optimizer(self._model.optimizer, self._plan_now, [arrays for _, arrays in states])
        self._given = _on_devices((trainable, self._totals.others, optimizer, self._totals.metrics))
        return self._given

    def statistics(self) -> Count:
        """What was counted until now."""
        if self._client is not None:
            self.count.take_staleness(self._client.statistics())
        return self.count

    def close(self) -> None:
        """End the connections."""
        if self._client is not None:
            self._client.close()

    @property
    def _plan_now(self) -> Plan:
        if self._plan is None:
            self._plan, self._client = self._connect()
            self._totals = Totals(self._model)
        return self._plan

    @property
    def _state(self) -> State:
        """What Keras gets: values that are newer are fetched where somebody wants them."""
        if self._given is None:
            raise RuntimeError("no step was made yet")
        return self._given

    def _take_over(self, state: Any) -> None:
        """What Keras or a callback has changed since the last step goes to the servers and workers."""
        plan = self._plan_now
        changed = [True] * 4 if self._given is None else [_differs(*pair) for pair in zip(state, self._given, strict=True)]
        if not any(changed):
            return
        self._collect(0)
        trainable, others, optimizer, metrics = ([np.asarray(value) for value in part] for part in state)
        self._totals.set(others, metrics)
        self._given = tuple(list(part) for part in state)  # type: ignore[assignment]
        if (changed[0] or changed[2]) and self._client is not None:
            values = dict(zip(names_of(self._model), trainable, strict=True))
            known = split_optimizer(self._model.optimizer, plan, optimizer)
            self._client.fill(values, known, version=self._updates, task=self._updates)
        if changed[1]:
            self._states += 1
            about = {"number": self._states, "update": self._updates}
            self._desk.tell("state", about, {str(n): value for n, value in enumerate(self._totals.others)})

    def _hand_out(self, batch: int, rows: int) -> None:
        lowest = min((number for number, _ in self._waiting.values()), default=batch)
        about = {"pass": self._pass, "batch": batch, "lowest": lowest, "state": self._states, "update": self._updates}
        newest = self._totals.newest()
        if self._parts is None:
            found = [self._desk.schedule(about, newest)]
        else:
            parts = busy_parts(rows, self._parts)
            found = [self._desk.schedule(about | {"part": part, "parts": parts}, newest) for part in range(parts)]
        self._waiting[self._updates] = (batch, found)
        self._updates += 1

    def _collect(self, most: int) -> None:
        """Wait until at most so many batches are under way and one is done at least; add up what they have changed."""

        def is_enough() -> bool:
            done = sum(_is_done(parts) for _, parts in self._waiting.values())
            return len(self._waiting) - done <= most and (done > 0 or bool(self._logs) or not self._waiting)

        self._desk.wait(is_enough)
        for number in [number for number, (_, parts) in self._waiting.items() if _is_done(parts)]:
            self._add([part.result() for part in self._waiting.pop(number)[1]])

    def _add(self, found: Sequence[Result]) -> None:
        told, changed = zip(*found, strict=True)
        no_sums = frozenset(told[0]["no_sums"])
        for number in no_sums:
            name = variables_of(self._model)[3][number].path
            self._tell(f"metric {name!r} does not add up over batches, so what is shown is that of the last batch that was done")
        self._totals.add(changed, [one["rows"] for one in told], no_sums)
        self.count.add(told)
        measured = self._measured([np.asarray(value) for value in self._totals.metrics])
        own = {name: _mean(name, told) for name in told[0]["logs"]}
        self._logs = {name: own.get(name, measured.get(name)) for name in told[0]["names"]}

    @property
    def _measured(self) -> Callable[[list[Any]], dict[str, Any]]:
        if self._compiled is None:
            self._compiled = jax.jit(self._result)
        return self._compiled

    _compiled: Any = None

    def _result(self, metrics: list[Any]) -> dict[str, Any]:
        pairs = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return self._model.get_metrics_result()


def _joined(plan: Plan, parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Each variable from its shards."""
    found = {}
    for name, shards in plan.shards.items():
        pieces = [parts[shard.server][shard.spec.name] for shard in shards]
        found[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return found


def _on_devices(state: Any) -> State:
    trainable, others, optimizer, metrics = ([jax.numpy.asarray(value) for value in part] for part in state)
    return trainable, others, optimizer, metrics


def _differs(new: Sequence[Any], old: Sequence[Any]) -> bool:
    pairs = zip(new, old, strict=True)
    return any(one is not other and np.asarray(one).tobytes() != np.asarray(other).tobytes() for one, other in pairs)


def _is_done(parts: Sequence[Future[Result]]) -> bool:
    return all(part.done() for part in parts)


def _mean(name: str, told: Sequence[Mapping[str, Any]]) -> Any:
    """A log of its own of a batch in parts: the mean by rows where it is a number, else that of the first."""
    values = [one["logs"].get(name) for one in told]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    return sum(value * one["rows"] for value, one in zip(values, told, strict=True)) / sum(one["rows"] for one in told)
