"""What the evaluator does in a call of ``fit``: it evaluates the validation data after an epoch, while training goes on."""

from collections.abc import Callable
from typing import Any

import keras

from lockstep.asynchronous.step import names_of
from lockstep.parameters.client import VariableClient
from lockstep.parameters.working import CallOver, DeskClient
from lockstep.resume.variables import variables_of

__all__ = ["epoch_key", "look_on"]


def epoch_key(epoch: int) -> str:
    """Under what the chief tells of the end of an epoch, counted from 0."""
    return f"epoch {epoch}"


def look_on(
    model: keras.Model,
    validation_data: Any,
    desk: DeskClient,
    client: VariableClient,
    call: int,
    announce: Callable[[str], None],
) -> CallOver:
    """Evaluate the values that the servers have, after each epoch; epochs that end meanwhile are left out.

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
    epoch = 0
    try:
        while True:
            what, others = desk.ask(call, epoch_key(epoch))
            epoch = what["epoch"] + 1
            newest, _ = desk.ask(call, "newest epoch")
            if newest["epoch"] >= epoch or validation_data is None:
                continue
            values = client.pull(takes_part=False)
            for name, variable in zip(names_of(model), model.trainable_variables, strict=True):
                variable.assign(values[name])
            for number, variable in enumerate(variables_of(model)[1]):
                variable.assign(others[str(number)])
            logs = model.evaluate(validation_data, verbose=0, return_dict=True)
            shown = " - ".join(f"val_{name}: {value:.4g}" for name, value in logs.items())
            announce(f"evaluator, after epoch {epoch} and {max(client.versions)} updates: {shown}")
    except CallOver as over:
        return over
