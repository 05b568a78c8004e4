"""A worker's step: the gradient of one batch, and what else the step has changed. Keras's ``train_step``, or the user's, computes it.

While the step is traced, the optimizer's ``stateless_apply`` hands the gradients on instead of applying them: they come out where new
values of the variables would.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep.parameters.shards import Spec
from lockstep.resume.variables import variables_of
from lockstep.step.functions import StepFunctions
from lockstep.step.gate import Gate
from lockstep.step.plans import Plan

__all__ = ["Computed", "GradientStep", "names_of", "specs_of"]

Values = Sequence[np.ndarray]


@dataclass(frozen=True)
class Computed:
    """What one step gives.

    Args:
        gradients: of the trainable variables, by name.
        logs: as ``train_step`` returned them.
        measured: what the metrics alone say, by the names of the logs.
        others: new values of the variables that are not trained.
        metrics: new values of the metrics' variables.
    """

    gradients: dict[str, np.ndarray]
    logs: dict[str, Any]
    measured: dict[str, Any]
    others: list[np.ndarray]
    metrics: list[np.ndarray]


class GradientStep:
    """The step of one worker, on its own devices.

    Args:
        model: is built and compiled.
        functions: of the model.
        plan: how the worker's devices run a step.

    Raises:
        ModelError: when it is first called: the model's ``train_step`` does not apply its optimizer once by ``stateless_apply``.
    """

    def __init__(self, model: keras.Model, functions: StepFunctions, plan: Plan) -> None:
        self._model, self._names = model, names_of(model)
        self._keras_step = functions.step_by(plan, "train")
        self._run = plan.compile(self._traced, "train", _Open(donated=False))
        _, _, optimizer, _ = variables_of(model)
        self._optimizer = [np.asarray(variable.value) for variable in optimizer]
        counts = [number for number, one in enumerate(optimizer) if one is model.optimizer.iterations]
        self._iterations = counts[0] if counts else None  # None where gradients are accumulated: it is computed then.

    def __call__(
        self, values: Mapping[str, Any], others: Values, metrics: Values, batch: Any, version: int
    ) -> Computed:
        """Compute; nothing is changed.

        Args:
            values: of the trainable variables, by name.
            others: of those that are not trained.
            metrics: of the metrics' variables.
            batch: as Keras hands it to ``train_step``, on the host.
            version: number of updates in the values.
        """
        optimizer = list(self._optimizer)
        if self._iterations is not None:
            optimizer[self._iterations] = np.asarray(version, optimizer[self._iterations].dtype)
        trainable = [values[name] for name in self._names]
        found, state = self._run((trainable, list(others), optimizer, list(metrics)), batch)
        logs, measured = found
        gradients, others, _, metrics = [[np.asarray(array) for array in part] for part in state]
        named = dict(zip(self._names, gradients, strict=True))
        return Computed(named, _on_host(logs), _on_host(measured), list(others), list(metrics))

    def _traced(self, state: Any, batch: Any) -> tuple[Any, Any]:
        with _gradients_instead(self._model.optimizer) as times:
            logs, new = self._keras_step(state, batch)
        if len(times) != 1:
            raise ModelError(
                f"{type(self._model).__name__}.train_step called optimizer.stateless_apply {len(times)} times; with variables on "
                f"servers it must do so once, and return what that gives as the new trainable variables."
            )
        pairs = list(zip(self._model.metrics_variables, new[3], strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            measured = self._model.get_metrics_result()
        return (logs, measured), new


class _Open(Gate):
    """Lets the new state through, and leaves the old one its memory: tables of embeddings are used again."""

    def __call__(self, old: Any, new: Any, result: Any) -> Any:
        """The new state."""
        return new


def names_of(model: keras.Model) -> list[str]:
    """A name of its own for each trainable variable: its path, with a number where another one has the same."""
    names: list[str] = []
    for variable in model.trainable_variables:
        twins = sum(name.partition("#")[0] == variable.path for name in names)
        names.append(f"{variable.path}#{twins + 1}" if twins else variable.path)
    return names


def specs_of(model: keras.Model) -> list[Spec]:
    """The trainable variables of a model, in their order."""
    pairs = zip(names_of(model), model.trainable_variables, strict=True)
    return [Spec(name, tuple(variable.shape), str(variable.dtype)) for name, variable in pairs]


def _on_host(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value).tolist() for name, value in keras.tree.map_structure(np.asarray, dict(logs)).items()
    }


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
