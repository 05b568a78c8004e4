"""A worker's step: the gradient of one batch, and what else the step has changed. Keras's ``train_step``, or the user's, computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep.data.device_placement import Placement
from lockstep.execution.gradient_extraction import GradientPrograms
from lockstep.execution.train_functions import StepFunctions
from lockstep.execution.train_state import apply_changes
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.variables.sharding import VariableSpec

__all__ = ["GradientResult", "GradientStep", "names_of", "specs_of"]

Values = Sequence[np.ndarray]


@dataclass(frozen=True)
class GradientResult:
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
        placement: the worker's devices.

    Raises:
        ModelError: the model is not to be compiled; or, when it is called, its ``train_step`` makes more of an update than
            ``optimizer.stateless_apply`` does.
    """

    def __init__(self, model: keras.Model, functions: StepFunctions, placement: Placement) -> None:
        if model.run_eagerly or not model.jit_compile:
            raise ModelError(
                f"Model {model.name!r}: run_eagerly=True and jit_compile=False do not go with variables on servers, as gradients come out "
                "of a compiled step. Leave them out, or train it under a MirroredStrategy."
            )
        self._model, self._names, self._placement = model, names_of(model), placement
        self._keras_step = functions.build_step(functions.executor, "train")
        self._programs = GradientPrograms(self._measuring, model, placement, donated=False)
        _, _, optimizer, _ = variables_of(model)
        self._optimizer = [np.asarray(variable.value) for variable in optimizer]
        counts = [number for number, one in enumerate(optimizer) if one is model.optimizer.iterations]
        self._iterations = counts[0] if counts else None  # None where gradients are accumulated: it is computed then.

    def __call__(
        self, values: Mapping[str, Any], others: Values, metrics: Values, batch: Any, version: int
    ) -> GradientResult:
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
        state = [[values[name] for name in self._names], list(others), optimizer, list(metrics)]
        placed = self._placement.place(batch)
        program = self._programs.program_for(state, placed)
        pairs = zip(state, program.is_used, strict=True)
        read = [[value if is_read else None for value, is_read in zip(*pair, strict=True)] for pair in pairs]
        gradients, (logs, measured), changes = program(self._placement.put(read), placed)
        new = apply_changes((state[1], state[3]), changes)
        new_others, new_metrics = [[np.asarray(value) for value in part] for part in new]
        named = {name: np.asarray(gradient) for name, gradient in zip(self._names, gradients, strict=True)}
        return GradientResult(named, _on_host(logs), _on_host(measured), new_others, new_metrics)

    def _measuring(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Keras's step, with what its metrics alone say among the logs."""
        logs, new = self._keras_step(state, batch)
        pairs = list(zip(self._model.metrics_variables, new[3], strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            measured = self._model.get_metrics_result()
        return (logs, measured), new


def names_of(model: keras.Model) -> list[str]:
    """A name of its own for each trainable variable: its path, with a number where another one has the same."""
    names: list[str] = []
    for variable in model.trainable_variables:
        twins = sum(name.partition("#")[0] == variable.path for name in names)
        names.append(f"{variable.path}#{twins + 1}" if twins else variable.path)
    return names


def specs_of(model: keras.Model) -> list[VariableSpec]:
    """The trainable variables of a model, in their order."""
    pairs = zip(names_of(model), model.trainable_variables, strict=True)
    return [VariableSpec(name, tuple(variable.shape), str(variable.dtype)) for name, variable in pairs]


def _on_host(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value).tolist() for name, value in keras.tree.map_structure(np.asarray, dict(logs)).items()
    }
