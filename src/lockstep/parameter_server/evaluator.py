"""``fit`` on the evaluator: it evaluates the servers' values after each epoch, while the workers train."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import ClusterError
from lockstep._keras.trainer import variables_of
from lockstep.parameter_server.gradient_step import names_of
from lockstep.parameter_server.task_client import CallEnded, Published, TaskClient
from lockstep.parameter_server.variable_client import VariableClient
from lockstep.parameter_server.worker_fit import NEWEST_EPOCH, epoch_key


def run_evaluator(
    model: keras.Model,
    validation_data: Any,
    task_client: TaskClient,
    client: VariableClient,
    call: int,
    log: Callable[[str], None],
) -> Published:
    """Evaluate the servers' values, which the model gets, after each epoch, if there are validation data.

    Epochs that end during an evaluation are skipped, except the last one.

    Returns:
        The result of the call.
    """
    number = evaluated = 0
    try:
        while True:
            task_client.wait_for(call, epoch_key(number))
            newest, non_trainable = task_client.wait_for(call, NEWEST_EPOCH)
            number = newest["number"] + 1
            if validation_data is not None:
                values = client.pull(will_push=False)
                trainable, others = [values[name] for name in names_of(model)], _numbered(non_trainable, "")
                updates = newest["steps_before"] + max(client.versions)
                when = f"{newest['epoch'] + 1} and {updates} updates"
                _evaluate(model, validation_data, trainable, others, when, log)
                evaluated = newest["epoch"] + 1
    except CallEnded as ended:
        result = ended.result
    except ClusterError:
        result = task_client.wait_for_end(call)  # Servers stop when the call ends; the chief reports a lost one.
    last = max(result.what.get("epoch", []), default=-1) + 1
    if validation_data is not None and last > evaluated:
        trainable, others = _numbered(result.arrays, "trainable/"), _numbered(result.arrays, "non_trainable/")
        if not trainable:
            log(f"evaluator: did not evaluate epoch {last}, the last one: the chief holds the weights of a later call")
        else:
            _evaluate(model, validation_data, trainable, others, f"{last}, the last one", log)
    return result


def _evaluate(
    model: keras.Model,
    data: Any,
    trainable: Sequence[np.ndarray],
    non_trainable: Sequence[np.ndarray],
    when: str,
    log: Callable[[str], None],
) -> None:
    """Evaluate a model on the values that its variables had after an epoch, and log the result."""
    kinds = variables_of(model)
    for variable, value in [*zip(kinds[0], trainable, strict=True), *zip(kinds[1], non_trainable, strict=True)]:
        variable.assign(value)
    logs = model.evaluate(data, verbose=0, return_dict=True)
    texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in logs.items()}
    shown = " - ".join(f"val_{name}: {text}" for name, text in texts.items())
    log(f"evaluator, after epoch {when}: {shown}")


def _numbered(arrays: Mapping[str, np.ndarray], kind: str) -> list[np.ndarray]:
    """Return the arrays whose names are a kind and a number, by their numbers."""
    count = sum(name.startswith(kind) for name in arrays)
    return [arrays[f"{kind}{number}"] for number in range(count)]
