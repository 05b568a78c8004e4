"""A worker's training step: pull, compute a gradient on its own batch, push. Keras's ``train_step``, or the user's, is what computes.

While the step is traced, the optimizer's ``stateless_apply`` hands the gradients on instead of applying them: they come out where new
values of the variables would.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep.parameters.client import Part, Pushed, VariableClient
from lockstep.parameters.shards import Spec

__all__ = ["RemoteStep", "specs_of"]

State = tuple[
    list[Any], list[Any], list[Any], list[Any]
]  # As Keras has it: trainable, other, optimizer's and metrics' values.


class RemoteStep:
    """The step of one worker. Variables that are not trained, such as moving averages, stay the worker's own.

    Args:
        model: is built and compiled; its trainable variables are on the servers.
        client: to the servers.
    """

    def __init__(self, model: keras.Model, client: VariableClient) -> None:
        self._model, self._client = model, client
        self._names = [variable.path for variable in model.trainable_variables]
        variables = enumerate(model.optimizer.variables)
        self._iterations = next(number for number, one in variables if one is model.optimizer.iterations)
        self._pushed: Pushed | None = None
        self._step = jax.jit(self._traced)

    def __call__(
        self,
        state: State,
        batch: Any,
        *,
        weight: float = 1.0,
        part: Part | None = None,
        task: int | None = None,
    ) -> tuple[dict[str, Any], State]:
        """Do one step; does not wait until the gradient is applied.

        Args:
            state: of the model; its trainable values and the optimizer's are not used.
            batch: as Keras hands it to ``train_step``.
            weight: see :meth:`lockstep.parameters.client.VariableClient.push`.
            part: see there; in synchronous training the values are those before its round.
            task: see there.

        Returns:
            Logs and the state after the step, of which the trainable values are those before it.

        Raises:
            ClusterError: a server is lost, or this or the last gradient was not taken.
            ModelError: the model's ``train_step`` does not apply its optimizer once by ``stateless_apply``.
        """
        _, others, optimizer, metrics = state
        found = self._client.pull(at_least=0 if part is None else part.round, takes_part=part is None)
        self.wait()
        values = [found[name] for name in self._names]
        logs, (gradients, others, _, metrics) = self._step((values, others, optimizer, metrics), batch)
        pushed = {name: np.asarray(gradient) for name, gradient in zip(self._names, gradients, strict=True)}
        self._pushed = self._client.push(pushed, weight=weight, part=part, task=task)
        optimizer = list(optimizer)
        optimizer[self._iterations] = np.asarray(self._client.versions[0] + 1, optimizer[self._iterations].dtype)
        return logs, (values, others, optimizer, metrics)

    def wait(self) -> None:
        """Until the servers have taken the last gradient."""
        if self._pushed is not None:
            self._pushed.wait()
            self._pushed = None

    def _traced(self, state: State, batch: Any) -> tuple[dict[str, Any], State]:
        with _gradients_instead(self._model.optimizer) as times:
            result = self._model.train_step(state, batch)
        if len(times) != 1:
            raise ModelError(
                f"{type(self._model).__name__}.train_step called optimizer.stateless_apply {len(times)} times; with variables on "
                f"servers it must do so once, and return what that gives as the new trainable variables."
            )
        return result


def specs_of(model: keras.Model) -> list[Spec]:
    """The trainable variables of a model, in their order."""
    return [Spec(variable.path, tuple(variable.shape), str(variable.dtype)) for variable in model.trainable_variables]


@contextlib.contextmanager
def _gradients_instead(optimizer: keras.optimizers.Optimizer) -> Iterator[list[None]]:
    """Have the optimizer give gradients for new values, for the length of one trace; the list grows with each call."""
    times: list[None] = []

    def stateless_apply(optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]) -> Any:
        times.append(None)
        return list(grads), list(optimizer_variables)

    own = vars(optimizer)
    own["stateless_apply"] = stateless_apply
    try:
        yield times
    finally:
        del own["stateless_apply"]
