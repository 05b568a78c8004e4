"""Model state in training on servers: the chief broadcasts and fetches it, workers report changes, and the chief adds them up.

A metric counts, and a moving average moves by a share of the way to the batch: what two workers have computed at the same time is the sum
of both changes, in any order. Of other state, such as a maximum, the newest value counts. The state of a seed generator at a step is
computed from the number of the step alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.execution.call_splitter import state_merge
from lockstep.execution.replica import StateMerge, replica_seed
from lockstep.parameter_server.array_transport import Arrays
from lockstep.parameter_server.gradient_step import Values, iterations_of, names_of
from lockstep.parameter_server.optimizer_sharding import OptimizerState
from lockstep.parameter_server.sharding import ShardingPlan
from lockstep.parameter_server.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variable_client import VariableClient, join_shards

_LEAST_SHARE = 0.01  # of a moving average that stays in a step; one of less is replaced by each batch
_TOLERANCE = 1e-2  # of the largest number of a change

STATE = "state"  # Key under which the chief publishes the values of non-trainable variables.
_METRIC, _OTHER, _NEW = "metric/", "other/", "new/"

StepState = tuple[Values, Values]  # values of the non-trainable variables and of the metrics' variables
State = tuple[list[Any], list[Any], list[Any], list[Any]]  # trainable, non-trainable, optimizer's and metrics' values


def merge_rules(model: keras.Model) -> list[StateMerge]:
    """Return for each non-trainable variable how the values of several parts of a batch are merged."""
    return [state_merge(variable) for variable in model.non_trainable_variables]


def compute_delta(new: np.ndarray, old: np.ndarray) -> np.ndarray | None:
    """Return what must be added to the old value; None if nothing has changed, or the dtype has no sum."""
    if new.dtype == bool or not _has_changed(new, old):
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        return np.subtract(new, old, dtype=new.dtype)


def compute_deltas(
    non_trainable: tuple[Values, Values],
    metrics: tuple[Values, Values],
    no_sums: frozenset[int],
    replaced: frozenset[int] = frozenset(),
) -> dict[str, np.ndarray]:
    """Return what a step has changed, as the arrays that a worker sends to the chief.

    Args:
        non_trainable: values of the non-trainable variables after and before the step.
        metrics: values of the metrics' variables after and before the step.
        no_sums: numbers of the metrics' variables that do not add up.
        replaced: numbers of the non-trainable variables whose changes do not add up.
    """
    found: dict[str, np.ndarray] = {}
    for number, (new, old) in enumerate(zip(*non_trainable, strict=True)):
        changed = None if number in replaced else compute_delta(new, old)
        if changed is not None and np.isfinite(changed).all():
            found[f"{_OTHER}{number}"] = changed
        elif _has_changed(new, old):
            found[f"{_NEW}{number}"] = new
    for number, (new, old) in enumerate(zip(*metrics, strict=True)):
        changed = new if number in no_sums else compute_delta(new, old)
        if changed is not None:
            found[f"{_METRIC}{number}"] = changed
    return found


def add_deltas(total: dict[str, np.ndarray], deltas: Arrays) -> None:
    """Add the changes of a further step to those of the steps before it, in place."""
    for key, array in deltas.items():
        kind, number = key[: key.index("/") + 1], key[key.index("/") + 1 :]
        if kind == _NEW:
            total.pop(f"{_OTHER}{number}", None)
            total[key] = array
        else:
            into = f"{_NEW}{number}" if kind == _OTHER and f"{_NEW}{number}" in total else key
            total[into] = np.add(total[into], array, dtype=array.dtype) if into in total else array


def _has_changed(new: np.ndarray, old: np.ndarray) -> bool:
    return new.tobytes() != old.tobytes()


def is_additive(first: np.ndarray, start: np.ndarray, second: np.ndarray) -> bool:
    """Return whether a metric's variable is a sum: the same step adds the same to any value.

    Args:
        first: the value after a step from ``start``.
        start: the value before.
        second: the value after the same step from ``first``.
    """
    if first.dtype == bool:
        return first.tobytes() == start.tobytes()
    return np.allclose(
        second.astype("float64") - first, first.astype("float64") - start, rtol=1e-3, atol=1e-5, equal_nan=True
    )


class Additivity:
    """Which changes of values add up, tested when a step first changes a value: the same step is made again, from what it has left.

    Args:
        rules: how the values of the non-trainable variables are merged, which tells which of them are seeds.

    Attributes:
        replaced: numbers of the non-trainable variables whose changes do not add up.
        no_sums: numbers of the metrics' variables that do not add up.
    """

    def __init__(self, rules: Sequence[StateMerge]) -> None:
        self._rules = rules
        self._tested, self._tested_metrics = {n for n, rule in enumerate(rules) if rule is StateMerge.SEED}, set[int]()
        self.replaced: frozenset[int] = frozenset()
        self.no_sums: frozenset[int] = frozenset()

    def observe(self, before: StepState, after: StepState, repeat: Callable[[Values, Values], StepState]) -> None:
        """Test the values that a step has changed, if they were not tested before.

        Args:
            before: values of the non-trainable variables and of the metrics' before the step.
            after: those after it.
            repeat: makes the step with other values of both; returns those after it.
        """
        changed = _changed_numbers(after[0], before[0]) - self._tested
        changed_metrics = _changed_numbers(after[1], before[1]) - self._tested_metrics
        if not changed and not changed_metrics:
            return
        if changed:
            three = zip(self._rules, before[0], after[0], strict=True)
            again, _ = repeat([old if rule is StateMerge.SEED else new for rule, old, new in three], before[1])
            self.replaced |= {n for n in changed if not moves_by_a_share(after[0][n], before[0][n], again[n])}
        if changed_metrics:  # With the state before the step, which what is measured may depend on.
            _, again = repeat(before[0], after[1])
            self.no_sums |= {n for n in changed_metrics if not is_additive(after[1][n], before[1][n], again[n])}
        self._tested |= changed
        self._tested_metrics |= changed_metrics


def _changed_numbers(new: Values, old: Values) -> set[int]:
    return {number for number, pair in enumerate(zip(new, old, strict=True)) if _has_changed(*pair)}


def moves_by_a_share(first: np.ndarray, start: np.ndarray, second: np.ndarray) -> bool:
    """Return whether a variable counts or averages: the same step changes it again by the same share of the change before.

    Args:
        first: the value after a step from ``start``.
        start: the value before.
        second: the value after the same step from ``first``.
    """
    if first.dtype == bool:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        change, again = (np.subtract(*pair, dtype="float64").ravel() for pair in ((first, start), (second, first)))
    if not (np.isfinite(change).all() and np.isfinite(again).all()):
        return False
    is_floating = jnp.issubdtype(first.dtype, jnp.inexact)
    rounding = 4 * float(jnp.finfo(first.dtype).eps if is_floating else 0) * np.abs(first.ravel().astype("float64"))
    if (np.abs(change) <= 4 * rounding).all():
        return True  # Too little to tell.
    share = change @ again / (change @ change)
    return bool(
        share > _LEAST_SHARE and (np.abs(again - share * change) <= _TOLERANCE * np.abs(change).max() + rounding).all()
    )


class DeltaAccumulator:
    """The chief's values of non-trainable variables and metrics.

    Attributes:
        non_trainable: values of the non-trainable variables.
        metrics: values of the metrics' variables.
        changing: numbers of those non-trainable variables that have ever changed, without seeds.
    """

    def __init__(self, model: keras.Model) -> None:
        self._merge_rules = merge_rules(model)
        self.non_trainable: list[np.ndarray] = []
        self.metrics: list[np.ndarray] = []
        self.changing: set[int] = set()

    def set(self, non_trainable: Sequence[Any], metrics: Sequence[Any]) -> None:
        """Replace all values."""
        self.non_trainable, self.metrics = [np.asarray(x) for x in non_trainable], [np.asarray(x) for x in metrics]

    def add(self, parts: Sequence[Arrays], weights: Sequence[float], no_sums: frozenset[int]) -> None:
        """Add what the parts of one batch have changed, in their order.

        Args:
            parts: for each part, the result of :func:`compute_deltas`.
            weights: numbers of rows.
            no_sums: numbers of the metrics' variables that do not add up: they get the value of the last part.
        """
        for number, value in enumerate(self.metrics):
            found = [part[f"{_METRIC}{number}"] for part in parts if f"{_METRIC}{number}" in part]
            if found:
                self.metrics[number] = found[-1] if number in no_sums else _sum([value, *found])
        for number, value in enumerate(self.non_trainable):
            key, new, rule = f"{_OTHER}{number}", f"{_NEW}{number}", self._merge_rules[number]
            if found := [part[new] for part in parts if new in part]:
                every = [
                    part[new] if new in part else _sum([value, part.get(key, np.zeros_like(value))]) for part in parts
                ]
                is_mean = rule is StateMerge.MEAN and value.dtype != bool
                self.non_trainable[number] = _merge(every, weights, rule) if is_mean else found[0]
            elif any(key in part for part in parts):
                own = [part.get(key, np.zeros_like(value)) for part in parts]
                self.non_trainable[number] = _sum([value, _merge(own, weights, rule)])
            else:
                continue
            if rule is not StateMerge.SEED:
                self.changing.add(number)

    def changing_values(self) -> dict[str, np.ndarray]:
        """Return the arrays that go with each task: the newest values of the variables that change."""
        return {f"{_OTHER}{number}": self.non_trainable[number] for number in sorted(self.changing)}


def with_changing_values(non_trainable: Values, newest: Arrays) -> list[np.ndarray]:
    """Return a worker's values, updated with those of :meth:`DeltaAccumulator.changing_values`."""
    return [newest.get(f"{_OTHER}{number}", value) for number, value in enumerate(non_trainable)]


