"""Reads and sets the variables of a model in training, by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import CheckpointError
from lockstep._keras import trainer

__all__ = ["KINDS", "ModelVariables", "copies_of", "variables_of"]

KINDS = ("trainable", "non_trainable", "optimizer", "metrics")


class ModelVariables:
    """All variables of a compiled model, named by kind and number, such as ``optimizer/3``.

    Args:
        model: a compiled model.

    Attributes:
        state: the state after the last training step of the running epoch; Keras's own variables do not have it until the epoch ends.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.state: Any = None

    def named(self) -> dict[str, keras.Variable]:
        """The variables, in the order of a training step's state."""
        groups = zip(KINDS, variables_of(self._model), strict=True)
        return {f"{kind}/{number}": x for kind, group in groups for number, x in enumerate(group)}

    def copies(self, *kinds: str) -> dict[str, jax.Array]:
        """Copy the current values of some kinds of variables, or of all, as the next step reuses their memory."""
        named = self.named()
        if self.state is None or trainer.is_synced(self._model):
            values = {name: variable.value for name, variable in named.items()}
        else:
            values = dict(zip(named, (array for part in self.state for array in part), strict=True))
        chosen = {name: value for name, value in values.items() if not kinds or name.partition("/")[0] in kinds}
        return dict(zip(chosen, copies_of(list(chosen.values())), strict=True))

    def set(self, arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], source: str) -> None:
        """Set all variables.

        Args:
            arrays: the values by name.
            paths: paths of the variables from which the values were read.
            source: of the values, for messages.

        Raises:
            CheckpointError: a value is missing or of another shape; then no variable is changed.
        """
        named = self.named()
        for name, variable in named.items():
            kept = arrays.get(name)
            if kept is None or kept.shape != tuple(variable.shape):
                found = "nothing" if kept is None else f"{paths[name]} of shape {kept.shape}"
                raise CheckpointError(
                    f"{source} is of another model: for {variable.path} of shape {tuple(variable.shape)} it has {found}. Fix: build the "
                    "model as it was, or take another directory."
                )
        for name, variable in named.items():
            variable.assign(arrays[name])


def variables_of(model: keras.Model) -> list[list[keras.Variable]]:
    """The variables in the order of a training step's state."""
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    return [list(kind) for kind in kinds]


@jax.jit
def _copied(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


def copies_of(values: list[Any]) -> list[jax.Array]:
    """Copy arrays asynchronously on their devices; of an array that every device has, copy the first device's."""
    arrays = map(jnp.asarray, values)
    return _copied([x.addressable_shards[0].data if x.is_fully_replicated else x for x in arrays])
