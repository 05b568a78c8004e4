"""What a worker does for one scheduled function: its own values, ``train_on_batch`` on servers' variables, pull and push, its result."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import keras
import numpy as np

from lockstep._errors import InputError, ModelError, ScopeError
from lockstep.execution.replica import OutputMerge
from lockstep.parameter_server.gradient_step import GradientStep, names_of
from lockstep.parameter_server.per_worker import own_values
from lockstep.parameter_server.result_codec import encoded
from lockstep.parameter_server.scheduler_base import Arguments, TrainingModels
from lockstep.parameter_server.seed_offsets import SeedOffsets
from lockstep.parameter_server.state_deltas import DeltaAccumulator, differences, merges
from lockstep.parameter_server.state_sync import STATE
from lockstep.parameter_server.tasks.task_client import Task, TaskClient
from lockstep.parameter_server.tasks.task_dispatcher import Result
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["FunctionRunner", "number_of_push"]

_PUSHES = 2**20  # of one function, more than any makes

Values = list[np.ndarray]


def number_of_push(piece: int, push: int) -> int:
    """Under which number servers apply a push of a function, once, whoever does the function."""
    return piece * _PUSHES + push


class FunctionRunner:
    """One worker, from the first function on that is scheduled after a call of ``fit``.

    Args:
        model: whose variables the servers have.
        training: the strategy.
        desk: the chief's.
        call: number of the call.
        connect: gives the way to the servers.
        name: of this worker.
    """

    def __init__(
        self,
        model: keras.Model,
        training: TrainingModels,
        desk: TaskClient,
        call: int,
        connect: Callable[[], VariableClient],
        name: str,
    ) -> None:
        self._model, self._training, self._desk, self._call = model, training, desk, call
        self._connect, self._name = connect, name
        self._names, self._merges = names_of(model), merges(model)
        self._client: VariableClient | None = None
        self._step: GradientStep | None = None
        self._draws: SeedOffsets | None = None
        self._state, self._first = -1, 0
        self._base: Values = []
        self._piece: Task | None = None

    def do(self, piece: Task, function: Callable[..., Any], arguments: Arguments) -> Result:
        """Do one function."""
        self._piece, self._others, self._changed = piece, list[np.ndarray](), dict[str, np.ndarray]()
        self._steps = self._pushes = 0
        self._has_pulled = False
        name = function.__qualname__ if inspect.isroutine(function) else repr(function)
        try:
            with self._training.steps_by(self._model, self._train):
                args, kwargs = own_values(arguments)
                found = function(*args, **kwargs)
        except StopIteration as end:
            raise InputError(f"{name}: {self._name} has no more batches in its own data. Repeat them.") from end
        finally:
            self._piece = None
        if self._has_pulled:
            self.rest()
        return {}, encoded(found, name) | self._changed

    def pull(self, model: keras.Model) -> Values:
        """See :meth:`lockstep.ParameterServerStrategy.pull`."""
        self._check("pull", model)
        values = self._pulled()
        return [values[name] for name in self._names]

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """See :meth:`lockstep.ParameterServerStrategy.push`."""
        self._check("push", model)
        arrays = [np.asarray(gradient) for gradient in gradients]
        shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        if [array.shape for array in arrays] != shapes:
            raise ModelError(
                f"push: expected the gradients of the {len(shapes)} trainable variables of {model.name!r} in their order, of the shapes "
                f"{shapes}, got {[array.shape for array in arrays]}."
            )
        types = [variable.dtype for variable in model.trainable_variables]
        self._pushed([array.astype(dtype) for array, dtype in zip(arrays, types, strict=True)])

    def rest(self) -> None:
        """Nobody waits for this worker until it pulls again."""
        if self._client is not None:
            self._client.rest()

    def close(self) -> None:
        """End the connections."""
        if self._client is not None:
            with closing(self._client):
                self._client = None

    def _check(self, what: str, model: keras.Model) -> None:
        if self._piece is None:
            raise ScopeError(f"strategy.{what} is for scheduled functions: see lockstep.ClusterCoordinator.")
        if model is not self._model:
            raise ModelError(f"{what}: servers have the variables of {self._model.name!r}, not of {model.name!r}.")

    def _pulled(self) -> Mapping[str, np.ndarray]:
        if self._client is None:
            self._client = self._connect()
        self._has_pulled = True
        return self._client.pull()

    def _pushed(self, gradients: Sequence[np.ndarray]) -> None:
        if self._client is None or self._piece is None:
            raise ModelError("push: pull the values first: a gradient belongs to the values that it was computed with.")
        number, below = number_of_push(self._piece.number, self._pushes), number_of_push(self._piece.below, 0)
        self._pushes, self._has_pulled = self._pushes + 1, False
        named = dict(zip(self._names, gradients, strict=True))
        self._client.push(named, task=number, below=below).wait()

    def _train(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Keras's training step, on the servers' values."""
        if self._step is None:
            self._step = self._training.gradient_step(self._model)
        step, values = self._step, self._pulled()
        metrics = [np.asarray(value) for value in state[3]]
        version = max(self._client.versions, default=0) if self._client else 0
        if not self._steps:
            self._others = self._newest_others()
        if self._draws is None:
            found = step(values, self._others, metrics, batch, version)
            self._draws = SeedOffsets(self._merges, found.others, self._others)
        before = self._with_seeds()
        found = step(values, before, metrics, batch, version)
        self._pushed([found.gradients[name] for name in self._names])
        self._note(found.others, before)
        return found.logs, state

    def _newest_others(self) -> Values:
        """The chief's values of what is not trained."""
        piece = self._piece
        if piece is None:
            raise ScopeError("A training step was made after its scheduled function had ended.")
        if piece.what["state"] != self._state:
            what, arrays = self._desk.ask(self._call, STATE)
            self._state, self._first = what["number"], what["update"]
            self._base = [arrays[str(number)] for number in range(len(self._merges))]
        return DeltaAccumulator.taken_over(self._base, piece.arrays)

    def _with_seeds(self) -> Values:
        if self._draws is None or self._piece is None:
            return self._others
        return self._draws.seeded(self._others, self._piece.number - self._first, self._steps)

    def _note(self, after: Values, before: Values) -> None:
        """A step is done, which the next one of the same function finds done."""
        changed = differences((after, before), ([], []), frozenset())
        for key, array in changed.items():
            is_sum = key in self._changed and not key.startswith("new/")
            self._changed[key] = np.add(self._changed[key], array, dtype=array.dtype) if is_sum else array
        self._others = [
            old if merge is OutputMerge.SEED else new
            for merge, new, old in zip(self._merges, after, self._others, strict=True)
        ]
        self._steps += 1