def _merge(found: Values, weights: Sequence[float], rule: StateMerge) -> np.ndarray:
    """Return one change from those of all parts, merged as on the replicas of one process."""
    if rule is StateMerge.SUM:
        return _sum(found)
    if rule is not StateMerge.MEAN or len(found) == 1:
        return found[0]
    wide = np.promote_types(found[0].dtype, np.float32)
    total = _sum([one.astype(wide) * wide.type(weight) for one, weight in zip(found, weights, strict=True)])
    return (total / wide.type(sum(weights))).astype(found[0].dtype)


def _sum(values: Values) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = np.add(total, value, dtype=total.dtype)
    return total


class SeedOffsets:
    """What a step adds to the state of each seed generator, as observed in one step.

    Args:
        rules: how the values of the non-trainable variables are merged, which tells which of them are seeds.
        after: their values after that step.
        before: those before.
    """

    def __init__(self, rules: Sequence[StateMerge], after: Values, before: Values) -> None:
        three = zip(rules, after, before, strict=True)
        self._offsets = [compute_delta(new, old) if rule is StateMerge.SEED else None for rule, new, old in three]

    def apply(self, values: Values, steps: int, replica: int = 0) -> list[np.ndarray]:
        """Return the values with the seeds advanced by a number of steps.

        Args:
            values: values of the non-trainable variables, before all these steps.
            steps: number of steps before this one.
            replica: replica of the step; each draws other random numbers.
        """
        own = list(values)
        for number, offset in enumerate(self._offsets):
            if offset is not None:
                # A worker that was lost for a while may have a state that is newer than its step, whose result no longer counts.
                seed = own[number] + offset * np.asarray(steps).astype(offset.dtype)
                own[number] = np.asarray(replica_seed(jnp.asarray(seed), jnp.int32(replica)))
        return own


