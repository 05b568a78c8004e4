"""Evaluator in a call of ``fit``: evaluates the validation data after each epoch, while training continues."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ClusterError
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.gradient_step import names_of
from lockstep.parameter_server.tasks.task_client import CallEnded, CallResult, TaskClient
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["NEWEST_EPOCH", "epoch_key", "run_evaluator"]

NEWEST_EPOCH = "newest epoch"  # Key under which the chief publishes the number of the last finished epoch.


def epoch_key(epoch: int) -> str:
    """Return the key under which the chief publishes the end of an epoch, counted from 0."""
    return f"epoch {epoch}"


def run_evaluator(
    model: keras.Model,
    validation_data: Any,
    task_client: TaskClient,
    client: VariableClient,
    call: int,
    log: Callable[[str], None],
) -> CallResult:
    """Evaluate the servers' values after each epoch. Epochs that end during an evaluation are skipped, except the last one.

    Args:
        model: is built and compiled; it gets the values.
        validation_data: as given to ``fit``; None: there is nothing to do.
        task_client: of the chief's task dispatcher.
        client: of the servers.
        call: number of the call.
        log: takes a line for each evaluation.

    Returns:
        The result of the call.
    """
    evaluator, epoch = _Evaluator(model, validation_data, log), 0
    try:
        while True:
            what, non_trainable = task_client.wait_for(call, epoch_key(epoch))
            epoch = what["epoch"] + 1
            newest, _ = task_client.wait_for(call, NEWEST_EPOCH)
            if newest["epoch"] < epoch and validation_data is not None:
                values = client.pull(will_push=False)
                trainable = [values[name] for name in names_of(model)]
                updates = f" and {max(client.versions)} updates"
                evaluator.evaluate(trainable, _numbered(non_trainable, ""), epoch, updates)
    except CallEnded as ended:
        result = ended.result
    except ClusterError:
        result = task_client.wait_for_end(call)  # Servers stop when the call ends; the chief reports a lost one.
    last = max(result.result.get("epoch", []), default=-1) + 1
    if validation_data is not None and result.arrays and last > evaluator.epoch:
        trainable, others = _numbered(result.arrays, "trainable/"), _numbered(result.arrays, "non_trainable/")
        evaluator.evaluate(trainable, others, last, ", the last one")
    return result


class _Evaluator:
    """Evaluates a model on given values, and logs the result.

    Args:
        model: gets the values.
        validation_data: as given to ``fit``.
        log: takes a line.

    Attributes:
        epoch: number of the last evaluated epoch, counted from 1.
    """

    def __init__(self, model: keras.Model, validation_data: Any, log: Callable[[str], None]) -> None:
        self._model, self._data, self._log = model, validation_data, log
        self.epoch = 0

    def evaluate(
        self, trainable: Sequence[np.ndarray], non_trainable: Sequence[np.ndarray], epoch: int, suffix: str
    ) -> None:
        """Evaluate the values that the variables had after an epoch."""
        kinds = variables_of(self._model)
        for variable, value in [*zip(kinds[0], trainable, strict=True), *zip(kinds[1], non_trainable, strict=True)]:
            variable.assign(value)
        logs = self._model.evaluate(self._data, verbose=0, return_dict=True)
        shown = " - ".join(f"val_{name}: {value:.4g}" for name, value in logs.items())
        self._log(f"evaluator, after epoch {epoch}{suffix}: {shown}")
        self.epoch = epoch


def _numbered(arrays: Mapping[str, np.ndarray], kind: str) -> list[np.ndarray]:
    """Return the arrays whose names are a kind and a number, by their numbers."""
    count = sum(name.startswith(kind) for name in arrays)
    return [arrays[f"{kind}{number}"] for number in range(count)]
