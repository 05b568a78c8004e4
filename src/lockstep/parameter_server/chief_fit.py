"""Chief in a call of ``fit``: runs Keras's loop, and schedules one batch as a task in each of its steps.

The loop runs a little ahead of the workers, so that none waits for it: its logs are those of the finished batches. If the weights are needed,
at an epoch's end or in a callback, the loop waits until every batch is done, and fetches them.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import PEER_LOST, ClusterError
from lockstep._keras.trainer import variables_of
from lockstep.data.keras_adapter import KerasInput
from lockstep.devices.placement import is_rows
from lockstep.parameter_server.gradient_step import count_batch_rows, metric_logs_of, nonempty_parts
from lockstep.parameter_server.sharding import ShardingPlan
from lockstep.parameter_server.staleness import UpdateCounters
from lockstep.parameter_server.state_sync import State, StateSync, differs
from lockstep.parameter_server.task_dispatcher import Result, TaskDispatcher
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.worker_fit import NEWEST_EPOCH, TASKS_PER_WORKER, epoch_key, hook_key

READY = "the servers have values"  # Key that the chief publishes after it has filled the servers.
_KEPT_BYTES = 2**28  # of the batches that a worker keeps because an earlier one may still be assigned to it


class _Update:
    """Scheduled batch.

    Args:
        batch: its number in its pass.
        parts: number of expected results.
        when_done: gets the results in the order of the parts, once.
    """

    def __init__(self, batch: int, parts: int, when_done: Callable[[Sequence[Result]], None]) -> None:
        self.batch, self._when_done = batch, when_done
        self._found: dict[int, Result] = {}
        self._parts, self.is_done = parts, False
        self.error: Exception | None = None

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """Messages of the workers, in the order of the parts."""
        return [self._found[part][0] for part in range(self._parts)]

    def add_part(self, part: int, result: "Future[Result]") -> None:
        """Take the result of a part; called under the lock of the dispatcher."""
        if result.exception() is not None:
            return
        self._found[part] = result.result()
        if len(self._found) == self._parts:
            try:
                self._when_done([self._found[number] for number in range(self._parts)])
            except Exception as error:  # Raised later, in the thread that runs Keras's loop.
                self.error = error
            self.is_done = True


class ChiefFit:
    """Chief in one call of ``fit``.

    It calls ``connect`` once the model is built. In synchronous training each batch has so many ``parts``; with None it is an update
    by itself.
    """

    def __init__(
        self,
        model: keras.Model,
        data: KerasInput,
        dispatcher: TaskDispatcher,
        call: int,
        connect: Callable[[], tuple[ShardingPlan, VariableClient]],
        parts: int | None,
        warn_once: Callable[[str], None],
    ) -> None:
        self._model, self._data, self._dispatcher, self._connect = model, data, dispatcher, connect
        self._parts, self._warn_once = parts, warn_once
        self._client: VariableClient | None = None
        self._keras_state: State | None = None  # as the last step returned it to Keras
        self._in_flight: list[_Update] = []
        self._lock = threading.Lock()
        self._updates = 0
        self._pass_key = ""  # Key of what workers need to know to read the batches of the pass.
        self._hooks_published = self._epochs_published = 0
        self._state_after_steps: State | None = None  # None if a batch was scheduled since.
        self._metric_logs = jax.jit(partial(metric_logs_of, model))
        self._logs: dict[str, Any] = {}
        self._keras_logs: dict[str, Any] = {}  # as the last step returned them to Keras
        self._is_broken = False  # Set during an exchange with the servers, so that none follows a failed one, and after a failed batch.
        self._counters = UpdateCounters()
        data.track_state(None)
        if parts is None:  # In synchronous training, the number of rows of each batch must be known here.
            data.count_without_reading()
        dispatcher.open(call, self._changing_values)

    def begin(self) -> None:
        """Connect to the servers, when Keras's loop has built the model and is about to begin."""
        plan, self._client = self._connect()
        self._state_sync = StateSync(self._model, self._dispatcher, plan, self._client)

    def step(self, state: Any, batch: Any) -> tuple[dict[str, Any], State]:
        """Run Keras's next step: schedule the batch that was taken from the input last."""
        try:
            return self._step(state, batch)
        except Exception:  # No newer state than Keras's can come.
            self._is_broken = True
            raise

    def _step(self, state: Any, batch: Any) -> tuple[dict[str, Any], State]:
        given = self._send_changes(state)
        number_of_pass, number_of_batch = self._data.last_taken
        pass_key = f"pass {number_of_pass}, after {len(self._data.epoch_hooks)} hooks"
        if pass_key != self._pass_key:
            self._pass_key = pass_key
            self._publish_pass()
        self._schedule(number_of_batch, count_batch_rows(batch))
        in_flight = TASKS_PER_WORKER * max(1, self._dispatcher.worker_count)
        kept = math.inf if self._data.source.has_reader else max(in_flight, _KEPT_BYTES // max(1, _size_of(batch)))
        self._collect(0 if self._parts else in_flight - 1, kept)
        self._keras_logs = dict(self._logs)
        return self._keras_logs, given

    def _publish_pass(self) -> None:
        """Publish what workers need to read the pass; each hook by itself, as there may be thousands."""
        metadata = self._data.pass_metadata()
        hooks = metadata.pop("hooks")
        for number in range(self._hooks_published, len(hooks)):
            self._dispatcher.publish(hook_key(number), {"hook": hooks[number]})
        self._hooks_published = len(hooks)
        self._dispatcher.publish(self._pass_key, metadata | {"hook_count": len(hooks)})

    def wait_for_steps(self) -> State | None:
        """Wait until every scheduled batch is done, and return the newest state; None if there is no newer one than Keras's.

        Raises:
            ClusterError: a batch has failed, and no step has raised that.
        """
        if self._client is None or self._keras_state is None or self._is_broken:
            return None
        if self._state_after_steps is not None:
            return self._state_after_steps
        self._is_broken = True
        self._collect(0)
        self._keras_logs.update(self._logs)  # Keras uses this dict as the logs of the epoch.
        self._state_after_steps = self._state_sync.fetch()
        self._is_broken = False
        return self._state_after_steps

    def newest_state(self) -> State | None:
        """Return what :meth:`wait_for_steps` returns; raise ClusterError if the state after the last step is lost, as an older one must not be kept."""
        state = self.wait_for_steps()
        if state is None and self._keras_state is not None:
            self._dispatcher.raise_failure()
            raise ClusterError(
                "ParameterServerStrategy: the servers did not give the state after the last step. Fix: see what they print.",
                PEER_LOST,
            )
        return state

    def publish_epoch(self, epoch: int) -> None:
        """Publish the end of an epoch for the evaluator; only the values of the newest one are kept.

        Args:
            epoch: its number in Keras's loop, which does not begin with 0 if training was resumed.
        """
        # If a resumed run has no step left in its epoch, only the model has them yet.
        newest = self._state_sync.totals.non_trainable or [x.value for x in variables_of(self._model)[1]]
        values = {str(number): np.asarray(value) for number, value in enumerate(newest)}
        number, self._epochs_published = self._epochs_published, self._epochs_published + 1
        newest_epoch = {"number": number, "epoch": epoch, "steps_before": self._state_sync.steps_before}
        self._dispatcher.publish(NEWEST_EPOCH, newest_epoch, values)
        self._dispatcher.publish(epoch_key(number), {})

    def counters(self) -> UpdateCounters:
        """Return the counters, with the staleness that the servers have measured until now."""
        if self._client is not None:
            self._counters.set_staleness(self._client.statistics())
        return self._counters

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _send_changes(self, state: Any) -> State:
        """Send what Keras or a callback has changed since the last step to servers and workers, and return the state for Keras."""
        if state is self._keras_state:
            return self._keras_state  # Neither Keras nor a callback has read or changed it.
        known = self._state_after_steps
        changed = [known is None or differs(state[kind], known[kind]) for kind in range(len(state))]
        self._keras_state = (list(state[0]), list(state[1]), list(state[2]), list(state[3]))
        if any(changed):
            self._collect(0)
            if changed[3]:  # The metrics were reset: the logs are those of an earlier epoch.
                self._logs = {}
            self._is_broken = True
            self._state_sync.broadcast(changed, state, self._updates, self._updates)
            self._is_broken = False
            self._dispatcher.publish(READY, {})
        return self._keras_state

    def _schedule(self, batch: int, rows: int) -> None:
        task = {
            "pass": self._pass_key,
            "batch": batch,
            "lowest": min((update.batch for update in self._in_flight), default=batch),
            "state": self._state_sync.states,
            "steps_before": self._state_sync.steps_before,
            "optimizer": self._state_sync.optimizer_scalars,
            "update": self._updates,
        }
        if self._parts is None:
            tasks = [task]
        else:
            parts = nonempty_parts(rows, self._parts)
            tasks = [task | {"part": part, "parts": parts} for part in range(parts)]
        update = _Update(batch, len(tasks), self._add_results)
        for number, each in enumerate(tasks):
            self._dispatcher.schedule(each, when_done=partial(update.add_part, number))
        self._in_flight.append(update)
        self._updates, self._state_after_steps = self._updates + 1, None

    def _collect(self, most: int, ahead: float = 0) -> None:
        """Wait until at most so many batches are in flight, and at least one is done; then update the logs.

        Args:
            most: number of batches in flight.
            ahead: how many batches after an unfinished one may be done; workers keep as many if they read their input in order.
        """

        def is_enough() -> bool:
            unfinished = [update.batch for update in self._in_flight if not update.is_done]
            is_ahead = bool(unfinished) and self._in_flight[-1].batch - min(unfinished) > ahead
            is_new = len(unfinished) < len(self._in_flight) or bool(self._logs) or not self._in_flight
            return len(unfinished) <= most and not is_ahead and is_new

        self._dispatcher.wait_until(is_enough)
        finished = [update for update in self._in_flight if update.is_done]
        for update in finished:
            if update.error is not None:
                raise update.error
        self._in_flight = [update for update in self._in_flight if not update.is_done]
        if finished:
            self._logs = self._logs_of(finished[-1].reports)

    def _add_results(self, found: Sequence[Result]) -> None:
        """Add the results of a batch; runs in the thread of the last worker's connection, before that worker takes another task."""
        reports, changed = zip(*found, strict=True)
        with self._lock:
            rows = [report["rows"] for report in reports]
            self._state_sync.totals.add(changed, rows, _no_sums(reports))
            self._counters.add(reports)

    def _changing_values(self) -> Mapping[str, np.ndarray]:
        with self._lock:
            return self._state_sync.totals.changing_values()

    def _logs_of(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the logs of all finished batches; logs that no metric gives are those of the last batch."""
        for number in sorted(_no_sums(reports)):
            name = variables_of(self._model)[3][number].path
            self._warn_once(
                f"metric {name!r} does not add up over batches, so the logs show that of the last finished batch"
            )
        with self._lock:
            metrics = list(self._state_sync.totals.metrics)
        metric_logs = self._metric_logs(metrics)
        own = {name: _mean(name, reports) for name in reports[0]["logs"]}
        return {name: own.get(name, metric_logs.get(name)) for name in reports[0]["names"]}


def _size_of(batch: Any) -> int:
    leaves = jax.tree.leaves(batch, is_leaf=is_rows)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _no_sums(reports: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the metrics' variables that do not add up; a worker knows it of those that its batches have changed."""
    return frozenset(number for report in reports for number in report["no_sums"])


def _mean(name: str, reports: Sequence[Mapping[str, Any]]) -> Any:
    """Return a log of a batch in parts: the mean by rows if it is a number, otherwise that of the first part."""
    values = [report["logs"].get(name) for report in reports]
    if not all(isinstance(value, (int, float)) for value in values):
        return values[0]
    weighted = sum(value * report["rows"] for value, report in zip(values, reports, strict=True))
    return weighted / sum(report["rows"] for report in reports)