class FollowedState:
    """A worker's copy of the chief's values of non-trainable variables. It computes the seeds of each step.

    Args:
        rules: how the values are merged, which tells which of them are seeds.
        receive: waits for what the chief has published under ``STATE``.
    """

    def __init__(self, rules: Sequence[StateMerge], receive: Callable[[], tuple[Mapping[str, Any], Arrays]]) -> None:
        self._rules, self._receive = rules, receive
        self._number, self._first_step = -1, 0
        self._published: Values = []
        self._seed_offsets: SeedOffsets | None = None

    def newest(self, number: int, changing: Arrays) -> list[np.ndarray]:
        """Return the newest values, from the chief's last publication, of this number, and what has changed since."""
        if number != self._number:
            what, arrays = self._receive()
            self._number, self._first_step = what["number"], what["update"]
            self._published = [arrays[str(n)] for n in range(len(self._rules))]
        return with_changing_values(self._published, changing)

    def at_step(self, values: Values, make: Callable[[], Values], step: int, replica: int) -> list[np.ndarray]:
        """Return values with the seeds of a step.

        Args:
            values: values of the non-trainable variables.
            make: makes a step; called the first time, to learn how a step advances seeds.
            step: number of the step.
            replica: number of the worker's first replica. Each number draws other random numbers.
        """
        if self._seed_offsets is None:
            self._seed_offsets = SeedOffsets(self._rules, make(), values)
        return self._seed_offsets.apply(values, step - self._first_step, replica)


