"""What a worker does in a call of ``fit``: it takes batches from the chief, by number, and brings their gradients to the servers."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from lockstep.data.indexed_batches import IndexedBatches
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.batch_shards import count_batch_rows, part_of, refuse_all_but_means
from lockstep.parameter_server.gradient_step import GradientResult, GradientStep
from lockstep.parameter_server.seed_offsets import SeedOffsets
from lockstep.parameter_server.state_deltas import DeltaAccumulator, differences, is_sum, merges
from lockstep.parameter_server.state_sync import STATE
from lockstep.parameter_server.tasks.task_client import CallEnded, Task, TaskClient, work
from lockstep.parameter_server.tasks.task_dispatcher import Result
from lockstep.parameter_server.variables.sparse_rows import TouchedRows, as_rows
from lockstep.parameter_server.variables.variable_client import BatchPart, VariableClient

__all__ = ["WorkerFit"]

Values = list[np.ndarray]


class WorkerFit:
    """One worker in one call of ``fit``.

    Args:
        model: is built and compiled.
        step: computes its gradients.
        batches: of its input.
        desk: the chief's.
        client: to the servers.
        call: number of the call.
        announce: takes a line.
    """

    def __init__(
        self,
        model: keras.Model,
        step: GradientStep,
        batches: IndexedBatches,
        desk: TaskClient,
        client: VariableClient,
        call: int,
        announce: Callable[[str], object],
    ) -> None:
        self._model, self._step, self._batches = model, step, batches
        self._desk, self._client, self._call = desk, client, call
        self._merges = merges(model)
        self._touched = TouchedRows(model, announce)
        model.reset_metrics()
        self._zero = [np.asarray(variable.value) for variable in variables_of(model)[3]]
        self._pass, self._state = "", -1
        self._others: Values = []
        self._first_update = 0
        self._draws: SeedOffsets | None = None
        self._no_sums: frozenset[int] = frozenset()
        self._traffic = 0

    def run(self) -> CallEnded:
        """Work until the call is over; errors as for :func:`lockstep.parameter_server.tasks.task_client.work`."""
        return work(self._desk, self._call, self._do, self._client.rest)

    def _do(self, piece: Task) -> Result:
        about = piece.what
        batch = self._batch(about)
        part, parts = about.get("part"), about.get("parts", 1)
        if part is not None:
            if parts > 1 and self._draws is None:
                refuse_all_but_means(self._model, batch, parts)
            batch = part_of(batch, part, parts)
        rows = count_batch_rows(batch)
        place = None if part is None else BatchPart(about["update"], part, parts)
        self._take_over(about, piece.arrays)
        values = self._pulled(batch, place)
        others = self._learned_from(values, batch).seeded(self._others, about["update"] - self._first_update, part or 0)
        found = self._compute(values, others, self._zero, batch)
        task = None if place else piece.number
        self._client.push(as_rows(found.gradients), weight=rows, part=place, task=task).wait()
        changed = differences((found.others, others), (found.metrics, self._zero), self._no_sums)
        return self._described(rows, found), changed

    def _described(self, rows: int, found: GradientResult) -> dict[str, Any]:
        """What goes with the differences: logs that no metric gives are those of this batch alone."""
        own = {name: value for name, value in found.logs.items() if found.measured.get(name) != value}
        before, self._traffic = self._traffic, sum(self._client.traffic)
        about = {"rows": rows, "names": list(found.logs), "logs": own, "bytes": self._traffic - before}
        return about | {"no_sums": sorted(self._no_sums)}

    def _pulled(self, batch: Any, place: BatchPart | None) -> dict[str, Any]:
        """The newest values; of embeddings those rows that the batch needs."""
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        rows = self._touched.needed(x)
        found = self._client.pull(rows, at_least=place.round if place else 0, takes_part=place is None)
        values = self._touched.whole(found, rows)
        if not self._touched.is_decided:
            self._touched.decide(values, x, lambda them: vars(self._compute(them, self._others, self._zero, batch)))
        return values

    def _compute(self, values: Mapping[str, Any], others: Values, metrics: Values, batch: Any) -> GradientResult:
        return self._step(values, others, metrics, batch, max(self._client.versions, default=0))

    def _batch(self, about: Mapping[str, Any]) -> Any:
        if about["pass"] != self._pass:
            self._batches.begin(self._desk.ask(self._call, about["pass"])[0])
            self._pass = about["pass"]
        return self._batches.batch(about["batch"], about["lowest"])

    def _take_over(self, about: Mapping[str, Any], newest: Mapping[str, np.ndarray]) -> None:
        """The chief's values of what is not trained."""
        if about["state"] != self._state:
            what, arrays = self._desk.ask(self._call, STATE)
            self._state, self._first_update = what["number"], what["update"]
            self._others = [arrays[str(number)] for number in range(len(self._merges))]
        self._others = DeltaAccumulator.taken_over(self._others, newest)

    def _learned_from(self, values: Mapping[str, Any], batch: Any) -> SeedOffsets:
        """See from one step, and the same again, how many random numbers a step draws, and which metrics add up."""
        if self._draws is not None:
            return self._draws
        first = self._compute(values, self._others, self._zero, batch)
        second = self._compute(values, self._others, first.metrics, batch)
        three = zip(first.metrics, self._zero, second.metrics, strict=True)
        self._no_sums = frozenset(number for number, each in enumerate(three) if not is_sum(*each))
        self._draws = SeedOffsets(self._merges, first.others, self._others)
        return self._draws
