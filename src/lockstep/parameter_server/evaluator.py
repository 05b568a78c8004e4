"""What the evaluator does in a call of ``fit``: it evaluates the validation data after an epoch, while training goes on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ClusterError
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.gradient_step import names_of
from lockstep.parameter_server.tasks.task_client import CallEnded, TaskClient
from lockstep.parameter_server.variables.variable_client import VariableClient

__all__ = ["epoch_key", "look_on"]


def epoch_key(epoch: int) -> str:
    """Under what the chief tells of the end of an epoch, counted from 0."""
    return f"epoch {epoch}"


def look_on(
    model: keras.Model,
    validation_data: Any,
    desk: TaskClient,
    client: VariableClient,
    call: int,
    announce: Callable[[str], None],
) -> CallEnded:
    """Evaluate the values that the servers have, after each epoch; epochs that end meanwhile are left out, but for the last one.

    Args:
        model: is built and compiled; it gets the values.
        validation_data: as given to ``fit``; None: there is nothing to do.
        desk: the chief's.
        client: to the servers.
        call: number of the call.
        announce: takes a line for each evaluation.

    Returns:
        The end of the call.
    """
    look, epoch = _EvaluatorLoop(model, validation_data, announce), 0
    try:
        while True:
            what, others = desk.ask(call, epoch_key(epoch))
            epoch = what["epoch"] + 1
            newest, _ = desk.ask(call, "newest epoch")
            if newest["epoch"] < epoch and validation_data is not None:
                values = client.pull(takes_part=False)
                trainable = [values[name] for name in names_of(model)]
                look.at(trainable, _numbered(others, ""), epoch, f" and {max(client.versions)} updates")
    except CallEnded as found:
        over = found
    except ClusterError:
        over = desk.end_of(call)  # Servers stop when the call is over; else the chief says who was lost.
    last = max(over.result.get("epoch", []), default=-1) + 1
    if validation_data is not None and over.arrays and last > look.epoch:
        look.at(_numbered(over.arrays, "trainable/"), _numbered(over.arrays, "non_trainable/"), last, ", the last one")
    return over


class _EvaluatorLoop:
    """Evaluates, and tells what it has found.

    Args:
        model: gets the values.
        validation_data: as given to ``fit``.
        announce: takes a line.

    Attributes:
        epoch: after which it has looked last, counted from 1.
    """

    def __init__(self, model: keras.Model, validation_data: Any, announce: Callable[[str], None]) -> None:
        self._model, self._data, self._announce = model, validation_data, announce
        self.epoch = 0

    def at(self, trainable: Sequence[np.ndarray], others: Sequence[np.ndarray], epoch: int, more: str) -> None:
        """Look at the values of what is trained and of what is not, as they were after an epoch."""
        kinds = variables_of(self._model)
        for variable, value in [*zip(kinds[0], trainable, strict=True), *zip(kinds[1], others, strict=True)]:
            variable.assign(value)
        logs = self._model.evaluate(self._data, verbose=0, return_dict=True)
        shown = " - ".join(f"val_{name}: {value:.4g}" for name, value in logs.items())
        self._announce(f"evaluator, after epoch {epoch}{more}: {shown}")
        self.epoch = epoch


def _numbered(arrays: Mapping[str, np.ndarray], kind: str) -> list[np.ndarray]:
    """Those whose names are a kind and a number, by their numbers."""
    count = sum(name.startswith(kind) for name in arrays)
    return [arrays[f"{kind}{number}"] for number in range(count)]
