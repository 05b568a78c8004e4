"""``fit`` on a worker: it computes gradients of its parts of a batch, and sends them to the servers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._keras.trainer import variables_of
from lockstep.data.indexed_batches import IndexedBatches
from lockstep.data.resumable_iterator import EpochHook
from lockstep.execution.step_functions import in_step
from lockstep.fit.checkpointing.preemption import Preemption
from lockstep.parameter_server.gradient_step import (
    GradientResult,
    GradientStep,
    Values,
    check_can_split,
    compare_losses_of_parts,
    count_batch_rows,
    has_nan,
    part_of,
)
from lockstep.parameter_server.sparse_rows import TouchedRows, sparsify
from lockstep.parameter_server.state_sync import (
    STATE,
    Additivity,
    FollowedState,
    StepState,
    compute_deltas,
    merge_rules,
)
from lockstep.parameter_server.task_client import Published, Task, TaskClient, run_tasks
from lockstep.parameter_server.task_dispatcher import Result
from lockstep.parameter_server.variable_client import BatchPart, VariableClient

TASKS_PER_WORKER = 2  # in flight: one that it runs, and one that waits for it
_REPLICAS = 2**16  # more than a worker has
_STOP_SECONDS = 5.0  # in which a signal to this process has come to the chief, too, if it was for all
NEWEST_EPOCH = "newest epoch"  # Key under which the chief publishes the last finished epoch.


def epoch_key(number: int) -> str:
    """Return the key under which the chief publishes that an epoch of this call has ended, counted from 0."""
    return f"epoch {number}"


def hook_key(number: int) -> str:
    """Return the key under which the chief publishes a hook of the data, counted from 0."""
    return f"hook {number}"


class WorkerFit:
    """One worker in one call of ``fit``.

    After a signal to it, which ``preemption`` notices, the worker works until the chief has stopped. It exits if the chief continues: some
    seconds later that schedules more batches than could have been in flight with so many ``workers``.
    """

    def __init__(
        self,
        model: keras.Model,
        step: GradientStep,
        batches: IndexedBatches,
        task_client: TaskClient,
        client: VariableClient,
        call: int,
        log: Callable[[str], None],
        preemption: Preemption | None = None,
        workers: int = 1,
    ) -> None:
        self._model, self._step, self._batches = model, step, batches
        self._preemption, self._workers = preemption, workers
        self._last_in_flight: int | None = None  # Number of an update, if this process was signalled.
        self._task_client, self._client, self._call = task_client, client, call
        rules = merge_rules(model)
        self._touched, self._log = TouchedRows(model, log), log
        model.reset_metrics()
        self._zero_metrics = [np.asarray(variable.value) for variable in variables_of(model)[3]]
        self._pass = ""
        self._followed = FollowedState(rules, lambda: task_client.wait_for(call, STATE))
        self._hooks: list[EpochHook] = []
        self._non_trainable: Values = []
        self._steps_before = 0
        self._additivity = Additivity(rules)
        self._traffic = 0
        self._is_checked = False  # whether the parts of a batch give the numbers of the batch

    def run(self) -> Published:
        """Run tasks until the call ends; errors as for :func:`lockstep.parameter_server.task_client.run_tasks`."""
        return run_tasks(self._task_client, self._call, self._run_task, self._client.pause)

    def _exit_if_chief_continues(self, update: int) -> None:
        """Exit if this process was signalled and the chief was not, as it has scheduled an update that was not in flight then."""
        if self._preemption is None or self._preemption.seconds_signalled < _STOP_SECONDS:
            return
        if self._last_in_flight is None:
            one_more = 1  # of a chief that was signalled between two steps
            self._last_in_flight = update + TASKS_PER_WORKER * self._workers + one_more
        if update > self._last_in_flight:
            self._preemption.exit_alone()

    def _run_task(self, task: Task) -> Result:
        what = task.what
        self._exit_if_chief_continues(what["update"])
        batch = self._batch(what)
        part, parts = what.get("part"), what.get("parts", 1)
        if part is not None:
            if parts > 1 and not self._is_checked:
                self._check_parts(batch, parts)
                self._is_checked = True
            batch = part_of(batch, part, parts)
        rows = count_batch_rows(batch)
        batch_part = None if part is None else BatchPart(what["update"], part, parts)
        self._update_state(what, task.arrays)

        # The first time this compiles the step, for which no other worker waits: the staleness bound begins with the pull below.
        def make() -> Values:
            values = self._pull_values(batch, batch_part, will_push=False)
            return self._compute(values, self._non_trainable, self._zero_metrics, batch).non_trainable

        # A step numbers the replicas of a worker from 0; workers may have different numbers of devices.
        first = 0 if part is None else part if self._step.replicas == 1 else (part + 1) * _REPLICAS
        non_trainable = self._followed.at_step(self._non_trainable, make, what["update"], first)
        values = self._pull_values(batch, batch_part)
        found = self._compute(values, non_trainable, self._zero_metrics, batch)
        if self._touched.has_nan_rows and has_nan(found):
            values = self._pull_values(batch, batch_part, is_whole=True)
            found = self._compute(values, non_trainable, self._zero_metrics, batch)
        self._observe_changes(values, non_trainable, found, batch)
        number = None if batch_part else task.number
        self._client.push(sparsify(found.gradients), weight=rows, part=batch_part, task=number)
        known = self._additivity
        of_model, of_metrics = (found.non_trainable, non_trainable), (found.metrics, self._zero_metrics)
        return self._report(rows, found), compute_deltas(of_model, of_metrics, known.no_sums, known.replaced)

    def _check_parts(self, batch: Any, parts: int) -> None:
        """Check that the parts of a batch give the numbers of the batch."""
        with in_step():
            check_can_split(self._model, batch, parts)
            reason = compare_losses_of_parts(self._model, batch, parts)
        if reason:
            self._log(
                f"Model {self._model.name!r}: it is not checked that the loss of a batch is the mean of the losses of its parts, on which "
                f"max_staleness=0 relies: {reason}"
            )

    def _report(self, rows: int, found: GradientResult) -> dict[str, Any]:
        """Return the message that goes with the deltas; logs that no metric gives are those of this batch alone."""
        own = {name: value for name, value in found.logs.items() if repr(found.metric_logs.get(name)) != repr(value)}
        before, self._traffic = self._traffic, sum(self._client.traffic)
        report = {"rows": rows, "names": list(found.logs), "logs": own, "bytes": self._traffic - before}
        return report | {"no_sums": sorted(self._additivity.no_sums)}

    def _pull_values(
        self, batch: Any, batch_part: BatchPart | None, is_whole: bool = False, will_push: bool = True
    ) -> dict[str, Any]:
        """Return the newest values, or those of a synchronous update; of embeddings the rows that the batch needs, unless ``is_whole``."""
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        if is_whole:
            self._touched.reconsider()
        rows = self._touched.needed_rows(x)
        found = self._client.pull(rows, part=batch_part, will_push=will_push and batch_part is None)
        values = self._touched.full_tables(found, rows)
        if not self._touched.is_decided:
            compute = lambda each: vars(self._compute(each, self._non_trainable, self._zero_metrics, batch))  # noqa: E731
            self._touched.decide(values, x, compute)
        return values

    def _compute(self, values: Mapping[str, Any], non_trainable: Values, metrics: Values, batch: Any) -> GradientResult:
        steps = self._steps_before + max(self._client.versions, default=0)
        return self._step(values, non_trainable, metrics, batch, steps)

    def _batch(self, what: Mapping[str, Any]) -> Any:
        if what["pass"] != self._pass:
            metadata, _ = self._task_client.wait_for(self._call, what["pass"])
            for number in range(len(self._hooks), metadata["hook_count"]):
                self._hooks.append(self._task_client.wait_for(self._call, hook_key(number))[0]["hook"])
            self._batches.begin(metadata | {"hooks": self._hooks})
            self._pass = what["pass"]
        return self._batches.batch(what["batch"], what["lowest"])

    def _update_state(self, what: Mapping[str, Any], newest: Mapping[str, np.ndarray]) -> None:
        """Take over the chief's values of non-trainable variables and of the optimizer, and its count of steps."""
        self._steps_before = what["steps_before"]
        self._step.set_optimizer(what["optimizer"])
        self._non_trainable = self._followed.newest(what["state"], newest)

    def _observe_changes(
        self, values: Mapping[str, Any], non_trainable: Values, found: GradientResult, batch: Any
    ) -> None:
        """Find out whether the changes of what a step changes for the first time add up."""

        def repeat(others: Sequence[np.ndarray], metrics: Sequence[np.ndarray]) -> StepState:
            again = self._compute(values, list(others), list(metrics), batch)
            return again.non_trainable, again.metrics

        before, after = (non_trainable, self._zero_metrics), (found.non_trainable, found.metrics)
        self._additivity.observe(before, after, repeat)