class StateSync:
    """Exchange of the model's state between the chief, servers and workers.

    Attributes:
        totals: values of non-trainable variables and metrics.
        states: how often the values of non-trainable variables were published; the last publication has this number.
        steps_before: number of steps that the optimizer had made before the first update of this call.
        optimizer_scalars: values of the optimizer's variables that are one number, such as the learning rate, by number of the variable,
            as they were sent to the servers last.
    """

    def __init__(
        self, model: keras.Model, dispatcher: TaskDispatcher, plan: ShardingPlan, client: VariableClient
    ) -> None:
        self._model, self._dispatcher, self._plan, self._client = model, dispatcher, plan, client
        self._optimizer = OptimizerState(model.optimizer, plan)
        self.totals, self.states, self.steps_before = DeltaAccumulator(model), 0, 0
        self.optimizer_scalars: dict[str, float] = {}

    def broadcast(self, changed: Sequence[bool], state: Sequence[Sequence[Any]], update: int, task: int) -> None:
        """Send the state to servers and workers; no task may run meanwhile.

        Args:
            changed: which kinds of the state have changed.
            state: all kinds of the state.
            update: number of updates until now.
            task: the pushes of all tasks with smaller numbers are in it.
        """
        trainable, non_trainable, optimizer, metrics = [[np.asarray(value) for value in kind] for kind in state]
        self.totals.set(non_trainable, metrics)
        if changed[0] or changed[2]:
            count = iterations_of(self._model)
            self.steps_before = 0 if count is None else int(optimizer[count]) - update
            values = dict(zip(names_of(self._model), trainable, strict=True))
            self.optimizer_scalars = {str(n): float(value) for n, value in enumerate(optimizer) if not value.ndim}
            self._client.fill(values, self._optimizer.split(optimizer), version=update, task=task)
        if changed[1]:
            self.states += 1
            message = {"number": self.states, "update": update}
            self._dispatcher.publish(STATE, message, {str(n): value for n, value in enumerate(non_trainable)})

    def fetch(self) -> State:
        """Return the newest state; no task may run meanwhile."""
        parts = self._client.state()
        values = {name: join_shards(shards, parts) for name, shards in self._plan.shards.items()}
        trainable = [values[name] for name in names_of(self._model)]
        state = trainable, self.totals.non_trainable, self._optimizer.join(parts), self.totals.metrics
        first, second, third, fourth = ([jax.numpy.asarray(value) for value in kind] for kind in state)
        return first, second, third, fourth


def differs(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Return whether the bits of one of the values differ."""
    pairs = zip(new, old, strict=True)
    return any(one is not other and np.asarray(one).tobytes() != np.asarray(other).tobytes() for one, other in pairs)
