"""The values of a model in training, as the chief spreads them over servers and workers, and as it gets them back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from lockstep.parameter_server.gradient_step import names_of
from lockstep.parameter_server.state_deltas import DeltaAccumulator
from lockstep.parameter_server.tasks.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variables.optimizer_sharding import OptimizerState
from lockstep.parameter_server.variables.sharding import ShardingPlan
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["STATE", "State", "StateSync", "differs"]

STATE = "state"  # Under this the desk tells the values of what is not trained.

State = tuple[list[Any], list[Any], list[Any], list[Any]]  # trainable, other, optimizer's and metrics' values


class StateSync:
    """The chief's exchange with servers and workers.

    Args:
        model: is built and compiled.
        desk: where workers come.
        plan: where the variables are.
        client: to the servers.

    Attributes:
        totals: what is not trained, and the metrics.
        states: how often the values of what is not trained were told; the last one has this number.
    """

    def __init__(self, model: keras.Model, desk: TaskDispatcher, plan: ShardingPlan, client: VariableClient) -> None:
        self._model, self._desk, self._plan, self._client = model, desk, plan, client
        self._optimizer = OptimizerState(model.optimizer, plan)
        self.totals, self.states = DeltaAccumulator(model), 0

    def spread(self, changed: Sequence[bool], state: Sequence[Sequence[Any]], update: int, task: int) -> None:
        """Have everybody go on with other values; nobody works meanwhile.

        Args:
            changed: which parts of the state are others.
            state: all of them.
            update: number of updates until now.
            task: all pushes with smaller numbers are in it.
        """
        trainable, others, optimizer, metrics = [[np.asarray(value) for value in part] for part in state]
        self.totals.set(others, metrics)
        if changed[0] or changed[2]:
            values = dict(zip(names_of(self._model), trainable, strict=True))
            self._client.fill(values, self._optimizer.split(optimizer), version=update, task=task)
        if changed[1]:
            self.states += 1
            about = {"number": self.states, "update": update}
            self._desk.tell(STATE, about, {str(n): value for n, value in enumerate(others)})

    def newest(self) -> State:
        """The values of everything; nobody works meanwhile."""
        parts = [arrays for _, arrays in self._client.state()]
        values = _joined(self._plan, parts)
        trainable = [values[name] for name in names_of(self._model)]
        state = trainable, self.totals.others, self._optimizer.joined(parts), self.totals.metrics
        first, second, third, fourth = ([jax.numpy.asarray(value) for value in part] for part in state)
        return first, second, third, fourth


def differs(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Whether one of the values is another, to the bit."""
    pairs = zip(new, old, strict=True)
    return any(one is not other and np.asarray(one).tobytes() != np.asarray(other).tobytes() for one, other in pairs)


def _joined(plan: ShardingPlan, parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Each variable from its shards."""
    found = {}
    for name, shards in plan.shards.items():
        pieces = [parts[shard.server][shard.spec.name] for shard in shards]
        found[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return found
